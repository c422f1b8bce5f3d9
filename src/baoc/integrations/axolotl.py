"""Axolotl: a plugin that gives its trainer a ``BAOC``.

In the YAML file::

    plugins:
      - baoc.integrations.axolotl.BAOCPlugin
    baoc:
      memory: 0.5
"""

from __future__ import annotations

from typing import Any

from baoc.integrations.trainer import ForTrainer, arguments_of

_SECTION = "baoc"


def __getattr__(name: str) -> Any:
    """Axolotl imports a plugin by its name, and may be imported only then."""
    if name == "BAOCPlugin":
        return _plugin()
    if name == "BAOCArgs":
        return _arguments()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _plugin() -> type:
    from axolotl.integrations.base import BasePlugin

    class BAOCPlugin(BasePlugin):  # type: ignore[misc]
        def get_input_args(self) -> str:
            return f"{__name__}.BAOCArgs"

        def create_optimizer(self, cfg: Any, trainer: Any) -> Any:
            return ForTrainer()(trainer.model, trainer.args, **settings_of(cfg))

        def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
            # what trainers ask for, whether or not their version asks plugins for an optimizer
            trainer.optimizer_cls_and_kwargs = (ForTrainer, arguments_of(trainer.args) | settings_of(cfg))

    return BAOCPlugin


def settings_of(cfg: Any) -> dict[str, Any]:
    """The section ``baoc:`` of a configuration, as keywords of :class:`~baoc.BAOC`.

    >>> settings_of({"baoc": {"memory": 0.4}}), settings_of({})
    ({'memory': 0.4}, {})
    """
    return dict(cfg.get(_SECTION) or {})


def _arguments() -> type:
    from pydantic import BaseModel

    class BAOCArgs(BaseModel):  # type: ignore[misc]
        """What Axolotl's own check of the configuration lets through."""

        baoc: dict[str, Any] | None = None

    return BAOCArgs

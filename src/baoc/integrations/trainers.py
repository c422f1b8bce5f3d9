"""Frameworks that own the training loop: Hugging Face Trainer, Axolotl and Lightning.

To use Axolotl, add this to its YAML file::

    plugins:
      - baoc.integrations.BAOCPlugin
    baoc:
      memory: 0.5
      planner: {name: paper, warmup: 100}  # the default is {name: effects}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from baoc.integrations.common import spare_vectors, unwrap
from baoc.optimizer import BAOC
from baoc.planners.base import Planner
from baoc.planners.effects import EffectPlanner
from baoc.planners.paper.planner import PaperPlanner

PREFIX = "baoc/"
"""Prefix of the logged metrics."""
PLANNERS: dict[str, Callable[..., Planner]] = {"effects": EffectPlanner, "paper": PaperPlanner}
"""Planners by the name that Axolotl's YAML file gives them."""
_SECTION = "baoc"  # of Axolotl's YAML file


class ForTrainer:
    """Optimizer factory for ``Trainer(optimizer_cls_and_kwargs=(ForTrainer, {...}))``.

    If you pass the class ``BAOC`` itself, the Trainer builds two param groups without names. It passes the model to a
    factory instead, so plans have the model's parameter names. Norms and biases get no weight decay.

    The keywords are those of :class:`~baoc.BAOC`, such as ``memory`` and ``planner``. The Trainer does not pass ``lr``,
    ``betas``, ``eps`` and ``weight_decay`` from its ``TrainingArguments`` to a factory, so set them here. Axolotl
    passes its training arguments as the second argument; they are used for keywords that are not set.

    Example:
        >>> model = nn.Linear(64, 64)
        >>> optimizer = ForTrainer()(model, lr=1e-4, memory=0.5, verbose=False)
        >>> list(optimizer.plan.blocks[0].parameters)
        ['weight']
    """

    def __call__(self, model: nn.Module, training_arguments: Any = None, **settings: Any) -> BAOC:
        """Build the optimizer of a model.

        Args:
            model: The model.
            training_arguments: An object with the attributes of ``transformers.TrainingArguments``, for keywords that
                are not set.
            **settings: Keywords of :class:`~baoc.BAOC`.

        Returns:
            The optimizer. It has a param group without weight decay for norms and biases.
        """
        if training_arguments is not None:
            settings = arguments_of(training_arguments) | settings
        return spare_vectors(BAOC(model, **settings))


def arguments_of(training_arguments: Any) -> dict[str, Any]:
    """Return the AdamW settings of a ``TrainingArguments`` as keywords of :class:`~baoc.BAOC`.

    Args:
        training_arguments: An object with the attributes of ``transformers.TrainingArguments``.

    Returns:
        The keywords ``lr``, ``weight_decay``, ``eps`` and ``betas``.

    Example:
        >>> from types import SimpleNamespace
        >>> arguments_of(SimpleNamespace(learning_rate=1e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
        ...     adam_epsilon=1e-8))
        {'lr': 0.0001, 'weight_decay': 0.1, 'eps': 1e-08, 'betas': (0.9, 0.95)}
    """
    return {
        "lr": training_arguments.learning_rate,
        "weight_decay": training_arguments.weight_decay,
        "eps": training_arguments.adam_epsilon,
        "betas": (training_arguments.adam_beta1, training_arguments.adam_beta2),
    }


def log_metrics(trainer: Any) -> None:
    """Add ``optimizer.metrics()`` to the training logs of a Hugging Face Trainer.

    The metrics appear in the history, in TensorBoard and in W&B. The callback runs before the reporting callbacks, so
    that they see the added values.

    Args:
        trainer: A ``transformers.Trainer``.
    """
    from transformers import TrainerCallback

    class LogMetrics(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            unwrap(others["optimizer"]).metrics()  # the first call starts the recording of update sizes

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
            if "loss" not in logs:  # the log of an evaluation, or the summary at the end
                return
            found = {PREFIX + key: value for key, value in unwrap(others["optimizer"]).metrics().items()}
            logs.update(found)
            state.log_history[-1].update(found)

    trainer.callback_handler.callbacks.insert(0, LogMetrics())


def lightning_callback() -> Any:
    """Return a Lightning callback that logs ``optimizer.metrics()`` every ``log_every_n_steps`` steps.

    Returns:
        A callback for ``lightning.Trainer(callbacks=[...])``.
    """
    from lightning.pytorch import Callback

    class LogMetrics(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for optimizer in trainer.optimizers:
                unwrap(optimizer).metrics()  # the first call starts the recording of update sizes

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            if trainer.global_step % trainer.log_every_n_steps:
                return
            for optimizer in trainer.optimizers:
                found = unwrap(optimizer).metrics()
                pl_module.log_dict({PREFIX + key: value for key, value in found.items()})

    return LogMetrics()


def axolotl_settings(cfg: Any) -> dict[str, Any]:
    """Return the section ``baoc:`` of an Axolotl configuration as keywords of :class:`~baoc.BAOC`.

    Args:
        cfg: The configuration. In its section, ``planner`` is a name, or a mapping with a ``name`` and settings of that
            planner, because YAML has no objects.

    Returns:
        The keywords.

    Raises:
        ValueError: If the planner is unknown.

    Example:
        >>> axolotl_settings({"baoc": {"memory": 0.4}}), axolotl_settings({})
        ({'memory': 0.4}, {})
        >>> axolotl_settings({"baoc": {"planner": {"name": "paper", "warmup": 20}}})["planner"].warmup
        20
    """
    settings = dict(cfg.get(_SECTION) or {})
    if "planner" in settings:
        settings["planner"] = _planner(settings["planner"])
    return settings


def _planner(given: str | Mapping[str, Any] | Planner) -> Planner:
    if not isinstance(given, (str, Mapping)):
        return given
    own = {"name": given} if isinstance(given, str) else dict(given)
    name = own.pop("name", None)
    if name not in PLANNERS:
        raise ValueError(f"planner must have a name: {' or '.join(PLANNERS)}; got {name!r}.")
    return PLANNERS[name](**own)


def __getattr__(name: str) -> Any:
    # Axolotl imports its plugins by name. They subclass Axolotl's classes, so they exist only on request.
    if name == "BAOCPlugin":
        return _axolotl_plugin()
    if name == "BAOCArgs":
        return _axolotl_arguments()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _axolotl_plugin() -> type:
    from axolotl.integrations.base import BasePlugin

    class BAOCPlugin(BasePlugin):  # type: ignore[misc]
        """Lets Axolotl train with BAOC, by the section ``baoc`` of its YAML file."""

        def get_input_args(self) -> str:
            return f"{__package__}.BAOCArgs"

        def create_optimizer(self, cfg: Any, trainer: Any) -> Any:
            return ForTrainer()(trainer.model, trainer.args, **axolotl_settings(cfg))

        def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
            # Not every version of Axolotl calls create_optimizer. All of them read this attribute.
            trainer.optimizer_cls_and_kwargs = (ForTrainer, arguments_of(trainer.args) | axolotl_settings(cfg))

    return BAOCPlugin


def _axolotl_arguments() -> type:
    from pydantic import BaseModel

    class BAOCArgs(BaseModel):  # type: ignore[misc]
        """The section that Axolotl's validation of the YAML file accepts."""

        baoc: dict[str, Any] | None = None

    return BAOCArgs

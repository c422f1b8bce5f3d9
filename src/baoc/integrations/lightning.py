"""Lightning: the optimizer's metrics in the module's log."""

from __future__ import annotations

from typing import Any

from baoc.integrations.trainer import PREFIX
from baoc.integrations.unwrap import unwrap


def log_metrics() -> Any:
    """A callback for ``Trainer(callbacks=[...])`` that logs ``optimizer.metrics()`` as often as the Trainer logs."""
    from lightning.pytorch import Callback

    class LogMetrics(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for optimizer in trainer.optimizers:
                unwrap(optimizer).metrics()  # from now on updates are watched

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            if trainer.global_step % trainer.log_every_n_steps:
                return
            for optimizer in trainer.optimizers:
                found = unwrap(optimizer).metrics()
                pl_module.log_dict({PREFIX + key: value for key, value in found.items()})

    return LogMetrics()

"""Hugging Face Trainer: an optimizer with the model's own names, and its metrics in the Trainer's log."""

from __future__ import annotations

from typing import Any

from torch import nn

from baoc.configurator import BAOC
from baoc.integrations.groups import spare_vectors
from baoc.integrations.unwrap import unwrap

PREFIX = "baoc/"


class ForTrainer:
    """A factory for ``Trainer(optimizer_cls_and_kwargs=(ForTrainer, {...}))``.

    Given the class ``BAOC`` itself, the Trainer would hand it two groups without names. Given a factory, it hands over
    the model. The keywords are those of :class:`~baoc.BAOC`; ``lr``, ``betas``, ``eps`` and ``weight_decay`` are not
    taken from the ``TrainingArguments``, so pass them here. Norms and biases have no weight decay.

    Axolotl calls its factories with its training arguments in second place, and takes them from there.

    >>> model = nn.Linear(64, 64)
    >>> optimizer = ForTrainer()(model, lr=1e-4, memory=0.5, quiet=True)
    >>> list(optimizer.plan.blocks[0].parameters)
    ['weight']
    """

    def __call__(self, model: nn.Module, training_arguments: Any = None, **settings: Any) -> BAOC:
        if training_arguments is not None:
            settings = arguments_of(training_arguments) | settings
        return spare_vectors(BAOC(model, **settings))


def arguments_of(training_arguments: Any) -> dict[str, Any]:
    """What a ``TrainingArguments`` says of AdamW, as keywords of :class:`~baoc.BAOC`.

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
    """Have ``optimizer.metrics()`` in whatever a ``Trainer`` logs of its training: history, TensorBoard, W&B.

    The callback stands before those that report, so that they see what it adds.
    """
    from transformers import TrainerCallback

    class LogMetrics(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            unwrap(others["optimizer"]).metrics()  # from now on updates are watched

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
            if "loss" not in logs:  # of an evaluation, or of the end
                return
            found = {PREFIX + key: value for key, value in unwrap(others["optimizer"]).metrics().items()}
            logs.update(found)
            state.log_history[-1].update(found)

    trainer.callback_handler.callbacks.insert(0, LogMetrics())

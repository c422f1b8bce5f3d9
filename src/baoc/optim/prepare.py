"""Distributed checkpoints are read into tensors that exist already: how to prepare an optimizer for one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from baoc.optim.checkpoint import CARRIED, PLAN, CheckpointError
from baoc.optim.optimizer import BlockOptimizer


def prepare_for_load(
    optimizer: BlockOptimizer, checkpoint: str | os.PathLike[str] | Mapping[str, Any] | Any, prefix: str = ""
) -> None:
    """Take over the plan of a distributed checkpoint, so that its state can be read into this optimizer.

    ``torch.distributed.checkpoint`` reads into tensors that exist. So an optimizer must have the saved layout before it
    is asked for its state dict. This function reads only the plan and what belongs to it; load the state afterwards as
    usual.

    Warning:
        torch's reader unpickles the ``.metadata`` file and other objects of a distributed checkpoint, here as in
        ``dcp.load``, and a pickle can run code. Use only checkpoints from sources that you trust.

    Args:
        optimizer: a fresh optimizer, built as for training.
        checkpoint: what ``dcp.load`` takes, a path or a ``StorageReader``; or an optimizer's state dict in memory,
            flattened or not.
        prefix: the key of the optimizer's state dict in the checkpoint, if there are several.

    Raises:
        CheckpointError: the checkpoint has no plan.

    Example:
        >>> from torch import nn
        >>> from baoc import BlockOptimizer
        >>> trained, fresh = BlockOptimizer(nn.Linear(64, 64), plan="adamw-8"), BlockOptimizer(nn.Linear(64, 64))
        >>> prepare_for_load(fresh, trained.state_dict())
        >>> fresh.plan == trained.plan
        True
    """
    texts = _from_state_dict(checkpoint) if isinstance(checkpoint, Mapping) else _from_storage(checkpoint, prefix)
    if not texts.get(PLAN):
        raise CheckpointError(
            f"there is no plan in {checkpoint if isinstance(checkpoint, (str, os.PathLike)) else 'the checkpoint'}"
            f"{f' under {prefix!r}' if prefix else ''}. Was it saved with get_optimizer_state_dict of a baoc optimizer?"
        )
    empty = optimizer.state_dict()
    for group in empty["param_groups"]:
        group.update({key: text for key, text in texts.items() if key in group})
    optimizer.prepare_for_load({"state": {}, "param_groups": empty["param_groups"]})


def _from_state_dict(state_dict: Mapping[str, Any]) -> dict[str, str]:
    if isinstance(state_dict.get("param_groups"), list):
        found = [group for group in state_dict["param_groups"] if group.get(PLAN)]
        return {key: found[0][key] for key in CARRIED if found and key in found[0]}
    keys = {key: _key_of(key, state_dict) for key in CARRIED}
    return {key: state_dict[full] for key, full in keys.items() if full is not None}


def _from_storage(checkpoint: Any, prefix: str) -> dict[str, str]:
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    # unpickles .metadata; a safe reader would help little, because the caller's dcp.load unpickles it as well
    reader = filesystem.FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    stored = [key for key in reader.read_metadata().state_dict_metadata if key.startswith(prefix)]
    wanted: dict[str, Any] = {full: "" for key in CARRIED if (full := _key_of(key, stored)) is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # every rank reads by itself, on purpose
        state_dict_loader.load(wanted, storage_reader=reader, no_dist=True)
    return {key: text for key in CARRIED for full, text in wanted.items() if full.endswith(f".{key}")}


def _key_of(key: str, stored: Any) -> str | None:
    """Return the name under which a checkpoint has a key. If it is there for each parameter, all are the same."""
    return next((full for full in stored if "param_groups." in full and full.endswith(f".{key}")), None)

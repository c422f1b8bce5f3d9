"""What a checkpoint keeps of ``BAOC`` besides state and plan, and what holds when a script resumes from it.

Distributed checkpoints are read into tensors that exist already: :func:`prepare_for_load` makes room for them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from baoc.core.plan import Plan
from baoc.core.spec import Hyper, real_shape
from baoc.optim import groups
from baoc.optim.checkpoint import CARRIED, PLAN, CheckpointError, Prepared, positions_by_name
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.state import is_fresh
from baoc.planners.base import Planner, Progress, Session
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import REGIMES, ModelFacts
from baoc.planners.paper.planner import PaperPlanner
from baoc.planning import Run, Settings, typical_hyper

logger = logging.getLogger("baoc")

VERSION = 1
_TENSOR = "tensor"
_BUDGETS = ("memory", "host_memory")
_KIND = "planner"
_PLANNERS: dict[str, type[Any]] = {planner.__name__: planner for planner in (EffectPlanner, PaperPlanner)}
_NOT_PLANNED_BY = frozenset(  # settings that no plan depends on, or that only new samples follow
    {"warmup", "stable_within", "replan_every", "inherit", "sample_ratio", "sample_floor", "seed", "beta_m", "beta_v"}
)


def resumed(
    mine: Settings, requested: Mapping[str, Any], effective: Mapping[str, Any]
) -> tuple[Settings, dict[str, tuple[Any, Any]]]:
    """Return the settings of this script when it resumes a run.

    Where this script asks for what the run's script asked for, the run keeps what it had: ``replan`` may have changed
    it. Where it asks for something else, it gets that.

    Args:
        mine: settings that this script asks for.
        requested: settings that the run's script asked for.
        effective: settings that the run had when it was saved.

    Returns:
        The settings, and by name what this script overrules, as (had, gets).
    """
    own = mine.plain()
    planner, overruled = _resumed_planner(mine.planner, own, requested, effective)
    kept = {}
    for name in _BUDGETS:
        if own[name] == requested[name]:
            kept[name] = effective[name]
        elif own[name] != effective[name]:
            overruled[name] = effective[name], own[name]
    return Settings(dataclasses.replace(mine.budget, **kept), planner), overruled


def _resumed_planner(
    planner: Planner, mine: Mapping[str, Any], requested: Mapping[str, Any], effective: Mapping[str, Any]
) -> tuple[Planner, dict[str, tuple[Any, Any]]]:
    """Return the planner, and by name what this script overrules."""
    own = [name for name in mine if name not in (*_BUDGETS, _KIND)]
    kind = effective[_KIND]
    if mine[_KIND] != kind:
        if all(mine[name] == requested.get(name) for name in (_KIND, *own)) and kind in _PLANNERS:
            fields = {field.name for field in dataclasses.fields(_PLANNERS[kind])}
            return _PLANNERS[kind](**{name: effective[name] for name in fields}), {}
        return planner, {_KIND: (kind, mine[_KIND])}
    overruled = {}
    if requested[_KIND] != mine[_KIND]:  # ``replan`` had changed to this planner before the script did
        requested = {}
    for name in own:
        if mine[name] == effective[name]:
            continue
        try:
            if mine[name] != requested[name]:
                raise KeyError(name)
            planner = dataclasses.replace(planner, **{name: effective[name]})  # type: ignore[type-var]
        except (LookupError, TypeError, ValueError):  # also a function, of which a checkpoint has only the name
            overruled[name] = effective[name], mine[name]
    return planner, overruled


def tensors_of(session: Session) -> dict[str, Tensor]:
    """Return the tensors that the text of a run refers to."""
    tensors: dict[str, Tensor] = {}
    _without_tensors(session.state_dict(), tensors)
    return tensors


def write(run: Run, requested: Settings, positions: Mapping[str, str]) -> str:
    """Return a run as a text, without the tensors of :func:`tensors_of`.

    Args:
        run: the run.
        requested: settings that its script asks for.
        positions: of the parameters, by name. Checkpoints know parameters by their positions.
    """
    content = {
        "version": VERSION,
        "requested": requested.plain(),
        "effective": run.settings.plain(),
        "progress": dataclasses.asdict(run.progress),
        "is_stale": run.is_stale,
        "model": run.facts.plain()
        | {"roles": {positions[name]: role.value for name, role in run.facts.roles.items() if name in positions}}
        | {"splits": {positions[name]: each.plain() for name, each in run.facts.splits.items() if name in positions}},
        "planned": [positions[name] for name in run.planned if name in positions],
        "session": _without_tensors(run.session.state_dict(), {}),
    }
    return json.dumps(content)


def read(loaded: Prepared, mine: Settings, facts: ModelFacts, names: Sequence[str], planned: Sequence[str]) -> Run:
    """Return the run that goes on from a checkpoint.

    Args:
        loaded: the checkpoint. Without tensors if it is distributed and still to be read.
        mine: settings of this script.
        facts: about this script's model.
        names: of its parameters, in order. In the checkpoint they may have other ones.
        planned: those of them that are planned.

    Raises:
        CheckpointError: it is damaged.
    """
    params = dict(groups.named_params(loaded.param_groups))
    hyper, _ = typical_hyper(loaded.param_groups)
    if not loaded.planner:
        own = dict(zip(names, params))
        facts = facts.renamed(own)
        facts = dataclasses.replace(facts, hyper=hyper)
        return _read_foreign(
            loaded.plan, mine, facts, {own[name]: params[own[name]] for name in planned if name in own}
        )
    try:
        return _read(loaded, params, mine, hyper)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the planner's part of the checkpoint cannot be read ({type(error).__name__}: {error}): it is damaged. "
            "Load another one."
        ) from None


def _read(loaded: Prepared, params: Mapping[str, Tensor], mine: Settings, hyper: Hyper) -> Run:
    names = {position: name for name, position in positions_by_name(loaded.param_groups).items()}
    content = json.loads(loaded.planner)
    if content["version"] != VERSION:
        raise CheckpointError(
            f"the planner's part of the checkpoint has version {content['version']!r}, and this baoc reads version "
            f"{VERSION}. Resume with the baoc that wrote it."
        )
    if type(content["is_stale"]) is not bool:
        raise ValueError(f"is_stale is {content['is_stale']!r}")
    settings, overruled = resumed(mine, content["requested"], content["effective"])
    if overruled:
        told = ", ".join(f"{key}={new!r} (it had {old!r})" for key, (old, new) in overruled.items())
        logger.info("resumed with the settings of this script: %s", told)
    saved, planned = content["model"], {names[position]: params[names[position]] for position in content["planned"]}
    roles = {names[position]: role for position, role in saved["roles"].items()}
    splits = {names[position]: split for position, split in saved.get("splits", {}).items()}
    shapes = {name: real_shape(param) for name, param in planned.items()}
    facts = ModelFacts.from_plain({**saved, "roles": roles, "splits": splits}, shapes)
    session = settings.planner.start(planned, dataclasses.replace(facts, hyper=hyper))
    progress = _read_progress(content["progress"])
    is_stale = content["is_stale"] or not overruled.keys() <= _NOT_PLANNED_BY
    is_another = _KIND in overruled
    if not is_another:
        missing: list[str] = []
        state = _with_tensors(content["session"], loaded.samples, missing)
        if missing and (loaded.samples or not all(map(is_fresh, loaded.state.values()))):
            raise CheckpointError(
                f"the checkpoint refers to {len(missing)} tensors of sampled gradients that are not there: it is "
                "damaged, or was read into an optimizer without room for them. See baoc.prepare_for_load."
            )
        session.load_state_dict(state, planned)
    if settings.planner.reads_gradients and (is_another or (is_stale and not session.is_watching)):
        # there are no gradients to plan from: warm up again
        session = settings.planner.start(planned, dataclasses.replace(facts, hyper=hyper))
        progress = dataclasses.replace(progress, planned_at=progress.steps, failed=True)
    return Run(settings, facts, list(planned), session, progress, is_stale)


def _read_foreign(plan: Plan, mine: Settings, facts: ModelFacts, planned: Mapping[str, Tensor]) -> Run:
    """Go on from a checkpoint of an optimizer without a planner: the next step plans, or a warm-up begins."""
    regime = plan.settings.get("regime")  # trained weights do not tell how their run began
    shapes = {name: real_shape(param) for name, param in planned.items()}
    facts = dataclasses.replace(facts, shapes=shapes, regime=regime if regime in REGIMES else facts.regime)
    session = mine.planner.start(planned, facts)
    return Run(mine, facts, list(planned), session, is_stale=not mine.planner.reads_gradients)


def _read_progress(content: Mapping[str, Any]) -> Progress:
    steps, planned_at, failed = content["steps"], content["planned_at"], content["failed"]
    if type(steps) is not int or steps < 0 or not (planned_at is None or type(planned_at) is int):
        raise ValueError(f"{steps!r} steps, the last plan at {planned_at!r}")
    if type(failed) is not bool:
        raise ValueError(f"failed is {failed!r}")
    return Progress(steps, planned_at, failed)


def _without_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Replace tensors in nested values by references."""
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(each, tensors) for each in value]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Any], missing: list[str]) -> Any:
    """Replace references by tensors, or by ``None`` where there are none."""
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            if value[_TENSOR] not in tensors:
                missing.append(value[_TENSOR])
            return tensors.get(value[_TENSOR])
        return {key: _with_tensors(each, tensors, missing) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_tensors(each, tensors, missing) for each in value]
    return value


# ---- distributed checkpoints ----


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

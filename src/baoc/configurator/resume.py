"""What ``BAOC`` knows besides state and plan, as a text that travels with a checkpoint, and back.

Samples are tensors and lie in the state of the first trainable parameter, where every kind of checkpoint looks for
tensors; the text says how to read them. Parameters go by their positions, as in the plan that travels along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baoc.configurator.wishes import Wishes, is_count, is_number
from baoc.core.roles import Role
from baoc.optim.checkpoint import CheckpointError
from baoc.planning.risk import REGIMES
from baoc.profiling.facts import Facts
from baoc.profiling.sampling import HISTORY, Sampler

VERSION = 1
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SETTINGS = ("version", "ratio", "floor", "seed", "betas", "codec", "steps", "skipped")


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    steps: int = 0
    """Real ones, whatever their gradients were like."""
    since_plan: int | None = None
    """Steps since a plan was made, or tried; ``None`` in the first warm-up."""
    failed: bool = False
    """Whether it could not be made, so that it must be tried again."""
    stale: bool = False
    """Whether the plan is of other wishes, so that a new one is due before the next update."""
    diagnostics: NDArray[np.float64] | None = None  # (units, 5), when it was last asked whether they have settled

    def stepped(self) -> Progress:
        return replace(self, steps=self.steps + 1, since_plan=None if self.since_plan is None else self.since_plan + 1)

    def taken_back(self) -> Progress:
        """Without the last step, which was none."""
        return replace(self, steps=self.steps - 1, since_plan=None if self.since_plan is None else self.since_plan - 1)

    @property
    def of_plan(self) -> int:
        """Steps since the plan was made, or those of the warm-up, which has a plan of its own."""
        return self.steps if self.since_plan is None else self.since_plan


@dataclass(frozen=True)
class Run:
    """Everything of a run that goes on."""

    wishes: Wishes
    overruled: Mapping[str, tuple[Any, Any]]
    progress: Progress
    facts: Facts
    planned: list[str]  # names of the parameters that plans are made for
    sampler: Sampler | None


def tensors_of(sampler: Sampler) -> dict[str, dict[str, Tensor]]:
    """The live tensors of a sampler, device by device."""
    parts = sampler.state_dict()["parts"]
    return {str(i): {key: part[key] for key in part if key != "names"} for i, part in enumerate(parts)}


def renamed(sampler: Sampler, names: Mapping[str, str], params: Mapping[str, Tensor]) -> Sampler:
    """A sampler that goes on under other names of the same parameters."""
    state = sampler.state_dict()
    state["names"] = [names[name] for name in state["names"]]
    state["parts"] = [{**part, "names": [names[name] for name in part["names"]]} for part in state["parts"]]
    return Sampler.from_state_dict(state, params)


def write(
    asked: Wishes,
    wishes: Wishes,
    progress: Progress,
    facts: Facts,
    planned: Sequence[str],
    sampler: Sampler | None,
    positions: Mapping[str, str],
) -> str:
    """The text. ``positions`` are those of the parameters, by name."""
    samples = None
    if sampler is not None:
        state = sampler.state_dict()
        samples = {key: state[key] for key in _SETTINGS}
        samples |= {
            "names": [positions[name] for name in state["names"]],
            "parts": [[positions[name] for name in part["names"]] for part in state["parts"]],
        }
    diagnostics = progress.diagnostics
    content = {
        "version": VERSION,
        "asked": asked.plain(),
        "has": wishes.plain(),
        "progress": asdict(progress) | {"diagnostics": None if diagnostics is None else diagnostics.tolist()},
        "facts": asdict(facts)
        | {"roles": {positions[name]: role.value for name, role in facts.roles.items() if name in positions}},
        "planned": [positions[name] for name in planned if name in positions],
        "samples": samples,
    }
    return json.dumps(content)


def read(
    text: str,
    tensors: Mapping[str, Any],
    asked: Wishes,
    params: Mapping[str, Tensor],
    positions: Mapping[str, str],
    *,
    has_state: bool,
) -> Run:
    """A run from its text and its samples' tensors. ``positions`` are those of ``params``, by name.

    ``has_state``: the checkpoint has state of parameters, so samples that it speaks of must be there too.
    """
    names = {position: name for name, position in positions.items()}
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise CheckpointError(
                f"the checkpoint's planner has version {content['version']!r}, and this baoc reads version {VERSION}. "
                "Go on with the baoc that wrote it."
            )
        wishes, overruled = asked.resumed(content["asked"], content["has"])
        return Run(
            wishes,
            overruled,
            _read_progress(content["progress"]),
            _read_facts(content["facts"], names),
            [names[position] for position in content["planned"]],
            _read_sampler(content["samples"], tensors, params, names, has_state),
        )
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"what the checkpoint says of its planner cannot be read ({type(error).__name__}: {error}): it is damaged. "
            "Load another one."
        ) from None


def _read_progress(content: Mapping[str, Any]) -> Progress:
    steps, since = content["steps"], content["since_plan"]
    if not is_count(steps, 0) or not (since is None or is_count(since, 0)):
        raise ValueError(f"{steps!r} steps, {since!r} since the last plan")
    failed, stale = content["failed"], content["stale"]
    if not isinstance(failed, bool) or not isinstance(stale, bool):
        raise ValueError(f"{failed!r} and {stale!r} are not true or false")
    diagnostics = content["diagnostics"]
    if diagnostics is not None:
        diagnostics = np.array(diagnostics, dtype=np.float64)
        if diagnostics.ndim != 2:
            raise ValueError("diagnostics are not a table")
    return Progress(steps, since, failed, stale, diagnostics)


def _read_facts(content: Mapping[str, Any], names: Mapping[str, str]) -> Facts:
    roles = {names[position]: Role(role) for position, role in content["roles"].items()}
    tokens, intensity = content["tokens"], content["operations_per_byte"]
    if tokens is not None and not is_count(tokens, 1):
        raise ValueError(f"{tokens!r} tokens")
    if not (isinstance(intensity, (int, float)) and 0 < intensity < float("inf")):
        raise ValueError(f"{intensity!r} operations per byte")
    if content["regime"] not in REGIMES or not isinstance(content["device"], str):
        raise ValueError(f"the regime {content['regime']!r} on {content['device']!r}")
    return Facts(roles, content["regime"], tokens, content["device"], float(intensity))


def _read_sampler(
    saved: Mapping[str, Any] | None,
    tensors: Mapping[str, Any],
    params: Mapping[str, Tensor],
    names: Mapping[str, str],
    has_state: bool,
) -> Sampler | None:
    if saved is None:
        return None
    state = {key: saved[key] for key in _SETTINGS} | {"betas": tuple(saved["betas"])}
    state["names"] = [names[position] for position in saved["names"]]
    if not (is_count(saved["steps"], 0) and is_count(saved["skipped"], 0)):
        raise ValueError(f"{saved['steps']!r} sampled steps, {saved['skipped']!r} skipped")
    if len(saved["betas"]) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in saved["betas"]):
        raise ValueError(f"samples with the betas {saved['betas']!r}")
    if tensors:
        parts = [[names[position] for position in part] for part in saved["parts"]]
        state["parts"] = [{"names": part, **tensors[str(index)]} for index, part in enumerate(parts)]
        for part in state["parts"]:
            _check_samples(part, _DTYPES[state["codec"]])
        return Sampler.from_state_dict(state, params)
    if has_state and saved["steps"]:
        raise CheckpointError(
            f"the checkpoint says that {saved['steps']} steps were sampled, but their samples are not there: it is "
            "damaged, or was read into an optimizer without room for them. See baoc.lay_out_for."
        )
    settings = {key: state[key] for key in ("ratio", "floor", "seed", "betas", "codec")}
    return Sampler({name: params[name] for name in state["names"]}, **settings)


def _check_samples(part: Mapping[str, Any], dtype: torch.dtype) -> None:
    for key in ("first", "second", "previous", "history"):
        held, wanted = part[key], torch.float32 if key == "history" else dtype
        if not isinstance(held, Tensor) or held.dtype is not wanted or not bool(held.isfinite().all()):
            raise CheckpointError(f"the checkpoint's samples are damaged: {key!r} is not of finite {wanted} numbers.")
    if part["history"].shape[:2] != (2, HISTORY):
        raise CheckpointError(f"the checkpoint's samples are damaged: their history is not of {HISTORY} steps.")
    if bool((part["second"] < 0).any()):
        raise CheckpointError("the checkpoint's samples are damaged: a mean of squares is negative.")

"""One budget for all of training: weights, gradients, activations and state of a rank.

What a planner may spend is what the others leave, less what an update needs for a moment. It must not cast a model or
release its gradients by itself, so it says what that would free: :attr:`Total.advice`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from baoc.core.budget import is_per_rank, memory_budget, shown
from baoc.core.plan import Plan, PlanError
from baoc.core.spec import LOW_PRECISION, WEIGHT, Shape
from baoc.core.text import human_bytes, table

GRADIENTS = ("keep", "release")
WORKSPACE = "update workspace"
BASELINE = {"weights": 4.0, "low bits": 0.0, "gradients": 4.0, "state": 8.0, WORKSPACE: 0.0}
"""Bytes per parameter of AdamW in fp32."""


@dataclass(frozen=True)
class Tensors:
    """Elements of trained parameters on the rank that holds the most, and the bytes of all weights there."""

    numel: int
    wide: int  # elements of fp32 parameters
    weights: int  # bytes, frozen parameters included
    gradients: int  # bytes
    largest: int  # bytes of the largest gradient

    @property
    def frozen(self) -> int:
        """Bytes of weights that are not trained."""
        return self.weights - self.gradients

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, torch.dtype],
        rows: Mapping[str, int],
        frozen_bytes: int = 0,
    ) -> Tensors:
        """Count them.

        Args:
            shapes: global shape of each trained parameter.
            dtypes: their dtypes.
            rows: of sharded parameters, the most rows on a rank.
            frozen_bytes: bytes of weights that are not trained.

        Example:
            >>> Tensors.of({"w": (4, 8)}, {"w": torch.bfloat16}, {"w": 2})
            Tensors(numel=16, wide=0, weights=32, gradients=32, largest=32)
        """
        numels = {
            name: math.prod((rows[name], *shape[1:]) if name in rows else shape) for name, shape in shapes.items()
        }
        sizes = {name: numel * dtypes[name].to_real().itemsize for name, numel in numels.items()}
        wide = sum(numel for name, numel in numels.items() if dtypes[name] not in LOW_PRECISION)
        total = sum(sizes.values())
        return cls(sum(numels.values()), wide, total + frozen_bytes, total, max(sizes.values(), default=0))


@dataclass(frozen=True)
class Total:
    """A budget for everything on one rank.

    Args:
        total_memory: the budget, a size such as "20GiB" or bytes.
        tensors: the parameters.
        activations: bytes that the forward pass needs, as the user states them.
        gradients: "keep", or "release" if :func:`baoc.release_gradients` will be used.

    Raises:
        PlanError: the budget is not a size, or leaves nothing for state.

    Example:
        >>> tensors = Tensors.of({"w": (1024, 1024)}, {"w": torch.float32}, {})
        >>> Total("10MiB", tensors).room
        2097152
        >>> print(Total("10MiB", tensors).advice[1])
        baoc.release_gradients(optimizer), and gradients='release' here: frees 0 B
    """

    total_memory: int | str
    tensors: Tensors
    activations: int | str = 0
    gradients: str = "keep"

    def __post_init__(self) -> None:
        if self.gradients not in GRADIENTS:
            raise PlanError(f"gradients must be 'keep' or 'release', got {self.gradients!r}.")
        if self.room < 0:
            parts = {"weights": self.tensors.weights, "gradients": self.gradient_bytes, "activations": self._stated}
            told = ", ".join(f"{human_bytes(nbytes)} of {name}" for name, nbytes in parts.items() if nbytes)
            raise PlanError(
                f"total_memory={self.total_memory!r} is {human_bytes(self._total)} on each rank, but there are {told}: "
                f"{human_bytes(-self.room)} too much, without optimizer state. Change one of these: "
                f"{'; '.join(self.advice)}; shard the model over more ranks; or raise total_memory."
            )

    @property
    def _total(self) -> int:
        return _size(self.total_memory, "total_memory")

    @property
    def _stated(self) -> int:
        return _size(self.activations, "activations")

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that exist at once."""
        return self.tensors.largest if self.gradients == "release" else self.tensors.gradients

    @property
    def room(self) -> int:
        """Bytes that are left for state, low bits of weights included, and for the workspace of an update."""
        return self._total - self._stated - self.tensors.weights - self.gradient_bytes

    @property
    def advice(self) -> tuple[str, ...]:
        """One-line changes that only the user can make, and what each frees."""
        found = []
        if self.tensors.wide:
            freed = (
                2 * self.tensors.wide + (2 * self.tensors.wide if self.gradients == "keep" else 0) - self.tensors.wide
            )
            found.append(
                "baoc.to_low_precision(model, torch.bfloat16) before this optimizer: frees "
                f"{human_bytes(freed)} (weights and gradients, less 8-bit remainders)"
            )
        if self.gradients == "keep":
            freed = self.tensors.gradients - self.tensors.largest
            found.append(f"baoc.release_gradients(optimizer), and gradients='release' here: frees {human_bytes(freed)}")
        return tuple(found)

    def workspace(self, plan: Plan) -> int:
        """Return the bytes of an update's workspace for which activations leave no room."""
        return workspace_bytes(plan, self._stated, is_released=self.gradients == "release")

    def bytes_per_parameter(self, plan: Plan) -> dict[str, float]:
        """Return the bytes of each part per trained parameter of this rank."""
        parts = parts_of(plan, self.tensors.weights, self.gradient_bytes, self.workspace(plan))
        return {name: nbytes / max(1, self.tensors.numel) for name, nbytes in parts.items()}

    def table(self, plan: Plan) -> str:
        """Return what each part takes, and what it saves against AdamW with fp32 weights, as a table."""
        parts = self.bytes_per_parameter(plan)
        whole = human_bytes(round(sum(parts.values()) * self.tensors.numel))
        used = f"{whole} and {human_bytes(self._stated)} of activations, of {human_bytes(self._total)} on each rank"
        advice = (f"or: {line}" for line in self.advice)
        return "\n".join([table_of_parts(parts, self.tensors.numel), used, *advice])

    def memory(self, *, is_sharded: bool) -> str:
        """Return the budget for state that is left, as ``memory=`` takes it."""
        return f"{self.room}B/rank" if is_sharded else f"{self.room}B"


def workspace_bytes(plan: Plan, activations: int, *, is_released: bool) -> int:
    """Return the bytes of an update's workspace that count besides activations.

    Activations are free when an update begins, unless gradients are released: then it runs in the backward pass.

    Args:
        plan: the plan. What is updated on the host needs nothing on the device.
        activations: bytes of activations.
        is_released: whether gradients are released.
    """
    here = replace(plan, blocks=tuple(block for block in plan.blocks if not block.host))
    return here.workspace(one_by_one=True) if is_released else max(0, here.workspace_bytes - activations)


def beside_workspace(make: Callable[[int, bool], Plan], workspace: Callable[[Plan], int], room: int) -> Plan:
    """Return a plan whose state and workspace are within one budget.

    Args:
        make: returns the plan that leaves some bytes free, with or without rules that need workspace. They are left out
            where there would be no room for state.
        workspace: returns the bytes of a plan's workspace.
        room: bytes that state and workspace may take on a rank.

    Raises:
        PlanError: no plan fits.
    """
    free = 0
    try:
        while True:
            plan = make(free, True)
            needed = workspace(plan)
            if needed <= free or plan.device_bytes_per_rank + needed <= room:
                return plan
            free = needed
    except PlanError:
        if not free:
            raise
    plan = make(0, False)
    if plan.device_bytes_per_rank + workspace(plan) > room:
        raise PlanError(
            f"{human_bytes(room)} are left for state, but this planner's smallest plans need "
            f"{human_bytes(plan.device_bytes_per_rank)} and {human_bytes(workspace(plan))} of workspace for updates of "
            "whole matrices. Allow other update rules, or give it more memory."
        )
    return plan


def parts_of(plan: Plan, weights: int, gradients: int, workspace: int) -> dict[str, int]:
    """Return the bytes of each part on the rank that holds the most: workspace only if there is some."""
    low_bits = low_bits_bytes(plan)
    state = {"state": plan.device_bytes_per_rank - low_bits}
    parts = {"weights": weights, "low bits": low_bits, "gradients": gradients, **state}
    return {**parts, WORKSPACE: workspace} if workspace else parts


def table_of_parts(parts: Mapping[str, float], numel: int, others: Mapping[str, int] | None = None) -> str:
    """Return a table of bytes per parameter, and of what they are less than those of AdamW with fp32 weights.

    Args:
        parts: bytes per parameter of what :func:`parts_of` names.
        numel: how many parameters there are.
        others: bytes of parts that do not grow with the number of parameters, which follow the sum.
    """
    lines = [
        [name, f"{each:.2f}", human_bytes(round(each * numel)), f"{BASELINE[name] - each:+.2f}"]
        for name, each in parts.items()
    ]
    total = sum(parts.values())
    lines.append(["sum", f"{total:.2f}", human_bytes(round(total * numel)), f"{sum(BASELINE.values()) - total:+.2f}"])
    lines += [[name, "", human_bytes(nbytes), ""] for name, nbytes in (others or {}).items()]
    header = ["part", "bytes/param", "bytes", "saved/param"]
    return table(header, lines, right=header[1:])


def low_bits_bytes(plan: Plan) -> int:
    """Return the bytes of slot ``w`` on the rank that holds the most."""
    return sum(
        stored.nbytes
        for block in plan.blocks
        for name, shape in block.parameters.items()
        for stored in block.configuration.layout(shape, rows=plan.rows.get(name)).formats
        if stored.slot.name == WEIGHT.name
    )


def _size(value: Any, name: str) -> int:
    """Return a size in bytes; shares of AdamW16's state make no sense here."""
    if isinstance(value, float) or (isinstance(value, str) and ("%" in value or is_per_rank(value))):
        raise PlanError(f"{name} must be a size on each rank, such as '20GiB', or bytes; got {value!r}.")
    try:
        return memory_budget(value, 0, name)
    except PlanError as error:  # which would advise a share
        raise PlanError(
            f"{name} must be a size on each rank, such as '20GiB', or bytes, an int of 4096 to 2**62 (0 for none); "
            f"got {shown(value)}."
        ) from error

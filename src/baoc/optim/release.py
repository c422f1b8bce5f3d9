"""Released gradients: each parameter is updated in the backward pass, and its gradient is freed at once.

Clipping by the global norm needs all gradients before the first update. Two ways around that:

- *lagged*: the factor of tensor i is ``min(1, max_norm / sqrt(N - p_i + n_i))``, with the squared norm ``n_i`` of its
  new gradient, ``p_i`` of its last one, and ``N`` of all last ones. A gradient that explodes is clipped at once;
  the others know one step later. In the first step all gradients are taken to be as large per element as its own.
- *exact*: a first backward pass only measures norms, a second one updates (LOMO, https://arxiv.org/abs/2306.09782).
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import numbers
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from baoc.core.sharding import Ranks
from baoc.optim import checkpoint, kernels, low_bits
from baoc.optim.agreement import Peers
from baoc.optim.engine import collect_jobs
from baoc.optim.guard import look
from baoc.optim.kernels import graphs
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.members import Member
from baoc.optim.optimizer import BlockOptimizer

MODES = ("lagged", "exact")
_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_PART = 1 << 20  # as many 16-bit numbers are squared at a time: torch makes an fp32 copy of them


def release_gradients(
    optimizer: BlockOptimizer, max_norm: float | None = 1.0, *, mode: str = "lagged"
) -> ReleasedGradients:
    """Update parameters in the backward pass and free each gradient at once.

    Gradients then take the memory of the largest one instead of all. Call ``optimizer.step()`` after the backward pass
    as before: it only finishes the step. Do not clip gradients yourself: there are none left.

    Args:
        optimizer: a :class:`~baoc.BlockOptimizer` or :class:`~baoc.BAOC`. Shard the model with ``fully_shard`` first.
        max_norm: clip gradients to this global norm; ``None`` does not clip.
        mode: ``"lagged"`` clips by the new norm of each gradient and the last norms of the others. ``"exact"`` clips as
            ``torch.nn.utils.clip_grad_norm_`` does, with two backward passes: call ``release.backward(loss)`` instead
            of ``loss.backward()``.

    Returns:
        A handle. Its ``remove()`` ends the release; it is a context manager, too.

    Raises:
        ValueError: ``max_norm`` or ``mode`` is not one of these.
        RuntimeError: gradients of this optimizer cannot be released; says why, and what to do.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-8")
        >>> release = release_gradients(optimizer, max_norm=1.0)
        >>> model(torch.ones(8, 64)).square().mean().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
        >>> release.remove()
    """
    return ReleasedGradients(optimizer, max_norm, mode)


@dataclass
class _Step:
    """What is known of a step between its first gradient and ``optimizer.step()``."""

    members: tuple[Member, ...]
    ranks: tuple[Ranks, ...]
    index: dict[int, int] = field(init=False)  # of each parameter
    taken: set[int] = field(default_factory=set)  # updated parameters
    norms: dict[int, Tensor] = field(default_factory=dict)  # of new gradients, on their devices
    found: list[Tensor] = field(default_factory=list)  # of gradients that may be non-finite: see look
    bad: list[str] = field(default_factory=list)  # names of some that are
    factor: Tensor | None = None  # of all gradients, in exact mode
    is_admitted: bool = True

    def __post_init__(self) -> None:
        self.index = {id(member.param): index for index, member in enumerate(self.members)}


class ReleasedGradients:
    """What :func:`release_gradients` returns.

    Args:
        optimizer: the optimizer whose parameters are updated in the backward pass.
        max_norm: clip gradients to this total norm; ``None`` clips nothing.
        mode: how the norm is found before all gradients are known: see :func:`release_gradients`.

    Raises:
        ValueError: if ``mode`` is unknown or ``max_norm`` is not positive.
    """

    def __init__(self, optimizer: BlockOptimizer, max_norm: float | None, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}.")
        self._optimizer, self._max_norm, self._mode = optimizer, _checked(max_norm), mode
        self._refuse()
        self._handles: dict[int, Any] = {}
        self._norms: Tensor | None = None  # (tensors,), fp32: those of the last step
        self._others: Tensor | None = None  # (tensors,), fp64: for each tensor, the sum of the others' squares
        self._held = self._measuring = self._has_begun = False
        self._step: _Step | None = None
        self._lock = threading.RLock()  # autograd has a thread for each device
        optimizer._release = self
        checkpoint.reserve(optimizer.param_groups, checkpoint.NORMS)
        self.load(optimizer._saved_norms)
        self._follow()

    # ---- what a training loop calls ----

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """Compute gradients and update parameters: ``loss.backward()``, and in exact mode two of them.

        Args:
            loss: as in ``torch.Tensor.backward``, likewise the gradient.
            gradient: of a loss that is not a scalar.
        """
        if self._mode == "exact":
            step = self._begin()
            self._measuring = True
            try:
                loss.backward(gradient, retain_graph=True)  # type: ignore[no-untyped-call]
                self._measured(step)
            finally:
                self._measuring = False
            if not step.is_admitted:
                return
        loss.backward(gradient)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep gradients for a while: those of all micro-batches but the last.

        They add up in ``param.grad`` and take their usual memory. The backward pass of the last micro-batch, outside of
        this context, releases them one by one.

        Returns:
            A context manager.

        Raises:
            RuntimeError: in exact mode, whose first pass would have to keep them.

        Example:
            >>> model = torch.nn.Linear(8, 8)
            >>> optimizer = BlockOptimizer(model, lr=1e-3)
            >>> release = release_gradients(optimizer)
            >>> with release.hold():
            ...     (model(torch.ones(1, 8)).sum() / 2).backward()
            >>> (model(torch.ones(1, 8)).sum() / 2).backward()
            >>> optimizer.step()
        """
        if self._mode == "exact":
            raise RuntimeError(
                "hold() needs mode='lagged': the first pass of mode='exact' frees gradients, and those that are held "
                "would be lost. Use mode='lagged', or one backward pass for the sum of all micro-batches."
            )
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @property
    def norm(self) -> float | None:
        """The global norm of the last step's gradients before clipping; ``None`` before that, or without clipping."""
        return None if self._norms is None else float(torch.linalg.vector_norm(self._norms))

    def remove(self) -> None:
        """End the release: the next step is an ordinary one."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
        if self._optimizer._release is self:
            self._optimizer._release = None

    def __enter__(self) -> ReleasedGradients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # ---- in the backward pass ----

    def _receive(self, param: Tensor) -> None:
        """Measure the gradient of a parameter, or update the parameter with it, and free it. A hook of autograd."""
        if not self._held:
            with self._lock, torch.no_grad():
                self._use(param)

    def _use(self, param: Tensor) -> None:
        step = self._begin()
        index = step.index.get(id(param))
        if index is None:  # it has left the optimizer
            return
        if self._measuring:
            step.norms[index] = _norm(self._job(step.members[index]).grad)
        else:
            if self._mode == "exact" and step.factor is None:
                raise RuntimeError(
                    "mode='exact' needs two backward passes: call release.backward(loss) instead of loss.backward()."
                )
            self._take(step, index)
        param.grad = None

    def _begin(self) -> _Step:
        """Return the current step. A new one reads what may have changed since the last."""
        if self._step is not None:
            return self._step
        optimizer = self._optimizer
        if not self._has_begun:
            self._has_begun = True
            _refuse_scaler()
        optimizer._begin()
        optimizer.synchronize()
        members = optimizer._current_members()
        optimizer._check_low_bits()
        if self._others is not None and len(self._others) != len(members.all):
            self._norms = self._others = None
        optimizer._watch.begin(members.all, all_trained=True)
        self._step = _Step(members.all, members.ranks)
        return self._step

    def _take(self, step: _Step, index: int) -> None:
        """Update a parameter."""
        member = step.members[index]
        if index in step.taken:
            raise RuntimeError(
                f"parameter {member.name!r} has a second gradient before optimizer.step(), but was updated with the "
                "first. Call step() after each backward pass; for several micro-batches use release.hold(), and for "
                "several losses one backward pass for their sum. After a backward pass that was interrupted or out of "
                "memory, call optimizer.zero_grad() first. Reentrant activation checkpointing computes the "
                "gradient of a shared parameter in parts: use checkpoint(..., use_reentrant=False)."
            )
        job = self._job(member)
        if graphs.is_capturing(job.param.device):
            raise RuntimeError("released gradients cannot be in a CUDA graph. Step after each replay instead.")
        step.taken.add(index)
        self._optimizer._seen_weights = None  # of a step that is interrupted, none were seen
        if self._max_norm is not None:
            factor = self._clipping(step, index, job)
            if not factor.is_cpu or float(factor) != 1.0:  # a GPU must not wait to know
                job.grad.mul_(factor)
        kernel = self._optimizer._engine.kernel_for(job.param.device, [job])
        if kernels.run(kernel, [job], None):
            found = look([job], job.param.device)
            step.found.append(found)
            if found.is_cpu and bool(found[0]):
                step.bad.append(member.name)
        advance_ages([job])

    def _clipping(self, step: _Step, index: int, job: Job) -> Tensor:
        """Return the factor on a gradient."""
        assert self._max_norm is not None
        if step.factor is not None:
            return step.factor.to(job.grad.device)
        norm = step.norms[index] = _norm(job.grad)
        whole = job.place.numel(job.param)
        # of a shard: the other rows are taken to be as large, since ranks must not wait for each other in here
        square = norm.double().square() * (whole / max(1, job.grad.numel()))
        if self._others is None:
            total = square * (sum(math.prod(member.shape) for member in step.members) / max(1, whole))
        else:
            total = square + self._others[index].to(square.device)
        return (self._max_norm / (total.sqrt().float() + _EPS)).clamp(max=1.0)

    def _job(self, member: Member) -> Job:
        jobs = collect_jobs([member], self._optimizer.param_groups, self._optimizer.state)
        return next(iter(jobs.values()))[0]

    # ---- after it ----

    def abandon(self) -> None:
        """Forget a step that was not finished, in ``optimizer.zero_grad()``: its backward pass failed on the way."""
        self._step = None

    def _measured(self, step: _Step) -> None:
        """Turn the norms of a first pass into the factor of the second."""
        norms = self._norms = self._gathered(step)
        total = torch.linalg.vector_norm(norms)
        is_bad = (~norms.isfinite()).any()
        names = [member.name for member, norm in zip(step.members, norms.tolist()) if not math.isfinite(norm)]
        found = torch.stack((is_bad, torch.zeros_like(is_bad))).float()
        step.is_admitted = self._optimizer._guard.admits_found(found, step.ranks, names)
        most = math.inf if self._max_norm is None else self._max_norm
        step.factor = (most / (total + _EPS)).clamp(max=1.0)

    @torch.no_grad()
    def finish(self) -> bool:
        """Finish a step, in ``optimizer.step()``; return whether it was made.

        Returns:
            Whether the step was made; False if it was skipped.
        """
        step, optimizer = self._begin(), self._optimizer
        for member in step.members:
            if member.param.grad is not None:  # given by hand, or of a parameter that has just joined
                self._receive(member.param)
        self._step = None
        was_made = bool(step.taken)
        if self._mode == "lagged" and self._max_norm is not None and (was_made or step.ranks):
            norms = self._gathered(step)
            if self._norms is not None:
                norms = torch.where(norms.isfinite(), norms, self._norms)
            self._remember(norms.nan_to_num(0.0, 0.0, 0.0))
        if step.found:
            found = [each.to(step.found[0].device) for each in step.found]
            optimizer._guard.count(torch.stack(found).amax(0), step.bad)
        if was_made:
            optimizer._watch.end()
            optimizer._seen_weights = low_bits.sight(step.members)
            optimizer._steps += 1
        self._follow()
        return was_made

    def _gathered(self, step: _Step) -> Tensor:
        """Return the norms of all new gradients, shape (tensors,). A collective of ranks that share parameters."""
        device = step.members[0].param.device
        zero = torch.zeros((), dtype=torch.float32, device=device)
        norms = torch.stack([step.norms.get(index, zero).to(device) for index in range(len(step.members))])
        for ranks in step.ranks:
            shared = [index for index, member in enumerate(step.members) if member.place.ranks == ranks]
            norms[shared] = ranks.sum(norms[shared].double().square()).sqrt().float()
        return norms

    def _remember(self, norms: Tensor) -> None:
        squares = norms.double().square()
        self._norms, self._others = norms, (squares.sum() - squares).clamp(min=0.0)

    def _follow(self) -> None:
        """Hook every trainable parameter of the optimizer."""
        params = {id(member.param): member.param for member in self._optimizer.members() if member.param.requires_grad}
        for key in [key for key in self._handles if key not in params]:
            self._handles.pop(key).remove()
        for key, param in params.items():
            if key not in self._handles:
                self._handles[key] = param.register_post_accumulate_grad_hook(self._receive)  # type: ignore[no-untyped-call]

    # ---- checkpoints ----

    def text(self) -> str:
        """Return what the next step needs to know of the last, for a checkpoint."""
        return "" if self._norms is None else json.dumps(self._norms.tolist())

    def load(self, text: str) -> None:
        """Take over what :meth:`text` returned.

        Args:
            text: what it returned.
        """
        self._norms = self._others = self._step = None
        if text and self._mode == "lagged" and self._max_norm is not None:
            members = self._optimizer.members()
            self._remember(torch.tensor(json.loads(text), dtype=torch.float32, device=members[0].param.device))

    # ---- what is not possible ----

    def _refuse(self) -> None:
        """Raise where gradients cannot be released."""
        optimizer = self._optimizer
        if not isinstance(optimizer, BlockOptimizer):
            raise TypeError(
                f"release_gradients needs a BlockOptimizer or BAOC, got a {type(optimizer).__name__}. Pass the "
                "optimizer itself, not a framework's wrapper."
            )
        if optimizer._release is not None:
            raise RuntimeError(
                "the gradients of this optimizer are released already. Call remove() on that handle first."
            )
        obstacle = optimizer._obstacle_to_release
        if obstacle:
            raise RuntimeError(f"gradients cannot be released: {obstacle}")
        guard = optimizer._guard
        if guard.policy != "step" and self._mode != "exact":
            raise RuntimeError(
                f"on_nonfinite={guard.policy!r} has to see all gradients before the first update, but mode='lagged' "
                "updates each at once. Use mode='exact', which measures them in a first pass, or on_nonfinite='step'."
            )
        whole = next((member.name for member in optimizer.members() if member.place.ranks is None), None)
        if (guard.peers or Peers()).exist and whole is not None:
            raise RuntimeError(
                f"there are several ranks, and parameter {whole!r} is not sharded: each rank would update it with its "
                "own gradient, before they are averaged. DDP averages after the update and writes gradients back. "
                "Shard the model with fully_shard first, or keep gradients."
            )
        _refuse_scaler()


def _checked(max_norm: Any) -> float | None:
    """Return a norm as a plain number."""
    if max_norm is None:
        return None
    if isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats
            if float(max_norm) > 0:
                return float(max_norm)
    raise ValueError(f"max_norm must be a positive number, or None to clip nothing, got {max_norm!r:.80}.")


def _refuse_scaler() -> None:
    """Raise if this process scales losses.

    Nothing leads from an optimizer to its scaler, so this looks through all objects. It takes a fraction of a second.
    """
    gc.collect()  # a scaler that nothing uses any more does not count
    scalers = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
    if any(scaler.is_enabled() for scaler in scalers):
        raise RuntimeError(
            "released gradients do not work with a GradScaler: it divides gradients by its scale and looks for "
            "infinite ones after the backward pass, when they are used and gone. Use bf16, which needs no scaler, "
            "disable it (enabled=False), or keep gradients."
        )


def _norm(grad: Tensor) -> Tensor:
    """Return the norm of a gradient in fp32, as ``clip_grad_norm_`` computes it."""
    norm: Tensor
    if grad.dtype == torch.float32 or grad.numel() <= _PART or not grad.is_cpu:
        norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
    else:
        height = max(1, _PART * len(grad) // grad.numel())
        parts = [grad[start : start + height] for start in range(0, len(grad), height)]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p, dtype=torch.float32) for p in parts]))
    return norm

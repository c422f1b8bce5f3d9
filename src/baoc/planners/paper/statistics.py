"""Gradient statistics: what the sampled gradients of a warm-up were like, in one object or file.

They answer any budget later, without the model.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from baoc.core.block import MOST_NUMEL
from baoc.core.files import check_header, replaced
from baoc.core.roles import canonical_name
from baoc.core.spec import DEFAULT_BETAS, Shape, real_shape
from baoc.planners.model_facts import ModelFacts, TokenCounter
from baoc.planners.paper.coordinates import RATIO
from baoc.planners.paper.sampling import BETA_RHO, Sampler

FORMAT = "baoc.gradient-statistics"
VERSION = 1

Array = NDArray[np.float64]


class StatisticsError(ValueError):
    """A file that holds no gradient statistics, or statistics without a single step."""


@dataclass(frozen=True)
class TensorRecord:
    """The sampled gradients of one parameter at the end of the warm-up."""

    name: str
    shape: Shape
    grid: tuple[int, int, int]  # matrices, rows, columns; samples are its first entries, row by row
    first: Array  # (count,) EMA of gradients as in Eq. 3, which starts at zero
    second: Array  # (count,) EMA of squared gradients, likewise
    values: Array  # (count,) the parameter itself
    dots: Array  # (steps,) <g_t, g_t-1>; the first entry has no predecessor here
    squares: Array  # (steps,) |g_t|^2

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GradientStatistics:
    """Records of every parameter, in the model's order, and how they were taken.

    Args:
        records: by name.
        steps: that were observed.
        skipped: steps that had non-finite gradients.
        seed: of the choice of coordinates.
        ratio: the share of coordinates that was sampled.
        betas: beta_m and beta_v of Eq. 3.
        model: what else is known about the model.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(64, 64))
        >>> sampler = Sampler({"weight": weight})
        >>> weight.grad = torch.ones(64, 64)
        >>> _ = sampler.observe({"weight": weight})
        >>> statistics = GradientStatistics.from_sampler(sampler, {"weight": weight})
        >>> round(float(statistics.records["weight"].second.mean()), 6)  # an EMA that starts at zero
        0.001
    """

    records: Mapping[str, TensorRecord]
    steps: int
    skipped: int
    seed: int
    ratio: float
    betas: tuple[float, float]
    model: ModelFacts

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the model's parameters, in its own order."""
        return {name: record.shape for name, record in self.records.items()}

    @property
    def masses(self) -> tuple[float, float]:
        """What the EMAs of a constant 1 would be: divided by them, moments are means."""
        return 1 - self.betas[0] ** self.steps, 1 - self.betas[1] ** self.steps

    @classmethod
    def from_sampler(
        cls, sampler: Sampler, params: Mapping[str, Tensor], model: ModelFacts | None = None
    ) -> GradientStatistics:
        """Return what a sampler has seen. If parameters are sharded, all ranks must call it.

        Args:
            sampler: after at least one step.
            params: that it sampled.
            model: facts about the model; by default roles are read off the names.

        Raises:
            StatisticsError: no step was observed.
        """
        if not sampler.steps:
            raise StatisticsError(
                f"no gradients were observed ({sampler.skipped} steps had non-finite ones). Call step() with gradients "
                "before planning."
            )
        records = {}
        values = sampler.values(params)
        for name, stream in sampler.streams.items():
            records[name] = TensorRecord(
                name=name,
                shape=stream.coordinates.shape,
                grid=stream.coordinates.grid,
                first=_array(stream.first),
                second=_array(stream.second),
                values=_array(values[name]),
                dots=_array(stream.dots),
                squares=_array(stream.squares),
            )
        model = model or ModelFacts({name: real_shape(params[name]) for name in records})
        return cls(records, sampler.steps, sampler.skipped, sampler.seed, sampler.ratio, sampler.betas, model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file. An existing file is replaced only when the new one is complete.

        Args:
            path: the file.
        """
        records = []
        for record in self.records.values():
            fields = asdict(record)
            records.append({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in fields.items()})
        settings = {name: getattr(self, name) for name in ("steps", "skipped", "seed", "ratio", "betas")}
        content = {"format": FORMAT, "version": VERSION, "records": records, "model": self.model.plain(), **settings}
        with replaced(path) as file:
            torch.save(content, file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GradientStatistics:
        """Read a file.

        Args:
            path: the file.

        Returns:
            The gradient statistics.

        Raises:
            StatisticsError: the file is something else, or damaged.
        """
        source = repr(os.fspath(path))
        try:
            content: Any = torch.load(path, weights_only=True)
        except FileNotFoundError:
            raise
        except Exception:
            raise StatisticsError(f"{source} is not a file of gradient statistics.") from None
        check_header(content, "a file of gradient statistics", FORMAT, VERSION, StatisticsError, source)
        try:
            return cls._read(content)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise StatisticsError(
                f"the gradient statistics in {source} are damaged: {type(error).__name__}: {error}."
            ) from None

    @classmethod
    def _read(cls, content: Mapping[str, Any]) -> GradientStatistics:
        records = {record.name: record for record in map(_read_record, content["records"])}
        settings = {name: content[name] for name in ("steps", "skipped", "seed", "ratio")}
        for name, least in (("steps", 1), ("skipped", 0), ("seed", 0)):
            _check(type(settings[name]) is int and settings[name] >= least, name, settings[name])
        betas = tuple(content["betas"])
        _check(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "betas", betas)
        _check(0 < settings["ratio"] <= 1, "ratio", settings["ratio"])
        model = ModelFacts.from_plain(content["model"], {name: record.shape for name, record in records.items()})
        return cls(records, betas=betas, model=model, **settings)


def _read_record(saved: Mapping[str, Any]) -> TensorRecord:
    fields: dict[str, Any] = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in saved.items()}
    for key in ("shape", "grid"):
        fields[key] = tuple(fields[key])
        _check(all(type(size) is int and size >= 0 for size in fields[key]), key, fields[key])
        _check(math.prod(fields[key]) <= MOST_NUMEL, key, fields[key])
    record = TensorRecord(**fields)
    _check(isinstance(record.name, str) and len(record.grid) == 3, "grid", record.grid)
    for lists, most in (
        ((record.first, record.second, record.values), min(record.numel, math.prod(record.grid))),
        ((record.dots, record.squares), math.inf),
    ):
        for each in lists:
            is_array = isinstance(each, np.ndarray) and each.dtype == np.float64 and each.ndim == 1
            _check(is_array and len(each) == len(lists[0]) <= most, f"samples of {record.name!r}", len(lists[0]))
            _check(bool(np.isfinite(each).all()), f"samples of {record.name!r}", "not finite")
    for each in (record.second, record.squares):
        _check(bool((each >= 0).all()), f"samples of {record.name!r}", "negative squares")
    return record


def _check(is_right: bool, what: str, found: object) -> None:
    if not is_right:
        raise ValueError(f"{what} cannot be {found}")


def _array(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


# ---- statistics without BAOC: in a short warm-up, or beside a training loop of your own ----

logger = logging.getLogger("baoc")

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch)``: a scalar to call ``backward()`` on."""


class StatisticsCollector:
    """Samples the gradients of a training loop, with any optimizer.

    Args:
        params: a module, of which the trainable parameters are sampled, or parameters by name.
        ratio: share of each structural unit's coordinates that is sampled.
        seed: of the choice of coordinates.
        betas: beta_m and beta_v of the sampled moments.
        floor: sample at least this many coordinates of a unit, or all.
        beta_rho: the largest decay of the direction stability that plans will ask for.

    Raises:
        StatisticsError: if no parameter is trainable.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> collector = StatisticsCollector(model).attach(optimizer)
        >>> for _ in range(3):
        ...     model(torch.randn(2, 8)).square().mean().backward()
        ...     _ = optimizer.step()
        ...     optimizer.zero_grad()
        >>> collector.detach()
        >>> collector.steps, list(collector.statistics().records)
        (3, ['weight', 'bias'])
    """

    def __init__(
        self,
        params: nn.Module | Mapping[str, Tensor],
        *,
        ratio: float = RATIO,
        seed: int = 0,
        betas: tuple[float, float] = DEFAULT_BETAS,
        floor: int = 0,
        beta_rho: float = BETA_RHO,
    ) -> None:
        named = dict(params.named_parameters()) if isinstance(params, nn.Module) else dict(params)
        self._params = {canonical_name(name): param for name, param in named.items() if param.requires_grad}
        if not self._params:
            raise StatisticsError("there is nothing to sample: no parameter is trainable (requires_grad=True).")
        self._model = ModelFacts.of(params if isinstance(params, nn.Module) else self._params)
        self._tokens = TokenCounter(params) if isinstance(params, nn.Module) else None
        self._sampler = Sampler(self._params, ratio=ratio, floor=floor, seed=seed, betas=betas, beta_rho=beta_rho)
        self._handle: RemovableHandle | None = None

    @property
    def steps(self) -> int:
        """Steps observed so far; those with non-finite gradients do not count."""
        return self._sampler.steps

    def attach(self, optimizer: torch.optim.Optimizer) -> StatisticsCollector:
        """Observe before each ``optimizer.step()``. A closure computes its gradients too late to be seen.

        Args:
            optimizer: the optimizer that trains the parameters.

        Returns:
            This collector.

        Raises:
            RuntimeError: if it is attached already.
        """
        if self._handle is not None:
            raise RuntimeError("this collector is attached to an optimizer already. Call detach() first.")
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._observe_for_hook())
        return self

    def detach(self) -> None:
        """Stop observing. What was seen stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def observe(self) -> bool:
        """Sample the gradients as they are now. Return False if they are not finite and were skipped.

        Returns:
            Whether they were sampled.
        """
        finite = self._sampler.observe(self._params)
        if self._tokens is not None:  # one step tells
            self._model, self._tokens = self._model.with_tokens(self._tokens.stop()), None
        if not finite:
            logger.warning("skipped a step with non-finite gradients (%d so far)", self._sampler.skipped)
        return finite

    def statistics(self) -> GradientStatistics:
        """Return what was seen so far."""
        return GradientStatistics.from_sampler(self._sampler, self._params, self._model)

    def _observe_for_hook(self) -> None:
        self.observe()  # a hook's result would replace the arguments of step()


def record_steps(
    collector: StatisticsCollector,
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> GradientStatistics:
    """Train for a few steps and sample their gradients. See :func:`baoc.collect_statistics` for the arguments."""
    if steps < 1:
        raise StatisticsError(f"steps is {steps}; at least one gradient must be seen.")
    optimizer.zero_grad()
    taken = 0
    for batch in _cycle(batches, steps):
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise StatisticsError(f"the loss function returned {kind}. It must return a tensor with one element.")
        if not loss.requires_grad:
            raise StatisticsError("the loss does not depend on any trainable parameter, so it has no gradient.")
        loss.backward()  # type: ignore[no-untyped-call]
        if collector.observe():  # a non-finite step would spoil the weights, and with them all steps after it
            optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if on_step is not None:
            on_step(taken, steps, float(loss.detach()))
    if taken < steps:
        logger.warning("the batches ended after %d of %d steps; the statistics cover those.", taken, steps)
    return collector.statistics()


def _cycle(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Up to ``steps`` batches, starting over where that is possible."""
    taken = 0
    while taken < steps:
        before = taken
        source = iter(batches)
        for batch in source:
            yield batch
            taken += 1
            if taken == steps:
                return
        if not taken:
            raise StatisticsError("there are no batches: a warm-up needs at least one.")
        if taken == before or source is batches:  # used up
            return

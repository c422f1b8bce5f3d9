"""What a warm-up learned about a model, in one file: it answers any budget later, without the model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baoc.core.files import replaced
from baoc.core.roles import Role
from baoc.core.spec import Shape
from baoc.profiling.facts import FINETUNE, SCRATCH, Facts
from baoc.profiling.sampling import Sampler

FORMAT = "baoc.profile"
VERSION = 1

Array = NDArray[np.float64]


class ProfileError(ValueError):
    """A file that is not a profile, or a profile without observations."""


@dataclass(frozen=True)
class TensorRecord:
    """The sampled stream of one parameter at the end of the warm-up."""

    name: str
    shape: Shape
    grid: tuple[int, int, int]  # matrices, rows, columns; samples are its first entries, row by row
    first: Array  # (count,) mean gradient: the EMA of Eq. 3 divided by its mass
    second: Array  # (count,) mean squared gradient, likewise
    values: Array  # (count,) the parameter itself
    dots: Array  # (steps,) <g_t, g_t-1> of the last steps; the first entry has no predecessor here
    squares: Array  # (steps,) |g_t|^2, likewise

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def weight(self) -> float:
        """How many elements one sample stands for. Tensors below the floor are sampled more densely."""
        return self.numel / max(1, len(self.second))


@dataclass(frozen=True)
class Profile:
    """Records of every parameter, in the model's order, and how they were taken.

    >>> weight = torch.nn.Parameter(torch.ones(64, 64))
    >>> sampler = Sampler({"weight": weight})
    >>> weight.grad = torch.ones(64, 64)
    >>> _ = sampler.observe({"weight": weight})
    >>> profile = Profile.from_sampler(sampler, {"weight": weight})
    >>> round(float(profile.records["weight"].second.mean()), 2)
    1.0
    """

    records: Mapping[str, TensorRecord]
    steps: int
    skipped: int  # steps with non-finite gradients
    seed: int
    ratio: float
    betas: tuple[float, float]
    facts: Facts = field(default_factory=Facts)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The model's parameters, in its own order."""
        return {name: record.shape for name, record in self.records.items()}

    def with_names(self, rename: Callable[[str], str]) -> Profile:
        """The same records under other names."""
        facts = replace(self.facts, roles={rename(name): role for name, role in self.facts.roles.items()})
        return replace(self, records={rename(name): record for name, record in self.records.items()}, facts=facts)

    @classmethod
    def from_sampler(cls, sampler: Sampler, params: Mapping[str, Tensor], facts: Facts | None = None) -> Profile:
        """What a sampler has seen. Without ``facts``, roles are read off the names. If parameters are sharded, all
        ranks must ask.
        """
        if not sampler.steps:
            raise ProfileError(
                f"no gradients were observed ({sampler.skipped} steps had non-finite ones). Call step() with gradients "
                "before planning."
            )
        masses = [1 - beta**sampler.steps for beta in sampler.betas]  # a short warm-up would inflate the SNR otherwise
        records = {}
        values = sampler.values(params)
        for name, stream in sampler.streams.items():
            records[name] = TensorRecord(
                name=name,
                shape=stream.coordinates.shape,
                grid=stream.coordinates.grid,
                first=_array(stream.first) / masses[0],
                second=_array(stream.second) / masses[1],
                values=_array(values[name]),
                dots=_array(stream.dots),
                squares=_array(stream.squares),
            )
        facts = facts or Facts()
        return cls(records, sampler.steps, sampler.skipped, sampler.seed, sampler.ratio, sampler.betas, facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a profile's file. One that is there already stays until this one is complete."""
        records = []
        for record in self.records.values():
            fields = asdict(record)
            records.append({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in fields.items()})
        settings = {name: getattr(self, name) for name in ("steps", "skipped", "seed", "ratio", "betas")}
        with replaced(path) as file:
            facts = asdict(self.facts) | {"roles": {name: role.value for name, role in self.facts.roles.items()}}
            torch.save({"format": FORMAT, "version": VERSION, "records": records, "facts": facts, **settings}, file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile's file."""
        try:
            content: Any = torch.load(path, weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ProfileError(f"{os.fspath(path)!r} is not a profile: {type(error).__name__}.") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ProfileError(f'{os.fspath(path)!r} is not a profile: it has no "format": "{FORMAT}".')
        version = content.get("version")
        if version != VERSION:
            raise ProfileError(f"the profile has version {version}, and this baoc reads version {VERSION}.")
        try:
            return cls._read(content)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ProfileError(f"{os.fspath(path)!r} is a damaged profile: {type(error).__name__}: {error}.") from None

    @classmethod
    def _read(cls, content: Mapping[str, Any]) -> Profile:
        records = {record.name: record for record in map(_read_record, content["records"])}
        settings = {name: content[name] for name in ("steps", "skipped", "seed", "ratio")}
        for name, least in (("steps", 1), ("skipped", 0), ("seed", 0)):
            _check(type(settings[name]) is int and settings[name] >= least, name, settings[name])
        betas = tuple(content["betas"])
        _check(len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "betas", betas)
        _check(0 < settings["ratio"] <= 1, "ratio", settings["ratio"])
        return cls(records, betas=betas, facts=_read_facts(content.get("facts", {})), **settings)


def _read_record(saved: Mapping[str, Any]) -> TensorRecord:
    fields: dict[str, Any] = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in saved.items()}
    for key in ("shape", "grid"):
        fields[key] = tuple(fields[key])
        _check(all(type(size) is int and size >= 0 for size in fields[key]), key, fields[key])
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
        _check(bool((each >= 0).all()), f"samples of {record.name!r}", "squares below zero")
    return record


def _read_facts(saved: Mapping[str, Any]) -> Facts:
    """Older files have none, or fewer."""
    facts = Facts(**{**saved, "roles": {name: Role(role) for name, role in saved.get("roles", {}).items()}})
    _check(facts.regime in (SCRATCH, FINETUNE), "regime", facts.regime)
    _check(facts.tokens is None or (type(facts.tokens) is int and facts.tokens >= 1), "tokens", facts.tokens)
    _check(0 < facts.operations_per_byte < math.inf, "operations_per_byte", facts.operations_per_byte)
    return facts


def _check(is_right: bool, what: str, found: object) -> None:
    if not is_right:
        raise ValueError(f"{what} cannot be {found}")


def _array(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()

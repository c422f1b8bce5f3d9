"""A configuration: a mechanism with one codec per state slot, and its one spelling.

>>> configuration = parse("adamw-8")
>>> str(configuration)
'adamw[m=int8,v=int8]'
>>> configuration.state_bytes((768, 3072))
4792320
>>> parse(str(configuration)) == configuration
True
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch

from baoc.core.codecs import CODECS, Codec, Format
from baoc.core.mechanisms import MECHANISMS, Mechanism
from baoc.core.roles import Role, role_of
from baoc.core.spec import Buffer, Reach, Shape, Slot

_BITS_TO_CODEC = {32: "fp32", 16: "bf16", 8: "int8"}
_SPELLING = re.compile(r"(?P<mechanism>[a-z]+)(?:-?(?P<bits>32|16|8)|\[(?P<slots>[^\]]*)\])?")


class ConfigurationError(ValueError):
    """A configuration that cannot be spelled, or that makes no sense."""


@dataclass(frozen=True)
class Switches:
    """The paper's tuple (Definition 1), read off a configuration."""

    adaptive: bool
    momentum: bool
    decoupled: bool
    factored: bool
    bits: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Every byte that a configuration holds for one parameter, and what updates it."""

    configuration: Configuration  # after its mechanism's fallback for a tensor it is not made for
    shape: Shape  # of the whole parameter
    formats: tuple[Format, ...]  # one for each slot of the mechanism
    buffers: Mapping[str, Buffer]  # by their key in the optimizer's state

    mechanism: Mechanism = field(init=False)
    reach: Reach = field(init=False)
    shares: bool = field(init=False)
    """One element's gradient has a part in what happens to others."""
    nbytes: int = field(init=False)
    age_keys: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:  # not when first asked: torch.compile cannot trace that
        mechanism = self.configuration.mechanism
        shares = mechanism.reach > Reach.ROWS or any(each.shares for each in self.formats)
        object.__setattr__(self, "mechanism", mechanism)
        object.__setattr__(self, "reach", max([mechanism.reach, *(each.reach for each in self.formats)]))
        object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "age_keys", tuple(each.age_key for each in self.formats))
        object.__setattr__(self, "nbytes", sum(buffer.nbytes for buffer in self.buffers.values()))


@dataclass(frozen=True)
class Configuration:
    """What one block of parameters is updated with. Build it with :func:`parse`."""

    mechanism_name: str
    codec_names: tuple[tuple[str, str], ...]  # (slot, codec), in the mechanism's slot order

    def __post_init__(self) -> None:
        for slot in self.mechanism.slots:
            codec = self.codec(slot.name)
            refusal = codec.refusal(slot)
            if refusal:
                raise ConfigurationError(
                    f"{self}: {codec.name} cannot store {slot.name!r}: {refusal}. Use {_known(_codecs_for(slot))} for "
                    f"{slot.name!r}."
                )

    @property
    def mechanism(self) -> Mechanism:
        return MECHANISMS[self.mechanism_name]

    def codec(self, slot: str) -> Codec:
        return CODECS[dict(self.codec_names)[slot]]

    @property
    def switches(self) -> Switches:
        mechanism = self.mechanism
        codecs = [self.codec(slot.name) for slot in mechanism.slots]
        return Switches(
            adaptive=mechanism.adaptive,
            momentum=mechanism.momentum,
            decoupled=mechanism.decoupled,
            factored=any(codec.factored for codec in codecs),
            bits=min((codec.bits for codec in codecs), default=32),
        )

    @property
    def alias(self) -> str:
        """The paper's short name where there is one, else the spelling."""
        return _alias_of(self)

    def suited(self, shape: Shape, role: Role) -> Configuration:
        """Itself, or what its mechanism falls back to for a parameter that it is not made for."""
        return self if self.mechanism.suits(shape, role) else parse(self.mechanism.fallback)

    def layout(self, shape: Shape, *, rows: int | None = None) -> Layout:
        """What is held for a parameter of this global shape, or for ``rows`` of its dim 0 on one rank."""
        return _layout(self, tuple(shape), rows)

    def state_bytes(self, shape: Shape, *, rows: int | None = None) -> int:
        return self.layout(shape, rows=rows).nbytes

    def __str__(self) -> str:
        slots = ",".join(f"{slot}={codec}" for slot, codec in self.codec_names)
        return f"{self.mechanism_name}[{slots}]" if slots else self.mechanism_name


def parse(spelling: str | Configuration) -> Configuration:
    """Read a configuration from its spelling or from one of the paper's names.

    >>> str(parse("sgdm-16")), str(parse("adafactor")), str(parse("adamw[v=factored]"))
    ('sgdm[m=bf16]', 'adafactor[v=factored]', 'adamw[m=fp32,v=factored]')
    """
    if isinstance(spelling, Configuration):
        return spelling
    if not isinstance(spelling, str):
        raise ConfigurationError(
            f"{spelling!r} is not a configuration. Write one as text, like 'adamw-8' or 'adamw[m=int8,v=factored]'."
        )
    return _parsed(spelling)


@functools.cache
def _parsed(spelling: str) -> Configuration:
    match = _SPELLING.fullmatch(spelling.strip().lower().replace(" ", ""))
    if match is None:
        raise ConfigurationError(
            f"cannot read the configuration {spelling!r}. Write a mechanism with a codec per slot, like "
            "'adamw[m=int8,v=int8]', or a short name like 'adamw-8'."
        )
    name = match["mechanism"]
    if name not in MECHANISMS:
        raise ConfigurationError(f"unknown mechanism {name!r} in {spelling!r}. {_suggest(name, MECHANISMS)}")
    mechanism = MECHANISMS[name]
    codecs = {slot.name: mechanism.default_codecs.get(slot.name, "fp32") for slot in mechanism.slots}
    if match["bits"]:
        codecs = {slot: _at_bits(codec, int(match["bits"])) for slot, codec in codecs.items()}
    elif match["slots"]:
        codecs |= _read_slots(spelling, mechanism, match["slots"])
    return Configuration(name, tuple(codecs.items()))


def from_switches(switches: Switches) -> Configuration:
    """The configuration of a tuple of the paper's Definition 1; an error with the reason where there is none.

    >>> str(from_switches(Switches(adaptive=True, momentum=True, decoupled=True, factored=True, bits=8)))
    'adamw[m=int8,v=factored]'
    """
    if switches.factored and not switches.adaptive:
        raise ConfigurationError(
            "a factored SGD makes no sense: only a second moment can be factored, and SGD keeps none. "
            "Use adaptive scaling, or drop the factorization."
        )
    if switches.adaptive and not switches.momentum and not switches.decoupled:
        raise ConfigurationError(
            "adaptive scaling without momentum is Adafactor, whose weight decay is decoupled. Set decoupled=True."
        )
    if not switches.adaptive:
        name = "sgd" + "w" * switches.decoupled + "m" * switches.momentum
        return parse(f"{name}-{switches.bits}")
    codec = _BITS_TO_CODEC[switches.bits]
    if not switches.momentum:
        return parse(f"adafactor[v={_at_bits('factored', switches.bits) if switches.factored else codec}]")
    v = "factored" if switches.factored else codec
    return parse(f"{'adamw' if switches.decoupled else 'adam'}[m={codec},v={v}]")


def _catalog() -> tuple[Configuration, ...]:
    found: dict[Configuration, None] = {}
    for bits in _BITS_TO_CODEC:
        for code in range(16):
            adaptive, momentum, decoupled, factored = (bool(code & 1 << i) for i in range(4))
            try:
                found[from_switches(Switches(adaptive, momentum, decoupled, factored, bits))] = None
            except ConfigurationError:
                continue
    return tuple(sorted(found, key=_catalog_order))


def _catalog_order(configuration: Configuration) -> tuple[int, bool, int]:
    """Best-understood first: AdamW, Adam, Adafactor, SGD; dense before factored; wide before narrow."""
    switches = configuration.switches
    families = ("adamw", "adam", "adafactor", "sgdwm", "sgdm", "sgdw", "sgd")
    return families.index(configuration.mechanism_name), switches.factored, -switches.bits


def _at_bits(codec: str, bits: int) -> str:
    dense = _BITS_TO_CODEC[bits]
    if codec != "factored":
        return dense
    return codec if dense == "fp32" else f"{codec}-{dense}"


def _read_slots(spelling: str, mechanism: Mechanism, text: str) -> dict[str, str]:
    slots = {slot.name: slot for slot in mechanism.slots}
    read: dict[str, str] = {}
    for item in text.split(","):
        slot, equals, codec = item.partition("=")
        if not equals or slot in read:
            problem = "is given twice" if slot in read else "has no codec"
            raise ConfigurationError(f"slot {slot!r} in {spelling!r} {problem}. Write slot=codec once for each slot.")
        if slot not in slots:
            keeps = f"keeps {_known(slots)}" if slots else "keeps no state, so it has no slots"
            raise ConfigurationError(f"{mechanism.name} has no slot {slot!r} in {spelling!r}: it {keeps}.")
        if codec not in CODECS:
            raise ConfigurationError(f"unknown codec {codec!r} in {spelling!r}. {_suggest(codec, CODECS)}")
        read[slot] = codec
    return read


def _codecs_for(slot: Slot) -> list[str]:
    return [name for name, codec in CODECS.items() if codec.refusal(slot) is None]


def _known(names: object) -> str:
    return ", ".join(names)  # type: ignore[arg-type]


def _suggest(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {_known(known)}."


@functools.cache
def _layout(configuration: Configuration, shape: Shape, rows: int | None) -> Layout:
    configuration = configuration.suited(shape, role_of(shape))
    formats: list[Format] = []
    buffers: dict[str, Buffer] = {}
    for slot in configuration.mechanism.slots:
        stored = configuration.codec(slot.name).at(shape, slot, rows)
        formats.append(stored)
        buffers |= {stored.key(buffer.name): buffer for buffer in stored.buffers}
        if slot.age_is_state:
            buffers[stored.age_key] = Buffer("age", (), torch.float32)
    return Layout(configuration, shape, tuple(formats), buffers)


@functools.cache
def _alias_of(configuration: Configuration) -> str:
    for bits in _BITS_TO_CODEC:
        short = f"{configuration.mechanism_name}-{bits}"
        if parse(short) == configuration:
            return short if configuration.codec_names else configuration.mechanism_name
    return str(configuration)


CATALOG: tuple[Configuration, ...] = _catalog()
"""The paper's 21 configurations (17 different ones) and the other tuples of its Definition 1 that make sense."""

REFERENCE: Configuration = parse("adamw-16")
"""Budgets and time ratios are relative to this one."""

"""A configuration: an update rule with one codec per state slot, and its spelling.

Example:
    >>> configuration = parse("adamw-8")
    >>> str(configuration)
    'adamw[m=int8,v=int8]'
    >>> configuration.state_bytes((768, 3072))
    4737024
    >>> parse(str(configuration)) == configuration
    True
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import torch

from baoc.core.codecs import CODECS, Codec, Format, SummedFormat
from baoc.core.mechanisms import MECHANISMS, Mechanism
from baoc.core.roles import Role, role_of
from baoc.core.rounding import IDLE_SHIFT, LOOSE_IDLE_SHIFT
from baoc.core.spec import WEIGHT, Buffer, Reach, Shape, Slot

_BITS_TO_CODEC = {32: "fp32", 16: "bf16", 8: "int8", 4: "int4"}
_PAPER_BITS = (32, 16, 8)
_SPELLING = re.compile(r"(?P<mechanism>[a-z]+)(?:-?(?P<bits>32|16|8|4)|\[(?P<slots>[^\]]*)\])?")
_ELSE = re.compile(r"\s+else\s+")


class ConfigurationError(ValueError):
    """A spelling that cannot be read, or a configuration that does not exist."""


@dataclass(frozen=True)
class Switches:
    """The paper's tuple of choices (Definition 1).

    Args:
        adaptive: the update is scaled by a second moment.
        momentum: the update averages gradients.
        decoupled: weight decay is decoupled from the gradient.
        factored: the second moment is stored as row and column means.
        bits: bits per stored number.
    """

    adaptive: bool
    momentum: bool
    decoupled: bool
    factored: bool
    bits: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The state of one parameter: every buffer, and the update rule that uses them.

    Args:
        configuration: the configuration, after the fallback for tensors that its update rule does not suit.
        shape: global shape of the parameter.
        formats: one format per slot.
        buffers: buffer by key in the optimizer's state.
    """

    configuration: Configuration
    shape: Shape
    formats: tuple[Format, ...]
    buffers: Mapping[str, Buffer]

    mechanism: Mechanism = field(init=False)
    reach: Reach = field(init=False)
    shares: bool = field(init=False)
    """A non-finite or huge gradient of one element would change other elements, or would stay in the state unseen."""
    idle_shift: int = field(init=False)
    """How far rounding may enlarge a signed element without gradient: see :class:`~baoc.core.rounding.Rounding`."""
    nbytes: int = field(init=False)
    age_keys: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:  # not lazily: torch.compile cannot trace cached properties
        mechanism = self.configuration.mechanism
        shares = mechanism.hides_spikes or mechanism.reach > Reach.ROWS or any(each.shares for each in self.formats)
        object.__setattr__(self, "mechanism", mechanism)
        object.__setattr__(self, "reach", max([mechanism.reach, *(each.reach for each in self.formats)]))
        object.__setattr__(self, "shares", shares)
        has_own_square = any(not each.slot.signed and not isinstance(each, SummedFormat) for each in self.formats)
        object.__setattr__(self, "idle_shift", IDLE_SHIFT if has_own_square else LOOSE_IDLE_SHIFT)
        object.__setattr__(self, "age_keys", tuple(each.age_key for each in self.formats))
        object.__setattr__(self, "nbytes", sum(buffer.nbytes for buffer in self.buffers.values()))


@dataclass(frozen=True)
class Configuration:
    """An update rule with one codec per state slot. Build it with :func:`parse`.

    Args:
        mechanism_name: the update rule.
        codec_names: pairs of slot and codec, in the rule's order of slots.
        otherwise: the configuration of parameters that the rule does not suit. ``None``: the rule's own fallback.

    Raises:
        ConfigurationError: if a codec cannot store its slot.
    """

    mechanism_name: str
    codec_names: tuple[tuple[str, str], ...]
    otherwise: Configuration | None = None

    def __post_init__(self) -> None:
        for slot in self.slots:
            codec = self.codec(slot.name)
            refusal = _refusal(codec, slot)
            if refusal:
                raise ConfigurationError(
                    f"{self}: {codec.name} cannot store {slot.name!r}: {refusal}. Use {_known(_codecs_for(slot))} for "
                    f"{slot.name!r}."
                )

    @property
    def mechanism(self) -> Mechanism:
        """The update rule."""
        return MECHANISMS[self.mechanism_name]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The rule's slots, without optional ones that the spelling leaves out."""
        held = {slot for slot, _ in self.codec_names}
        return tuple(slot for slot in (*self.mechanism.slots, WEIGHT) if slot.name in held)

    @property
    def weight(self) -> str | None:
        """The codec of slot ``w``, the low bits of 16-bit parameters; ``None`` if the spelling leaves it out."""
        return dict(self.codec_names).get(WEIGHT.name)

    def with_weight(self, codec: str | None) -> Configuration:
        """Return the configuration with another codec for the low bits of 16-bit parameters, after ``else`` too.

        Args:
            codec: ``"16"``, ``"8"``, ``"sr"`` or ``"none"``; ``None`` leaves the slot out, as for fp32 parameters.

        Returns:
            The configuration.

        Example:
            >>> str(parse("adamw-8").with_weight("8"))
            'adamw[m=int8,v=int8,w=8]'
        """
        others = tuple((slot, name) for slot, name in self.codec_names if slot != WEIGHT.name)
        otherwise = None if self.otherwise is None else self.otherwise.with_weight(codec)
        names = others if codec is None else (*others, (WEIGHT.name, codec))
        return replace(self, codec_names=names, otherwise=otherwise)

    def codec(self, slot: str) -> Codec:
        """Return the codec of a slot.

        Args:
            slot: the name of the slot.

        Returns:
            The codec. Small and thin parameters may be stored in a simpler format than it says.
        """
        return CODECS[dict(self.codec_names)[slot]]

    @property
    def switches(self) -> Switches:
        """The paper's tuple of choices that describes this configuration."""
        mechanism = self.mechanism
        codecs = [self.codec(slot.name) for slot in self.slots if slot.is_average]
        return Switches(
            adaptive=mechanism.adaptive,
            momentum=mechanism.momentum and any(slot.signed for slot in self.slots if slot.is_average),
            decoupled=mechanism.decoupled,
            factored=any(codec.factored for codec in codecs),
            bits=min((codec.bits for codec in codecs), default=32),
        )

    @property
    def alias(self) -> str:
        """The short name, such as ``adamw-8``, if there is one, else the spelling."""
        return _alias_of(self)

    def suited(self, shape: Shape, role: Role) -> Configuration:
        """Return the configuration that a parameter gets: this one, or its fallback.

        Args:
            shape: global shape of the parameter.
            role: role of the parameter.

        Returns:
            A configuration whose update rule suits the parameter.

        Example:
            >>> configuration = parse("muon-8 else adamw-16")
            >>> str(configuration.suited((64, 64), Role.MATRIX)), str(configuration.suited((64,), Role.VECTOR))
            ('muon[m=int8]', 'adamw[m=bf16,v=bf16]')
        """
        if self.mechanism.suits(shape, role):
            return replace(self, otherwise=None) if self.otherwise else self
        found = (self.otherwise or parse(self.mechanism.fallback)).suited(shape, role)
        return found.with_weight(self.weight) if self.weight and not found.weight else found

    def layout(self, shape: Shape, *, rows: int | None = None) -> Layout:
        """Return the layout of a parameter's state.

        Args:
            shape: global shape of the parameter.
            rows: rows of dim 0 on this rank. ``None``: all.

        Returns:
            The layout.
        """
        return _layout(self, tuple(shape), rows)

    def state_bytes(self, shape: Shape, *, rows: int | None = None) -> int:
        """Return the bytes of a parameter's state, exactly.

        Args:
            shape: global shape of the parameter.
            rows: rows of dim 0 on this rank. ``None``: all.

        Returns:
            Bytes of state.

        Example:
            >>> parse("adamw-8").state_bytes((1024, 1024)) / 1024**2
            2.0078125
        """
        return self.layout(shape, rows=rows).nbytes

    def __str__(self) -> str:
        fixed = {slot.name for slot in self.slots if len(slot.codecs) == 1}  # nothing to choose, nothing to spell
        slots = ",".join(f"{slot}={codec}" for slot, codec in self.codec_names if slot not in fixed)
        bare = f"{self.mechanism_name}[{slots}]" if slots else self.mechanism_name
        return f"{bare} else {self.otherwise}" if self.otherwise else bare


def parse(spelling: str | Configuration) -> Configuration:
    """Read a configuration from its spelling or short name.

    Args:
        spelling: a rule with a codec per slot, like ``"adamw[m=int8,v=factored]"``, or a short name, like
            ``"adamw-8"``. ``else`` and another spelling may follow, for parameters that the rule does not suit. A
            configuration is returned as it is.

    Returns:
        The configuration.

    Raises:
        ConfigurationError: if there is no such configuration.

    Example:
        >>> str(parse("sgdm-16")), str(parse("adafactor")), str(parse("adamw[v=factored]"))
        ('sgdm[m=bf16]', 'adafactor[v=factored]', 'adamw[m=fp32,v=factored]')
        >>> str(parse("spectral else colnorm else adamw-8"))
        'spectral else colnorm else adamw[m=int8,v=int8]'
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
    first, *others = _ELSE.split(spelling.strip().lower(), maxsplit=1)
    if others:
        return replace(_parsed(first), otherwise=_parsed(others[0]))
    match = _SPELLING.fullmatch(first.replace(" ", ""))
    if match is None:
        raise ConfigurationError(
            f"cannot read the configuration {spelling!r}. Write an update rule with a codec per slot, like "
            "'adamw[m=int8,v=int8]', or a short name like 'adamw-8'."
        )
    name = match["mechanism"]
    if name not in MECHANISMS:
        raise ConfigurationError(f"unknown update rule {name!r} in {spelling!r}. {_suggest(name, MECHANISMS)}")
    mechanism = MECHANISMS[name]
    codecs = {slot.name: mechanism.default_codecs.get(slot.name, "fp32") for slot in mechanism.slots}
    named = _read_slots(spelling, mechanism, match["slots"]) if match["slots"] else {}
    if match["bits"]:
        only = {slot.name for slot in mechanism.slots if slot.codecs}
        codecs = {k: codec if k in only else _at_bits(codec, int(match["bits"])) for k, codec in codecs.items()}
    else:
        left_out = {slot.name for slot in mechanism.slots if slot.optional and slot.name not in named}
        codecs = {slot: codec for slot, codec in (codecs | named).items() if slot not in left_out}
    return Configuration(name, tuple(codecs.items()))


def from_switches(switches: Switches) -> Configuration:
    """Return the configuration of a tuple of the paper's Definition 1.

    Args:
        switches: the tuple.

    Returns:
        The configuration.

    Raises:
        ConfigurationError: if the tuple contradicts itself.

    Example:
        >>> str(from_switches(Switches(adaptive=True, momentum=True, decoupled=True, factored=True, bits=8)))
        'adamw[m=int8,v=factored]'
    """
    if switches.factored and not switches.adaptive:
        raise ConfigurationError(
            "factored=True needs adaptive=True: only a second moment can be factored, and SGD has none. "
            "Set adaptive=True or factored=False."
        )
    if switches.adaptive and not switches.momentum and not switches.decoupled:
        raise ConfigurationError(
            "adaptive=True without momentum is Adafactor, which has decoupled weight decay. Set decoupled=True."
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
    for bits in _PAPER_BITS:
        for code in range(16):
            adaptive, momentum, decoupled, factored = (bool(code & 1 << i) for i in range(4))
            try:
                found[from_switches(Switches(adaptive, momentum, decoupled, factored, bits))] = None
            except ConfigurationError:
                continue
    return tuple(sorted(found, key=_catalog_order))


def _catalog_order(configuration: Configuration) -> tuple[int, bool, int]:
    """Order by family (AdamW, Adam, Adafactor, SGD), then dense before factored, then wide before narrow."""
    switches = configuration.switches
    families = ("adamw", "adam", "adafactor", "sgdwm", "sgdm", "sgdw", "sgd")
    return families.index(configuration.mechanism_name), switches.factored, -switches.bits


def _at_bits(codec: str, bits: int) -> str:
    """Return an update rule's own codec for a slot at another width."""
    dense = _BITS_TO_CODEC[bits]
    if codec == "fp32":
        return dense
    found = codec if dense == "fp32" else f"{codec}-{dense}"
    if found not in CODECS:
        raise ConfigurationError(f"codec {codec!r} has no {bits}-bit variant. Known codecs: {_known(CODECS)}.")
    return found


def _read_slots(spelling: str, mechanism: Mechanism, text: str) -> dict[str, str]:
    slots = {slot.name: slot for slot in (*mechanism.slots, WEIGHT)}
    read: dict[str, str] = {}
    for item in text.split(","):
        slot, equals, codec = item.partition("=")
        if not equals or slot in read:
            problem = "is given twice" if slot in read else "has no codec"
            raise ConfigurationError(f"slot {slot!r} in {spelling!r} {problem}. Write slot=codec once for each slot.")
        if slot not in slots:
            own = [name for name in slots if name != WEIGHT.name]
            keeps = f"keeps {_known(own)}" if own else "keeps no state"
            raise ConfigurationError(
                f"{mechanism.name} has no slot {slot!r} (in {spelling!r}): it {keeps}, and 'w', the low bits of 16-bit "
                "parameters."
            )
        if codec not in CODECS:
            raise ConfigurationError(f"unknown codec {codec!r} in {spelling!r}. {_suggest(codec, CODECS)}")
        read[slot] = codec
    return read


def _refusal(codec: Codec, slot: Slot) -> str | None:
    if slot.codecs and codec.name not in slot.codecs:
        return "the slot has a codec of its own"
    return codec.refusal(slot)


def _codecs_for(slot: Slot) -> list[str]:
    return [name for name, codec in CODECS.items() if _refusal(codec, slot) is None]


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
    for slot in configuration.slots:
        stored = configuration.codec(slot.name).at(shape, slot, rows)
        formats.append(stored)
        buffers |= {stored.key(buffer.name): buffer for buffer in stored.buffers}
        if slot.age_is_state:
            buffers[stored.age_key] = Buffer("age", (), torch.float32)
    return Layout(configuration, shape, tuple(formats), buffers)


@functools.cache
def _alias_of(configuration: Configuration) -> str:
    if configuration.otherwise:
        return f"{replace(configuration, otherwise=None).alias} else {configuration.otherwise.alias}"
    if not configuration.codec_names:
        return configuration.mechanism_name
    for bits in _BITS_TO_CODEC:
        short = f"{configuration.mechanism_name}-{bits}"
        try:
            if parse(short) == configuration:
                return short
        except ConfigurationError:  # a slot has no codec of this width
            continue
    return str(configuration)


CATALOG: tuple[Configuration, ...] = _catalog()
"""The paper's 21 configurations (17 distinct ones), and all other valid tuples of its Definition 1."""

EXTENDED: tuple[Configuration, ...] = tuple(
    parse(spelling)
    for spelling in (
        *("muon-32", "muon-16", "muon-8", "muon-4", "normuon-32", "normuon-16", "normuon-8", "normuon-4", "spectral"),
        *("sinkhorn", "sinkhorn-8", "colnorm", "colnorm-8", "rownorm", "rownorm-8", "lion-32", "lion-16", "lion-8"),
        *("lion-4", "sgdwm-4", "adamw[m=int4,v=factored]", "adamw[m=int4,v=int8]"),
        *("adamw[m=int8,v=row-mean]", "adamw[m=int8,v=col-mean]", "adamw[m=int4,v=row-mean]"),
    )
)
"""Configurations beyond the paper's: normalised update rules, 4-bit state, second moments along one axis."""

BUDGET_REFERENCE: Configuration = parse("adamw-16")
"""AdamW16, the budget reference: memory budgets and time ratios are relative to it."""

"""A plan: which block of parameters gets which configuration. All that planner and optimizer know of each other."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from baoc.core.configuration import REFERENCE, Configuration, parse
from baoc.core.files import replaced
from baoc.core.roles import Role, roles_by_name
from baoc.core.sharding import fullest
from baoc.core.spec import Shape
from baoc.core.text import human_bytes, human_count, table

FORMAT = "baoc.plan"
VERSION = 1
_NAMED = 3  # configurations in one line


class PlanError(ValueError):
    """A plan that does not fit its model, or a file that is not a plan."""


@dataclass(frozen=True)
class Block:
    """Parameters that share one configuration."""

    name: str
    configuration: Configuration
    parameters: Mapping[str, Shape]  # name -> global shape
    lr_scale: float | None = None
    """Factor on the group's lr. ``None``: 1 for a new run; matched to the last update when state is inherited."""
    risk: Mapping[str, float] = field(default_factory=dict)
    """What the configuration risks for this block, by term; empty in a plan that was made by hand."""
    why: str = ""
    host: bool = False
    """Whether state is in host memory, wherever the parameters are; else it is where they are."""

    def __post_init__(self) -> None:
        if self.lr_scale is not None and not (math.isfinite(self.lr_scale) and self.lr_scale > 0):
            raise PlanError(
                f"block {self.name!r} has lr_scale {self.lr_scale!r}; it must be a positive number or null."
            )

    @property
    def numel(self) -> int:
        """How many elements its parameters have."""
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def state_bytes(self) -> int:
        """What the block holds, to the byte."""
        return self.state_bytes_as(self.configuration)

    def state_bytes_as(self, configuration: Configuration) -> int:
        """What the block would hold under another configuration."""
        return sum(configuration.state_bytes(shape) for shape in self.parameters.values())


@dataclass(frozen=True)
class Plan:
    """A configuration for every parameter, each in exactly one block.

    >>> plan = Plan.uniform("adamw-8", {"embed.weight": (50257, 768), "norm.weight": (768,)})
    >>> plan.state_bytes
    77502438
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    blocks: tuple[Block, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What it was made for and how well that was solved: budgets, bound, gap, prices, seed. Plain JSON values."""
    rows: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
    """Of parameters that are sharded: how many rows the fullest rank has. A plan is the same for any number of ranks,
    so this is no part of its file; an optimizer knows it."""
    _block_of: Mapping[str, Block] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        block_of: dict[str, Block] = {}
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanError(f"two blocks are called {twice!r}. Give every block a name of its own.")
        for block in self.blocks:
            for name in block.parameters:
                if name in block_of:
                    raise PlanError(
                        f"parameter {name!r} is in two blocks, {block_of[name].name!r} and {block.name!r}. "
                        "Remove it from one of them."
                    )
                block_of[name] = block
        object.__setattr__(self, "_block_of", block_of)

    @classmethod
    def uniform(
        cls, configuration: Configuration | str, shapes: Mapping[str, Shape], roles: Mapping[str, Role] | None = None
    ) -> Plan:
        """One configuration for all, in one block; others have the parameters that its mechanism does not suit.

        >>> shapes = {"wte.weight": (512, 64), "h.weight": (64, 64), "h.bias": (64,)}
        >>> [f"{block.name}: {', '.join(block.parameters)}" for block in Plan.uniform("muon-8", shapes).blocks]
        ['adamw: wte.weight, h.bias', 'muon: h.weight']


        ``roles`` are read off the names where they are not given.
        """
        configuration = parse(configuration)
        roles = {**roles_by_name(shapes), **(roles or {})}
        blocks: dict[Configuration, dict[str, Shape]] = {}
        for name, shape in shapes.items():
            blocks.setdefault(configuration.suited(shape, roles[name]), {})[name] = shape
        if len(blocks) < 2:
            return cls((Block("all", next(iter(blocks), configuration), shapes),))
        mechanisms = [each.mechanism_name for each in blocks]
        is_clear = len(set(mechanisms)) == len(mechanisms)
        return cls(
            tuple(
                Block(name if is_clear else each.alias, each, mine)
                for name, (each, mine) in zip(mechanisms, blocks.items())
            )
        )

    @staticmethod
    def refuse_unsuited(configuration: Configuration, shapes: Mapping[str, Shape], roles: Mapping[str, Role]) -> None:
        """Raise if a configuration would be asked for and then not be used by a single parameter."""
        name = configuration.mechanism_name
        if configuration.otherwise is None and not any(
            configuration.mechanism.suits(shape, roles[key]) for key, shape in shapes.items()
        ):
            found = ", ".join(sorted({roles[key].value for key in shapes}))
            raise PlanError(
                f"{name} suits none of the {len(shapes)} parameters (roles: {found}), so all of them would be "
                f"{configuration.mechanism.fallback}. Ask for that, or say what they are to have, "
                f"such as '{configuration} else adamw-8'."
            )

    @property
    def by_parameter(self) -> Iterable[tuple[str, Block]]:
        """Every parameter's name, with its block."""
        return self._block_of.items()

    def block_of(self, parameter: str) -> Block:
        """The block that a parameter is in, by its name."""
        return self._block_of[parameter]

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._block_of

    def renamed(self, names: Mapping[str, str]) -> Plan:
        """The same plan for the same parameters under other names; those that have none are left out."""
        blocks = (
            replace(block, parameters={names[name]: s for name, s in block.parameters.items() if name in names})
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    @property
    def state_bytes(self) -> int:
        """What an optimizer with this plan holds, to the byte."""
        return sum(block.state_bytes for block in self.blocks)

    @property
    def host_bytes(self) -> int:
        """What of it is in host memory.

        >>> plan = Plan.uniform("adamw-8", {"weight": (64, 64)})
        >>> plan.host_bytes, plan.offloaded().host_bytes
        (0, 8320)
        """
        return sum(block.state_bytes for block in self.blocks if block.host)

    @property
    def device_bytes(self) -> int:
        """What of it is where the parameters are."""
        return self.state_bytes - self.host_bytes

    @property
    def state_bytes_per_rank(self) -> int:
        """What the rank holds that holds most of it: all, unless parameters are sharded.

        >>> Plan.uniform("adamw-8", {"weight": (90, 512)}).sharded(4).state_bytes_per_rank
        23644
        """
        return self.device_bytes_per_rank + self.host_bytes_per_rank

    @property
    def device_bytes_per_rank(self) -> int:
        return self._bytes_per_rank(host=False)

    @property
    def host_bytes_per_rank(self) -> int:
        return self._bytes_per_rank(host=True)

    def _bytes_per_rank(self, *, host: bool) -> int:
        return sum(
            block.configuration.state_bytes(shape, rows=self.rows.get(name))
            for block in self.blocks
            for name, shape in block.parameters.items()
            if block.host is host
        )

    def offloaded(self, *names: str, host: bool = True) -> Plan:
        """The same plan with the state of these blocks, or of all, in host memory; ``host=False`` takes it back.

        >>> plan = Plan.uniform("muon-8 else adamw-8", {"wte.weight": (512, 64), "h.weight": (64, 64)})
        >>> [(block.name, block.host) for block in plan.offloaded("muon").blocks]
        [('adamw', False), ('muon', True)]
        """
        known = [block.name for block in self.blocks]
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise PlanError(f"the plan has no block {unknown!r}. It has {_some(known)}.")
        moved = (replace(block, host=host) if not names or block.name in names else block for block in self.blocks)
        return replace(self, blocks=tuple(moved))

    def sharded(self, ranks: int) -> Plan:
        """The same plan where rows of all parameters are spread over ranks, as FSDP2 does; 0-d ones are not."""
        shapes = (item for block in self.blocks for item in block.parameters.items())
        return replace(self, rows={name: fullest(shape[0], ranks) for name, shape in shapes if shape})

    @property
    def reference_bytes(self) -> int:
        """What AdamW16 would hold for the same parameters."""
        return sum(block.state_bytes_as(REFERENCE) for block in self.blocks)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise unless the plan covers exactly these parameters with these shapes."""
        missing = [name for name in shapes if name not in self._block_of]
        if missing:
            raise PlanError(
                f"the plan says nothing about {_some(missing)}. Add each to a block, or make a new plan for this model."
            )
        unknown = [name for name in self._block_of if name not in shapes]
        if unknown:
            raise PlanError(
                f"the plan names {_some(unknown)}, which the optimizer was not given. Was the plan made for another "
                "model, or are these parameters frozen? Remove them from the plan, or pass them to the optimizer."
            )
        for name, shape in shapes.items():
            planned = self._block_of[name].parameters[name]
            if tuple(planned) != tuple(shape):
                raise PlanError(
                    f"parameter {name!r} has shape {tuple(shape)}, but the plan was made for {tuple(planned)}. "
                    "Make a new plan for this model."
                )

    def to_json(self) -> str:
        """The text of a plan file."""
        blocks = [
            {
                "name": block.name,
                "configuration": str(block.configuration),
                "lr_scale": block.lr_scale,
                "risk": dict(block.risk),
                "why": block.why,
                "host": block.host,
                "parameters": {name: list(shape) for name, shape in block.parameters.items()},
            }
            for block in self.blocks
        ]
        content = {"format": FORMAT, "version": VERSION, "settings": dict(self.settings), "blocks": blocks}
        return json.dumps(content, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of a plan file; what is none is a :class:`PlanError` that says why."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"this is not a plan file: line {error.lineno} is not JSON ({error.msg}).") from None
        except RecursionError:
            raise PlanError("this is not a plan file: its brackets are nested too deep.") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise PlanError(f'this is not a plan file: it has no "format": "{FORMAT}".')
        if content.get("version") != VERSION:
            raise PlanError(
                f"the plan file has version {content.get('version')!r}, and this baoc reads version {VERSION}. "
                "Make the plan again, or use the baoc that wrote it."
            )
        blocks, settings = content.get("blocks"), content.get("settings", {})
        if not isinstance(blocks, list) or not isinstance(settings, dict):
            raise PlanError('the plan file is damaged: "blocks" must be a list, and "settings" an object.')
        expected, regime = settings.get("expected_loss", 0.0), settings.get("regime", "")
        if type(expected) not in (int, float) or not isinstance(regime, str):  # what is printed with a plan
            raise PlanError(f"the plan file is damaged: it expects {expected!r} percent of loss, in {regime!r}.")
        return cls(tuple(_read_block(entry, index) for index, entry in enumerate(blocks)), settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file. One that is there already stays until this one is complete."""
        text = self.to_json() + "\n"
        with replaced(path) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file."""
        with open(path, "rb") as file:
            content = file.read()
        try:
            return cls.from_json(content.decode())
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)} is not a plan file: byte {error.start} is not UTF-8 text.") from None

    def __str__(self) -> str:
        return self.table()

    def table(self, *, wide: bool = False) -> str:
        """What each block has, what that holds in all, and what is expected of it; ``wide`` shows all that is known.

        State with a star is in host memory.
        """
        is_expectation = "expected_loss" in self.settings
        mark = {True: "*", False: " "} if any(block.host for block in self.blocks) else {False: ""}
        columns: dict[str, Callable[[Block], object]] = {
            "block": lambda block: block.name,
            "tensors": lambda block: len(block.parameters),
            "params": lambda block: human_count(block.numel),
            "configuration": lambda block: str(block.configuration) if wide else block.configuration.alias,
            "state": lambda block: human_bytes(block.state_bytes) + mark[block.host],
        }
        if wide or not is_expectation or any(block.lr_scale not in (None, 1.0) for block in self.blocks):
            columns["lr"] = lambda block: "-" if block.lr_scale is None else f"x{block.lr_scale:.3g}"
        if any(block.risk for block in self.blocks):
            of_risk = _loss_text if is_expectation else _risk_text if wide else _risk_total
            columns["loss" if is_expectation else "risk"] = lambda block: of_risk(block.risk)
        if wide and any(block.why for block in self.blocks):
            columns["why"] = lambda block: block.why
        rows = [[text(block) for text in columns.values()] for block in self.blocks]
        right = [
            name for name in columns if name not in ("block", "configuration", "why") and not (wide and name == "risk")
        ]
        shorten = None if wide else "block"
        return "\n".join([table(list(columns), rows, right=right, shorten=shorten), *self._summary()])

    def _summary(self) -> list[str]:
        share = self.state_bytes / self.reference_bytes if self.reference_bytes else 0.0
        lines = [
            f"{human_bytes(self.state_bytes)} of state, {share:.1%} of AdamW16's {human_bytes(self.reference_bytes)}"
        ]
        if self.host_bytes:
            lines[0] += f"; *{human_bytes(self.host_bytes)} in host memory"
        if self.rows:
            lines[0] += f"; at most {human_bytes(self.state_bytes_per_rank)} on a rank"
        if "expected_loss" in self.settings:
            start = {"scratch": "from scratch", "finetune": "in fine-tuning"}.get(self.settings.get("regime", ""), "")
            runs = self.settings.get("expected_from_runs", 0)
            lines.append(
                f"expected: {_percent(self.settings['expected_loss'])} loss against AdamW32, {start}, from {runs} "
                f"ablation runs"
            )
            if (spread := self.settings.get("expected_spread", 0.0)) >= 0.05:
                lines.append(f"          give or take {spread:.1f} points from one workload to another")
        return lines


def one_line(plan: Plan) -> str:
    """A plan in a few words: what most parameters get, what it holds, and what is expected of it.

    >>> one_line(Plan.uniform("adamw-8", {"weight": (64, 64), "bias": (64,)}))
    "adamw-8, 8.6 KiB of state (52.3% of AdamW16's)"
    """
    numel: dict[str, int] = {}
    for block in plan.blocks:
        numel[block.configuration.alias] = numel.get(block.configuration.alias, 0) + block.numel
    most = sorted(numel, key=lambda alias: -numel[alias])
    what = " + ".join(most[:_NAMED]) + (f" + {len(most) - _NAMED} more" if len(most) > _NAMED else "")
    share = plan.state_bytes / plan.reference_bytes if plan.reference_bytes else 0.0
    text = f"{what}, {human_bytes(plan.state_bytes)} of state ({share:.1%} of AdamW16's)"
    if plan.host_bytes:
        text += f", {human_bytes(plan.host_bytes)} of it in host memory"
    if "expected_loss" in plan.settings:
        text += f", {_percent(plan.settings['expected_loss'])} loss expected"
    return text


def _read_block(entry: Any, index: int) -> Block:
    try:
        return Block(
            name=str(entry["name"]),
            configuration=parse(entry["configuration"]),
            parameters={str(name): _read_shape(shape) for name, shape in entry["parameters"].items()},
            lr_scale=None if entry.get("lr_scale") is None else float(entry["lr_scale"]),
            risk={str(term): float(value) for term, value in entry.get("risk", {}).items()},
            why=str(entry.get("why", "")),
            host=_read_host(entry.get("host", False)),
        )
    except PlanError:
        raise
    except KeyError as error:
        raise PlanError(f"block {index} of the plan has no {error.args[0]!r}.") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"block {index} of the plan cannot be read: {error}") from None


def _read_host(host: Any) -> bool:
    if not isinstance(host, bool):
        raise ValueError(f"'host' is {host!r}; it must be true or false.")
    return host


def _read_shape(shape: Any) -> Shape:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a shape is {shape!r}; it must be a list of whole numbers.")
    return tuple(shape)


def _percent(value: float) -> str:
    return f"{value:+.1f}%" if abs(value) >= 0.05 else "no change of"


def _loss_text(risk: Mapping[str, float]) -> str:
    return f"{sum(risk.values()):+.2f}%"


def _risk_total(risk: Mapping[str, float]) -> str:
    return f"{sum(risk.values()):.3f}"


def _risk_text(risk: Mapping[str, float]) -> str:
    terms = [f"{term} {value:.2g}" for term, value in risk.items() if value >= 0.0005]
    return f"{sum(risk.values()):.3f} = {' + '.join(terms)}" if terms else f"{sum(risk.values()):.3f}"


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    text = ", ".join(repr(name) for name in names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more parameters"

"""A plan: which block of parameters gets which configuration. Planners make it, and the optimizer follows it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from baoc.core.block import Block, PlanError
from baoc.core.configuration import BUDGET_REFERENCE, Configuration, parse
from baoc.core.files import read_json, replaced
from baoc.core.roles import Role, as_matrices, matrix_shape, roles_by_name
from baoc.core.sharding import rows_per_rank
from baoc.core.spec import BATCH_NUMEL, DEFAULT_WEIGHT, LOW_PRECISION, Reach, Shape
from baoc.core.splits import Split, Splits, describe, matched, workspace
from baoc.core.text import plan_table

__all__ = ["FORMAT", "VERSION", "Block", "Plan", "PlanError"]

FORMAT = "baoc.plan"
VERSION = 1


@dataclass(frozen=True)
class Plan:
    """A configuration for every parameter. Each parameter is in exactly one block.

    Args:
        blocks: the blocks, with names of their own.
        settings: what the plan was made for and how well that was solved, such as budgets, bound, gap and prices. Plain
            JSON values.
        rows: for sharded parameters, how many rows of dim 0 the first rank holds; no rank holds more. The plan itself
            is the same for any number of ranks, so plan files leave this out. The optimizer fills it in.

    Raises:
        PlanError: if two blocks have one name, or a parameter is in two blocks.

    Example:
        >>> plan = Plan.uniform("adamw-8", {"embed.weight": (50257, 768), "norm.weight": (768,)})
        >>> plan.state_bytes
        77502438
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    blocks: tuple[Block, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict, repr=False, compare=False)
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
        cls,
        configuration: Configuration | str,
        shapes: Mapping[str, Shape],
        roles: Mapping[str, Role] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Plan:
        """Make a plan with one configuration for all parameters that its update rule suits.

        Args:
            configuration: the configuration or its spelling. Other parameters get what follows ``else``, or the update
                rule's fallback.
            shapes: global shape by parameter name.
            roles: role by parameter name. Roles that are not given are read off the names.
            dtypes: dtype by parameter name. bf16 and fp16 parameters then have slot ``w``, with 8 bits if the
                configuration does not say otherwise, and others do not have it.

        Returns:
            A plan with one block per distinct configuration.

        Raises:
            PlanError: if the configuration has a slot ``w``, and no parameter is bf16 or fp16.

        Example:
            >>> shapes = {"wte.weight": (512, 64), "h.weight": (64, 64), "h.bias": (64,)}
            >>> [f"{block.name}: {', '.join(block.parameters)}" for block in Plan.uniform("muon-8", shapes).blocks]
            ['adamw: wte.weight, h.bias', 'muon: h.weight']
        """
        configuration = parse(configuration)
        roles = {**roles_by_name(shapes), **(roles or {})}
        blocks: dict[Configuration, dict[str, Shape]] = {}
        if dtypes is not None and configuration.weight and not any(each in LOW_PRECISION for each in dtypes.values()):
            found = ", ".join(sorted({str(each) for each in dtypes.values()})) or "none"
            raise PlanError(
                f"{configuration} keeps the low bits of 16-bit parameters in slot 'w', but no parameter is bf16 or "
                f"fp16 (dtypes: {found}). Leave out w={configuration.weight}, or cast the model first: "
                "baoc.to_low_precision(model, torch.bfloat16)."
            )
        for name, shape in shapes.items():
            suited = configuration.suited(shape, roles[name])
            if dtypes is not None:
                is_narrow = dtypes[name] in LOW_PRECISION
                suited = suited.with_weight((suited.weight or DEFAULT_WEIGHT) if is_narrow else None)
            blocks.setdefault(suited, {})[name] = shape
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

    def with_low_bits(self, narrow: Collection[str], weight: str) -> Plan:
        """Return the plan with a format for the low bits of 16-bit parameters, where it says nothing about them.

        Args:
            narrow: names of the 16-bit parameters.
            weight: the format, such as ``"8"``.

        Returns:
            The plan. Blocks with parameters of several dtypes are divided.

        Example:
            >>> plan = Plan.uniform("adamw-8", {"a": (64, 64), "b": (64, 64)})
            >>> [(block.name, str(block.configuration)) for block in plan.with_low_bits({"a"}, "8").blocks]
            [('all', 'adamw[m=int8,v=int8]'), ("all'", 'adamw[m=int8,v=int8,w=8]')]
        """
        return self._with_weight(narrow, weight, of=lambda each: not each.weight)

    def without_low_bits(self, wide: Collection[str]) -> Plan:
        """Return the plan without slot ``w`` for some parameters: those that are fp32.

        Args:
            wide: their names.

        Returns:
            The plan. Blocks with other parameters too are divided.
        """
        return self._with_weight(wide, None, of=lambda each: bool(each.weight))

    def _with_weight(
        self, parameters: Collection[str], weight: str | None, of: Callable[[Configuration], bool]
    ) -> Plan:
        """Give some parameters another slot ``w``, in blocks of certain configurations."""
        blocks: list[Block] = []
        names = {block.name for block in self.blocks}
        for block in self.blocks:
            mine = {name: shape for name, shape in block.parameters.items() if name in parameters}
            if not mine or not of(block.configuration):
                blocks.append(block)
                continue
            changed = replace(block, configuration=block.configuration.with_weight(weight), parameters=mine)
            if len(mine) < len(block.parameters):
                others = {name: shape for name, shape in block.parameters.items() if name not in mine}
                blocks.append(replace(block, parameters=others))
                while changed.name in names:
                    changed = replace(changed, name=f"{changed.name}'")
                names.add(changed.name)
            blocks.append(changed)
        return self if tuple(blocks) == self.blocks else replace(self, blocks=tuple(blocks))

    @staticmethod
    def refuse_unsuited(configuration: Configuration, shapes: Mapping[str, Shape], roles: Mapping[str, Role]) -> None:
        """Raise if no parameter would use the update rule of a requested configuration.

        Args:
            configuration: the requested configuration.
            shapes: global shape by parameter name.
            roles: role by parameter name.

        Raises:
            PlanError: if every parameter would get the fallback.
        """
        name = configuration.mechanism_name
        if configuration.otherwise is None and not any(
            configuration.mechanism.suits(shape, roles[key]) for key, shape in shapes.items()
        ):
            found = ", ".join(sorted({roles[key].value for key in shapes}))
            raise PlanError(
                f"{name} does not suit any of the {len(shapes)} parameters (roles: {found}), so all would get its "
                f"fallback {configuration.mechanism.fallback}. Request that configuration, or name another one for "
                f"them, such as '{configuration} else adamw-8'."
            )

    @property
    def by_parameter(self) -> Iterable[tuple[str, Block]]:
        """Pairs of parameter name and block, for every parameter."""
        return self._block_of.items()

    def block_of(self, parameter: str) -> Block:
        """Return the block of a parameter, by its name.

        Args:
            parameter: the name of the parameter.

        Raises:
            KeyError: if the plan has no such parameter.
        """
        return self._block_of[parameter]

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._block_of

    def renamed(self, names: Mapping[str, str]) -> Plan:
        """Return the plan with other parameter names.

        Args:
            names: new name by old name. Parameters without a new name are left out.

        Returns:
            The renamed plan.
        """
        blocks = (
            replace(
                block,
                parameters={names[name]: shape for name, shape in block.parameters.items() if name in names},
                splits={names[name]: split for name, split in block.splits.items() if name in names},
            )
            for block in self.blocks
        )
        return replace(self, blocks=tuple(blocks))

    def split(self, splits: Splits) -> Plan:
        """Return the plan with other splits, for update rules that work on whole matrices.

        Args:
            splits: split by parameter name or pattern. Parameters that none matches are not split.

        Returns:
            The changed plan.

        Raises:
            ValueError: if the sizes of a split do not fit a parameter.

        Example:
            >>> from baoc import Split
            >>> fused = Plan.uniform("muon-8", {"attn.qkv.weight": (96, 32)})
            >>> plan = fused.split({"*.qkv.weight": Split((32, 32, 32))})
            >>> plan.matrices, plan.state_bytes == fused.state_bytes
            ({'3 x (32, 32)': 1}, True)
        """
        of_matrices = {block.name for block in self.blocks if block.configuration.mechanism.reach is Reach.MATRIX}
        found = matched(splits, {name: block.parameters[name] for name, block in self.by_parameter})
        blocks = (replace(block, splits=found if block.name in of_matrices else {}) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    @property
    def splits(self) -> dict[str, Split]:
        """The parameters that are several matrices, by name."""
        return {name: split for block in self.blocks for name, split in block.splits.items()}

    @property
    def matrices(self) -> dict[str, int]:
        """How many parameters are split into which matrices, by a text such as ``"3 x (768, 768)"``."""
        texts = [describe(split, self.block_of(name).parameters[name]) for name, split in self.splits.items()]
        return {text: texts.count(text) for text in dict.fromkeys(texts)}

    @property
    def state_bytes(self) -> int:
        """Bytes of state of all blocks, exactly."""
        return sum(block.state_bytes for block in self.blocks)

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory.

        Example:
            >>> plan = Plan.uniform("adamw-8", {"weight": (64, 64)})
            >>> plan.host_bytes, plan.offloaded().host_bytes
            (0, 8320)
        """
        return sum(block.state_bytes for block in self.blocks if block.host)

    @property
    def device_bytes(self) -> int:
        """Bytes of state on the device of the parameters."""
        return self.state_bytes - self.host_bytes

    @property
    def state_bytes_per_rank(self) -> int:
        """Bytes of state on the rank that holds the most; equal to :attr:`state_bytes` unless parameters are sharded.

        Example:
            >>> Plan.uniform("adamw-8", {"weight": (90, 512)}).sharded(4).state_bytes_per_rank
            23644
        """
        return self.device_bytes_per_rank + self.host_bytes_per_rank

    @property
    def advice(self) -> tuple[str, ...]:
        """Changes that only the user can make, and what each would free. Plans of a ``total_memory`` have some."""
        return tuple(self.settings.get("advice", ()))

    @property
    def device_bytes_per_rank(self) -> int:
        """Bytes of state on the device of the rank that holds the most."""
        return self._bytes_per_rank(host=False)

    @property
    def host_bytes_per_rank(self) -> int:
        """Bytes of state in host memory of the rank that holds the most."""
        return self._bytes_per_rank(host=True)

    def _bytes_per_rank(self, *, host: bool) -> int:
        return sum(
            block.configuration.state_bytes(shape, rows=self.rows.get(name))
            for block in self.blocks
            for name, shape in block.parameters.items()
            if block.host is host
        )

    def offloaded(self, *names: str, host: bool = True) -> Plan:
        """Return the plan with the state of some blocks in host memory.

        Args:
            *names: the blocks; all of them if none is given.
            host: ``False`` moves the state back to the device.

        Returns:
            The changed plan.

        Raises:
            PlanError: if the plan has no such block.

        Example:
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
        """Return the plan with the rows of all parameters spread over ranks, as FSDP2 does.

        Args:
            ranks: how many ranks. Scalars are not sharded.

        Returns:
            The plan with :attr:`rows` set.
        """
        shapes = (item for block in self.blocks for item in block.parameters.items())
        return replace(self, rows={name: rows_per_rank(shape[0], ranks) for name, shape in shapes if shape})

    @property
    def workspace_bytes(self) -> int:
        """The most bytes that an update needs for a moment besides state, for rules that work on whole matrices.

        With :attr:`rows`, they are those of a rank, which gathers some of the matrices.

        Example:
            >>> Plan.uniform("muon-8", {"experts": (64, 384, 384)}).workspace_bytes / 2**20
            58.5
            >>> Plan.uniform("adamw-8", {"experts": (64, 384, 384)}).workspace_bytes
            0
        """
        return self.workspace()

    def workspace(self, *, one_by_one: bool = False) -> int:
        """Return :attr:`workspace_bytes`, or what it is if parameters are updated one by one in the backward pass.

        Args:
            one_by_one: whether each parameter is updated by itself, as with released gradients.

        Returns:
            The bytes, on any rank.
        """
        count: dict[object, int] = {}
        largest = 0
        for name, block in self.by_parameter:
            mechanism, shape, split = block.configuration.mechanism, block.parameters[name], block.splits.get(name)
            if mechanism.reach is not Reach.MATRIX or not math.prod(shape):
                continue
            matrices, rows, cols = as_matrices(shape)
            each, here = workspace(mechanism, split, rows, cols), self.rows.get(name, shape[0])
            is_stack = len(matrix_shape(shape)) > 2  # whose matrices are whole on the ranks that have them
            key = name if one_by_one else (mechanism.name, rows, cols, split, None if is_stack else here)
            count[key] = count.get(key, 0) + (matrices * here // shape[0] if is_stack else matrices)
            if is_stack or here == shape[0]:
                needed = min(count[key], max(1, BATCH_NUMEL // each)) * each
            else:
                ranks = math.ceil(shape[0] / here)
                batch = min(count[key], max(1, BATCH_NUMEL * ranks // each))
                # matrices that are finished here and a copy; the rows of all that are here, before and after
                needed = math.ceil(batch / ranks) * (each + rows * cols) + 2 * batch * here * math.prod(shape[1:])
            largest = max(largest, needed)
        return 4 * largest

    @property
    def reference_bytes(self) -> int:
        """Bytes of AdamW16's state for the same parameters: the budget reference."""
        return sum(block.state_bytes_as(BUDGET_REFERENCE) for block in self.blocks)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Check that the plan covers exactly these parameters.

        Args:
            shapes: global shape by parameter name.

        Raises:
            PlanError: if a parameter is missing or unknown, or has another shape.
        """
        missing = [name for name in shapes if name not in self._block_of]
        if missing:
            raise PlanError(
                f"the plan does not cover {_some(missing)}. Add each to a block, or make a new plan for this model."
            )
        unknown = [name for name in self._block_of if name not in shapes]
        if unknown:
            raise PlanError(
                f"the plan has {_some(unknown)}, which the optimizer does not have. Was the plan made for another "
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
        """Return the text of a plan file.

        Raises:
            PlanError: if a number in the plan is not finite.
        """
        blocks = [block.to_entry() for block in self.blocks]
        content = {"format": FORMAT, "version": VERSION, "settings": dict(self.settings), "blocks": blocks}
        try:
            return json.dumps(content, indent=2, allow_nan=False)
        except ValueError:
            raise PlanError("the plan has a number that is not finite, which a plan file cannot hold.") from None

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the text of a plan file.

        Args:
            text: the content of the file.

        Returns:
            The plan.

        Raises:
            PlanError: if the text is not a plan file.
        """
        content = read_json(text, "a plan file", FORMAT, VERSION, PlanError)
        blocks, settings = content.get("blocks"), content.get("settings", {})
        if not isinstance(blocks, list) or not isinstance(settings, dict):
            raise PlanError('the plan file is damaged: "blocks" must be a list, and "settings" an object.')
        _check_printed(settings)
        return cls(tuple(Block.from_entry(entry, index) for index, entry in enumerate(blocks)), settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file. An existing file is replaced only once the new one is complete.

        Args:
            path: where to write it.
        """
        text = self.to_json() + "\n"
        with replaced(path) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Args:
            path: where it is.

        Returns:
            The plan.

        Raises:
            PlanError: if it is not a plan file.
        """
        with open(path, "rb") as file:
            content = file.read()
        try:
            return cls.from_json(content.decode())
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)!r} is not a plan file: byte {error.start} is not UTF-8 text.") from None

    def __str__(self) -> str:
        return self.table()

    def table(self, *, wide: bool = False) -> str:
        """Return the blocks as a table, with total bytes and the expected loss below it.

        Args:
            wide: show full spellings, names, risk terms and reasons, in lines of any length.

        Returns:
            The text. A star marks state in host memory.
        """
        return plan_table(self, wide=wide)


def _check_printed(settings: Mapping[str, Any]) -> None:
    """Check the types of the settings that are printed with a plan."""
    for name in ("expected_loss", "expected_low", "expected_high", "expected_from_runs", "given_up", "time", "tokens"):
        if type(settings.get(name, 0)) not in (int, float):
            raise PlanError(f"the plan file is damaged: {name!r} must be a number, got {settings[name]!r}.")
    for name in ("regime", "expected_source"):
        if not isinstance(settings.get(name, ""), str):
            raise PlanError(f"the plan file is damaged: {name!r} must be text, got {settings[name]!r}.")


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    text = ", ".join(repr(name) for name in names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more"

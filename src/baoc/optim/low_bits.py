"""fp32 weights in two parts: 16-bit parameters, and their low bits in slot ``w`` of an optimizer.

:func:`to_low_precision` splits the weights of a model before an optimizer exists. Until then each parameter carries its
low bits as an attribute; the optimizer that is built next takes them over, so they are held once.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from baoc.core.codecs import WeightFormat
from baoc.core.codecs.weights import PARAM, low_bits_as, split
from baoc.core.configuration import Layout
from baoc.core.rounding import NEAREST
from baoc.core.sharding import is_sharded, local, shard_of
from baoc.core.spec import LOW_PRECISION, WEIGHT
from baoc.optim.kernels.eager import TILE_NUMEL
from baoc.optim.kernels.update import row_tiles
from baoc.optim.members import Member
from baoc.optim.state import ParamState

logger = logging.getLogger("baoc")
TYPICAL_UPDATE = 0.3
"""RMS of an update relative to the learning rate, as AdamW's is during training."""
_SAMPLED = 8  # parameters whose first rows tell whether weights were replaced
_LOOKED_AT = 1 << 14  # elements of a parameter
_KEPT = (nn.modules.batchnorm._BatchNorm,)  # modules whose parameters must have the dtype of their buffers
_CARRIED = "_baoc_low_bits"
M = TypeVar("M", bound=nn.Module)


class HasMembers(Protocol):
    """What the functions here need from an optimizer."""

    @property
    def state(self) -> Mapping[Tensor, ParamState]: ...

    def members(self) -> tuple[Member, ...]: ...


class _Carried(NamedTuple):
    low: Tensor  # int16, of this rank's rows
    version: int  # of the parameter that they belong to


# ---- a model ----


@torch.no_grad()
def to_low_precision(model: M, dtype: torch.dtype = torch.bfloat16) -> M:
    """Cast the fp32 parameters of a model to 16 bits, and keep what rounding removes.

    The optimizer that is built next takes the low bits over into slot ``w``: all of them with ``w=16``, the upper half
    with ``w=8``. Buffers keep their dtype, since bf16 damages some of them, such as rotary frequencies and running
    variances; batch norms stay fp32 as a whole, because torch computes them so for 16-bit inputs. Parameters that are
    not trained are rounded, and their low bits are not kept.

    Call it on a model with its weights, after ``fully_shard``, and before an optimizer is built.

    Args:
        model: the model. It is changed in place.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Returns:
        The same model.

    Raises:
        ValueError: the dtype is another one, parameters have gradients, or a weight does not fit into fp16.

    Example:
        >>> from baoc import BlockOptimizer
        >>> model = nn.Linear(64, 64)
        >>> exact = model.weight.detach().clone()
        >>> optimizer = BlockOptimizer(to_low_precision(model), plan="adamw[m=int8,v=int8,w=16]")
        >>> model.weight.dtype, torch.equal(fp32_state_dict(model, optimizer)["weight"], exact)
        (torch.bfloat16, True)
    """
    if dtype not in LOW_PRECISION:
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype!r}.")
    wide = {id(param) for each in model.modules() if isinstance(each, _KEPT) for param in each.parameters()}
    named = ((name, param) for name, param in model.named_parameters() if id(param) not in wide)
    names = {id(param): name for name, param in named if param.dtype == torch.float32}
    for name, param in model.named_parameters():
        if id(param) in names and param.grad is not None:
            raise ValueError(
                f"parameter {name!r} has a gradient, which would have another dtype than the parameter. Call "
                "model.zero_grad() first."
            )
        if id(param) in names and dtype == torch.float16 and param.device.type != "meta":
            _refuse_overflow(name, local(param))
    found: dict[str, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        name = names.get(id(tensor))
        if name is None or tensor.dtype != torch.float32:  # a buffer, or a tied weight that was cast before
            return tensor
        if tensor.device.type == "meta":
            return tensor.to(dtype)
        upper, low = split(local(tensor.detach()), dtype)
        if tensor.requires_grad:
            found[name] = low
        return _like(tensor, upper)

    model._apply(cast)  # type: ignore[no-untyped-call]
    for name, param in model.named_parameters():
        if name in found:
            setattr(param, _CARRIED, _Carried(found[name], param._version))
    return model


def _refuse_overflow(name: str, held: Tensor) -> None:
    largest = float(held.abs().max()) if held.numel() else 0.0
    if largest > torch.finfo(torch.float16).max:
        raise ValueError(
            f"parameter {name!r} has a weight of {largest:g}, and fp16 ends at {torch.finfo(torch.float16).max:g}. Use "
            "torch.bfloat16."
        )


def _like(tensor: Tensor, held: Tensor) -> Tensor:
    """Return this rank's part of a tensor in the form of the tensor."""
    if not is_sharded(tensor):
        return held
    from torch.distributed.tensor import DTensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def fp32_state_dict(model: nn.Module, optimizer: HasMembers) -> dict[str, Any]:
    """Return the state dict of a model with its weights in fp32, for export and evaluation.

    Weights with low bits in the optimizer are joined with them: with ``w=16`` these are exactly the weights that fp32
    training has. Other 16-bit parameters are widened.

    Args:
        model: the model.
        optimizer: its :class:`~baoc.BlockOptimizer` or :class:`~baoc.BAOC`.

    Returns:
        New tensors for all weights that were 16-bit; the others share memory with the model. Sharded weights are
        DTensors, as in ``model.state_dict()``: ``full_tensor()`` gathers one.

    Example:
        >>> from baoc import BlockOptimizer
        >>> model = nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> fp32_state_dict(model, BlockOptimizer(model))["weight"].dtype
        torch.float32
    """
    members = {id(member.param): member for member in optimizer.members()}
    exported: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            exported[name] = value
        elif value.dtype not in LOW_PRECISION or not isinstance(value, nn.Parameter):
            exported[name] = value.detach()
        elif id(value) in members:
            exported[name] = _like(value, _joined(members[id(value)], optimizer.state.get(value) or {}))
        else:
            exported[name] = value.detach().float()
    return exported


def _joined(member: Member, state: ParamState) -> Tensor:
    stored = _format(member)
    held = local(member.param.detach())
    if stored is None or any(key not in state for _, key in stored.keys):
        return held.float()
    wide = torch.empty_like(held, dtype=torch.float32)
    parts = _parts(member, stored, state)
    rows_of = member.place.local(wide) if not is_sharded(member.param) else wide
    for rows in row_tiles(rows_of.shape, TILE_NUMEL):
        rows_of[rows] = stored.decode(parts, rows)
    return wide


@torch.no_grad()
def load_fp32_state_dict(
    model: nn.Module, optimizer: HasMembers, state_dict: Mapping[str, Any], *, strict: bool = True
) -> Any:
    """Load fp32 weights into a model of 16-bit parameters and into slot ``w`` of its optimizer.

    ``model.load_state_dict`` alone would round the weights, and leave low bits that belong to others. fp32 parameters
    are loaded as usual, so one call serves both forms of a model.

    Args:
        model: the model.
        optimizer: its :class:`~baoc.BlockOptimizer` or :class:`~baoc.BAOC`.
        state_dict: weights, such as those of :func:`fp32_state_dict`. Sharded ones may be whole tensors or DTensors.
        strict: as in ``model.load_state_dict``.

    Returns:
        What ``model.load_state_dict`` returns: missing and unexpected keys.

    Example:
        >>> from baoc import BlockOptimizer
        >>> weights = nn.Linear(64, 64).state_dict()
        >>> model = nn.Linear(64, 64, dtype=torch.bfloat16)
        >>> optimizer = BlockOptimizer(model, plan="adamw[w=16]")
        >>> load_fp32_state_dict(model, optimizer, weights)
        <All keys matched successfully>
        >>> torch.equal(fp32_state_dict(model, optimizer)["weight"], weights["weight"])
        True
    """
    members = {id(member.param): member for member in optimizer.members()}
    held = model.state_dict(keep_vars=True)
    mine: dict[str, Tensor] = {}
    given = dict(state_dict)
    for name, param in held.items():
        value = given.get(name)
        if isinstance(value, Tensor) and isinstance(param, Tensor) and value.shape == param.shape:
            shard = shard_of(param, name) if is_sharded(param) else None
            mine[name] = local(value) if shard is None or is_sharded(value) else value[shard.rows]
            given[name] = _like(param, mine[name])
    result = model.load_state_dict(given, strict=strict)
    for name, param in held.items():
        member = members.get(id(param))
        stored = None if member is None else _format(member)
        if member is None or stored is None or name not in mine:
            continue
        parts = _parts(member, stored, optimizer.state[param])
        value = mine[name].to(device=param.device, dtype=torch.float32)
        value = value if is_sharded(param) else member.place.local(value)
        for rows in row_tiles(value.shape, TILE_NUMEL):
            stored.encode(parts, rows, value[rows], NEAREST)
    forget(optimizer)
    return result


# ---- an optimizer ----


def _format(member: Member) -> WeightFormat | None:
    return next((each for each in member.layout.formats if isinstance(each, WeightFormat)), None)


def _parts(member: Member, stored: WeightFormat, state: ParamState) -> dict[str, Tensor]:
    """Return what decodes a weight: its parameter and its low bits, on the parameter's device or in host memory."""
    return {**stored.held_in(member.place.held(state)), PARAM: member.place.local(member.param.detach())}


def take_over(members: Iterable[Member], states: Mapping[Tensor, ParamState]) -> None:
    """Move the low bits that parameters carry into the state of an optimizer.

    Low bits of a parameter that was written since, as by ``load_state_dict``, belong to other weights and are dropped.
    """
    for member in members:
        carried = getattr(member.param, _CARRIED, None)
        state = states.get(member.param)
        if carried is None or state is None:
            continue
        delattr(member.param, _CARRIED)
        stored = _format(member)
        if stored is not None and stored.buffers and carried.version == member.param._version:
            target = stored.held_in(member.place.held(state))[""]
            if target.numel() == carried.low.numel():
                target.copy_(low_bits_as(target.dtype, carried.low).view_as(target))


def kept(saved: Layout, layout: Layout, states: Mapping[Tensor, ParamState], member: Member) -> dict[str, Tensor]:
    """Return the low bits that stay when a checkpoint without them is loaded.

    Args:
        saved: the layout in the checkpoint.
        layout: the layout from now on.
        states: the state so far.
        member: the parameter.
    """
    if any(each.slot.of_weight for each in saved.formats):
        return {}
    now, state = _format(member), states.get(member.param, {})
    wanted = [each for each in layout.formats if each.slot.of_weight and type(each) is type(now)]
    return {key: state[key] for each in wanted for _, key in each.keys if key in state}


@torch.no_grad()
def clear(optimizer: HasMembers) -> None:
    """Set the low bits of all weights to zero: the 16-bit parameters then are the weights."""
    for member in optimizer.members():
        stored, state = _format(member), optimizer.state.get(member.param)
        for _, key in stored.keys if stored is not None and state else ():
            member.place.held(state)[key].zero_()  # type: ignore[arg-type]
    forget(optimizer)


# ---- updates that are lost without low bits ----


@torch.no_grad()
def warn_of_lost_updates(members: Iterable[Member]) -> None:
    """Log a warning that says how many updates ``w=none`` loses, if a parameter has it."""
    mine = [each for each in members if each.layout.configuration.weight == "none" and each.param.device.type != "meta"]
    total = sum(math.prod(member.shape) for member in mine)
    if not total:
        return
    shares = [lost_share(member.place.local(member.param.detach()), _rate(member)) for member in mine]
    share = sum(each * math.prod(member.shape) for each, member in zip(shares, mine)) / total
    lr = float(mine[0].group["lr"])
    logger.warning(
        "%d parameters have w=none: 16-bit weights that are rounded to nearest lose about %.0f%% of their updates at "
        "lr=%g (updates of %g lr; all of the weight decay). Use w=8, or w=sr which takes no memory.",
        len(mine), 100 * share, lr, TYPICAL_UPDATE,
    )  # fmt: skip


def _rate(member: Member) -> float:
    return float(member.group["lr"]) * (1.0 if member.lr_scale is None else member.lr_scale)


def lost_share(param: Tensor, lr: float) -> float:
    """Return the share of elements that an update of normal size does not change, rounded to nearest.

    Args:
        param: 16-bit weights; some of them are looked at.
        lr: learning rate. Updates are taken to be normal, with a deviation of :data:`TYPICAL_UPDATE` times it.

    Example:
        >>> weights = 0.02 * torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
        >>> [round(lost_share(weights.bfloat16(), lr), 2) for lr in (3e-4, 1e-4, 1e-5)]
        [0.35, 0.68, 0.96]
    """
    flat = param.reshape(-1)
    some = flat[:: max(1, flat.numel() // _LOOKED_AT)]
    if not some.numel():
        return 0.0
    exponent = torch.frexp(some.float()).exponent  # weights are 0.5 to 1 times two to its power
    half = torch.exp2(exponent.float() - 2) * torch.finfo(param.dtype).eps
    lost = torch.erf(half / max(TYPICAL_UPDATE * lr * math.sqrt(2), 1e-30))
    return float(torch.where(some == 0, 0.0, lost).mean())


# ---- weights and low bits of one checkpoint ----


def forget(optimizer: Any) -> None:
    """Let go of what weights a checkpoint's low bits belong to."""
    optimizer._expected_weights, optimizer._seen_weights = (), None


def fingerprints(members: Sequence[Member]) -> tuple[int, ...]:
    """Return a checksum of the first row of each parameter that has low bits, and 0 for others.

    The first row of a sharded parameter is on the first rank, whose texts go into a checkpoint.
    """
    return tuple(_fingerprint(member) for member in members)


def _fingerprint(member: Member) -> int:
    stored = _format(member)
    if stored is None or not stored.buffers or member.place.first_row or member.param.device.type == "meta":
        return 0
    held = member.place.local(member.param.detach())
    if not held.numel():
        return 0
    row = held[0].contiguous().view(-1).view(torch.uint8).cpu()
    return zlib.crc32(row.numpy().tobytes()) or 1


def text(members: Sequence[Member], expected: Sequence[int] = ()) -> str:
    """Return the fingerprints for a checkpoint; empty without low bits.

    Args:
        members: the parameters.
        expected: fingerprints of the weights that loaded low bits belong to, while these may still have to be loaded.
    """
    found = list(expected or fingerprints(members))
    return json.dumps(found) if any(found) else ""


def read(content: str) -> tuple[int, ...]:
    """Read what :func:`text` wrote.

    Raises:
        ValueError: it is damaged.
    """
    found = json.loads(content) if content else ()
    if not isinstance(found, (list, tuple)) or not all(type(each) is int for each in found):
        raise ValueError(f"the checkpoint's checksums of weights are damaged: {content[:40]!r}.")
    return tuple(found)


def check(members: Sequence[Member], expected: Sequence[int]) -> None:
    """Raise if parameters are not those that loaded low bits belong to.

    Raises:
        RuntimeError: says how many, and what to do.
    """
    pairs = [(m, want, has) for m, want, has in zip(members, expected, fingerprints(members)) if want and has]
    wrong = [member.name for member, want, has in pairs if want != has]
    if wrong:
        nbytes = sum(_low_bytes(member) for member, _, _ in pairs)
        raise RuntimeError(
            f"the optimizer's checkpoint has {nbytes} B of low bits (slot '{WEIGHT.name}'), but {len(wrong)} of "
            f"{len(pairs)} parameters, such as {wrong[0]!r}, are not the weights that they belong to. Load the model's "
            "weights of the same step too; or call baoc.load_fp32_state_dict(model, optimizer, weights) for fp32 "
            "weights; or optimizer.clear_low_bits() to train on from the weights as they are."
        )


class Sight(NamedTuple):
    """What parameters with low bits were after a step."""

    versions: tuple[int, ...]
    sample: Tensor  # bits of first rows


def sight(members: Iterable[Member]) -> Sight | None:
    """Note what parameters with low bits are; ``None`` if there are none. Sharded ones do not count."""
    mine = _with_low_bits(members)
    return Sight(_versions(mine), _sample(mine)) if mine else None


def check_written(members: Iterable[Member], seen: Sight | None) -> None:
    """Raise if all parameters with low bits were replaced since the last step, as by ``model.load_state_dict``.

    Parameters that were written and then put back, as around an evaluation of averaged weights, are the same.

    Raises:
        RuntimeError: says how many, and what to do.
    """
    mine = _with_low_bits(members) if seen is not None else []
    if seen is None or len(mine) != len(seen.versions):
        return
    if any(now == then for now, then in zip(_versions(mine), seen.versions)):
        return
    sample = _sample(mine)
    if sample.shape == seen.sample.shape and not torch.equal(sample.to(seen.sample.device), seen.sample):
        nbytes = sum(map(_low_bytes, mine))
        raise RuntimeError(
            f"all {len(mine)} parameters with low bits, such as {mine[0].name!r}, were written since the last step, "
            f"but the {nbytes} B in slot '{WEIGHT.name}' belong to the weights before. If you loaded weights, "
            "load the optimizer's checkpoint of the same step too, or call baoc.load_fp32_state_dict(model, optimizer, "
            "weights), or optimizer.clear_low_bits() to train on from the weights as they are. If you write weights "
            "after each step, use w=sr."
        )


def _with_low_bits(members: Iterable[Member]) -> list[Member]:
    return [each for each in members if each.place.ranks is None and _low_bytes(each) and each.param.numel()]


def _versions(members: Sequence[Member]) -> tuple[int, ...]:
    return tuple(member.param._version for member in members)


def _sample(members: Sequence[Member]) -> Tensor:
    few = members[:: -(-len(members) // _SAMPLED)]
    rows = [member.param.detach().reshape(len(member.param) if member.param.dim() else 1, -1)[0] for member in few]
    return torch.cat([row.contiguous().view(torch.int16).to(rows[0].device) for row in rows])


def _low_bytes(member: Member) -> int:
    stored = _format(member)
    return 0 if stored is None else sum(buffer.nbytes for buffer in stored.buffers)

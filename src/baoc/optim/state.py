"""The state of one parameter: buffers under the keys of its layout, the age of every slot, and what they weigh.

Also parameters that share memory: kernels update several parameters at once, so these would race.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from baoc.core.codecs import Format
from baoc.core.configuration import Layout
from baoc.core.sharding import HOST, WHOLE, Place, has_own_memory, local

ParamState = dict[str, Any]  # buffers by their key in the layout, and "<slot>.age"
PLAIN = (Tensor, nn.Parameter)
SAMPLES = "baoc.samples"
"""The key of the first trainable parameter's state under which the tensors of a planner are stored: all kinds of
checkpoints look for tensors only there."""
_AGE = ".age"
_WRITTEN = 1 << 24  # bytes that are written to a file at a time


def new_state(layout: Layout, device: torch.device, place: Place = WHOLE) -> ParamState:
    """Return zeroed state in a layout, with all ages 0; an empty dict if the configuration is stateless."""
    state: ParamState = {}
    for stored in layout.formats:
        state |= new_slot(stored, device, place)
    return state


def new_slot(stored: Format, device: torch.device, place: Place = WHOLE) -> ParamState:
    """Return the zeroed buffers of one slot, with age 0."""
    zeros = {
        stored.key(buffer.name): place.wrap(torch.zeros(buffer.shape, dtype=buffer.dtype, device=device), buffer)
        for buffer in stored.buffers
    }
    return zeros | new_age(stored)


def new_age(stored: Format) -> ParamState:
    """Return the age entry of a slot that has seen no gradient."""
    age = torch.zeros((), dtype=torch.float32, device=HOST) if stored.slot.age_is_state else 0
    return {stored.age_key: age}


def ages_of(layout: Layout, state: Mapping[str, Any]) -> dict[str, int]:
    """Return how many gradients each slot has seen."""
    return {stored.slot.name: int(state[stored.age_key]) for stored in layout.formats}


def set_age(state: ParamState, key: str, age: int) -> None:
    """Write the age of a slot: in place where it is a tensor, so that checkpoint readers keep seeing it."""
    held = state[key]
    if isinstance(held, Tensor):
        held.fill_(age)
    else:
        state[key] = age


def is_fresh(state: Mapping[str, Any]) -> bool:
    """Return whether no slot has seen a gradient. Such a state holds nothing and may be replaced.

    >>> is_fresh({"m": torch.zeros(2), "m.age": 0}), is_fresh({"m": torch.zeros(2), "m.age": 3}), is_fresh({})
    (True, False, True)
    """
    return not any(int(value) for key, value in state.items() if key.endswith(_AGE))


def misfit(layout: Layout, held: Mapping[str, Any], device: torch.device) -> str | None:
    """Return how a state differs from its layout, or ``None`` if it does not.

    Kernels trust shapes, dtypes and addresses, so every step checks them: frameworks replace the tensors in
    ``optimizer.state`` between steps.

    Args:
        layout: what the parameter's configuration holds.
        held: the state as its place shows it.
        device: where the state should be.
    """
    on_cpu = device.type == "cpu"
    for key, buffer in layout.buffers.items():
        tensor = held.get(key)
        if tensor is None:
            return f"needs {key!r}, which is missing"
        if tensor.shape != buffer.shape or tensor.dtype is not buffer.dtype:
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            return f"needs {key!r} of {buffer.shape} {buffer.dtype}, but the optimizer holds {found}"
        if tensor.is_cpu is not on_cpu and buffer.name != "age":
            return f"keeps its state on {device}, but its {key!r} is on {tensor.device}"
    return None


def put_aside(tensor: Tensor) -> Tensor:
    """Copy a tensor out of the memory of its device: into host memory, or from there into a temporary file.

    The file has no name and is mapped, so the copy is an ordinary tensor: it can be read, written and saved, its pages
    are read when they are needed, and nothing stays on the disk.

    Args:
        tensor: a tensor without holes.

    Raises:
        OSError: if the temporary file cannot be written.

    Example:
        >>> aside = put_aside(torch.arange(3, dtype=torch.float32, device="cpu"))
        >>> aside.tolist(), aside.dtype
        ([0.0, 1.0, 2.0], torch.float32)
    """
    if has_own_memory(tensor.device):
        return tensor.to(HOST)
    with tempfile.TemporaryFile() as file:
        content: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
        for start in range(0, content.size, _WRITTEN):  # not through the mapping: a full disk would be a SIGBUS there
            file.write(content[start : start + _WRITTEN])
        file.flush()
        os.fsync(file.fileno())  # until then its pages are memory, and some file systems find no room only now
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


class Memo:
    """Remembers that the tensors of one parameter were checked, and what a kernel derived from them.

    A steady step then only has to see that they are the same objects at the same addresses. A memo holds no tensors:
    frameworks replace them to free their memory.
    """

    __slots__ = ("_address", "_buffers", "derived", "device")

    def __init__(self) -> None:
        self._address = -1  # of the parameter
        self._buffers: list[tuple[str, weakref.ref[Tensor], int]] = []  # key, tensor and address
        self.device = HOST
        """Of the parameter."""
        self.derived: Any = None
        """What the kernel that runs the parameter's jobs made of these tensors, if anything."""

    def knows(self, param: Tensor, held: Mapping[str, Any]) -> bool:
        """Return whether these are the tensors of the last :meth:`learn`, and have not moved."""
        if self._address < 0 or param.data_ptr() != self._address:
            return False
        for key, seen, address in self._buffers:
            tensor = seen()
            if tensor is None or tensor.data_ptr() != address or held.get(key) is not tensor:
                return False
        return True

    def learn(self, param: Tensor, held: Mapping[str, Any], layout: Layout) -> None:
        """Remember tensors that were checked. Subclasses are never known: their numbers may be anywhere."""
        tensors = {key: held[key] for key in layout.buffers}
        is_plain = all(type(tensor) in PLAIN for tensor in (param, *tensors.values()))
        self._address = param.data_ptr() if is_plain else -1
        self._buffers = [(key, weakref.ref(t), t.data_ptr()) for key, t in tensors.items()] if is_plain else []
        self.device = _DEVICES.setdefault(param.device, param.device)
        self.derived = None


_DEVICES: dict[torch.device, torch.device] = {}  # one object for each, to be compared quickly


# ---- bytes ----


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors in an optimizer's state. Works for any optimizer.

    Every storage counts once, and a view counts with the whole storage that it keeps alive. Tensor subclasses and
    objects in the state are searched for tensors. What a planner samples is not state: no update needs it.

    Args:
        optimizer: any ``torch.optim.Optimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> state_bytes(optimizer)
        40000
    """
    entries = optimizer.state.values()
    return held_bytes(
        {key: value for key, value in entry.items() if key != SAMPLES} if isinstance(entry, dict) else entry
        for entry in entries
    )


def held_bytes(values: Iterable[object]) -> int:
    """Return the bytes of all tensors in some values, every storage once."""
    storages: dict[int, int] = {}
    pending = list(values)
    seen: dict[int, object] = {}  # keeps values alive, so that no id occurs twice
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensor = _local(value)
            if is_traceable_wrapper_subclass(tensor):  # torchao's codes, scales and tables
                pending.extend(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            else:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr() or id(value)] = storage.nbytes()
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):  # GaLore's projectors
            pending.extend(vars(value).values())
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor on this rank."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


# ---- parameters that share memory ----


class _Extent(NamedTuple):
    device: str
    first: int  # address of the first byte
    end: int  # address after the last one
    name: str
    tensor: Tensor

    @property
    def is_dense(self) -> bool:
        return self.tensor.numel() * self.tensor.element_size() == self.end - self.first


def refuse_shared_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if two parameters have an element in common. Disjoint views of one buffer pass, interleaved ones too.

    Args:
        named: names and parameters. Tensor subclasses other than DTensors may have their numbers anywhere: they pass.

    Raises:
        ValueError: names the two parameters.

    Example:
        >>> buffer = torch.zeros(150)
        >>> refuse_shared_memory([("a", buffer[0:100]), ("b", buffer[100:150])])
        >>> refuse_shared_memory([("a", buffer[0:100]), ("b", buffer[50:150])])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: parameters 'a' and 'b' share memory, so a step would update it twice. ...
    """
    extents = sorted(extent for name, param in named if (extent := _extent(name, local(param.detach()))) is not None)
    together: list[_Extent] = []
    for extent in extents:
        if together and (extent.device != together[0].device or extent.first >= max(each.end for each in together)):
            _check_overlap(together)
            together = []
        together.append(extent)
    _check_overlap(together)


def _extent(name: str, tensor: Tensor) -> _Extent | None:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.numel() or not tensor.data_ptr():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    first = tensor.data_ptr()
    return _Extent(str(tensor.device), first, first + (last + 1) * tensor.element_size(), name, tensor)


def _check_overlap(extents: Sequence[_Extent]) -> None:
    """Check tensors whose extents overlap, from the first on without a gap. Exact: every byte has one owner."""
    if len(extents) < 2:
        return
    for one, other in itertools.pairwise(extents):  # spares the map where it is large
        if one.is_dense and other.is_dense and other.first < one.end:
            _refuse(one, other)
    start = extents[0].first
    owner = torch.zeros(max(each.end for each in extents) - start, dtype=torch.int32, device=HOST)
    for index, each in enumerate(extents):
        width = each.tensor.element_size()
        shape = (*each.tensor.shape, width)
        mine = owner.as_strided(shape, (*(stride * width for stride in each.tensor.stride()), 1), each.first - start)
        if found := int(mine.max()):
            _refuse(extents[found - 1], each)
        mine.fill_(index + 1)


def _refuse(one: _Extent, other: _Extent) -> None:
    raise ValueError(
        f"parameters {one.name!r} and {other.name!r} share memory, so a step would update it twice. To tie weights, "
        "use one nn.Parameter in both places. Otherwise give each parameter its own memory with .clone()."
    )

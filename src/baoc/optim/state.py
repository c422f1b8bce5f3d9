"""One parameter's state: buffers by their layout's keys, and the age of every slot beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from baoc.core.codecs import Format
from baoc.core.configuration import Layout
from baoc.optim.place import WHOLE, Place

ParamState = dict[str, Any]  # buffers by their layout key, and "<slot>.age"


def new_state(layout: Layout, device: torch.device, place: Place = WHOLE) -> ParamState:
    """Zeroed state in a layout, all ages 0."""
    state: ParamState = {}
    for stored in layout.formats:
        state |= new_slot(stored, device, place)
    return state


def new_slot(stored: Format, device: torch.device, place: Place = WHOLE) -> ParamState:
    """Zeroed state of one slot."""
    zeros = {
        stored.key(buffer.name): place.wrap(torch.zeros(buffer.shape, dtype=buffer.dtype, device=device), buffer)
        for buffer in stored.buffers
    }
    return zeros | new_age(stored)


def new_age(stored: Format) -> ParamState:
    """The age of a slot that has seen nothing."""
    return {stored.age_key: torch.zeros((), dtype=torch.float32) if stored.slot.age_is_state else 0}


def ages_of(layout: Layout, state: Mapping[str, Any]) -> dict[str, int]:
    """How many gradients each slot has seen."""
    return {stored.slot.name: int(state[stored.age_key]) for stored in layout.formats}


def set_age(state: ParamState, stored: Format, age: int) -> None:
    if stored.slot.age_is_state:
        state[stored.age_key].fill_(age)
    else:
        state[stored.age_key] = age


def misfit(layout: Layout, state: Mapping[str, Any], device: torch.device) -> str | None:
    """What of a state, as its place shows it, is not as its layout says, or ``None``.

    Nothing else may reach code that trusts addresses.
    """
    on_cpu = device.type == "cpu"
    for key, buffer in layout.buffers.items():
        held = state.get(key)
        if held is None:
            return f"needs {key!r}, which is missing"
        if held.shape != buffer.shape or held.dtype is not buffer.dtype:
            found = f"{tuple(held.shape)} {held.dtype}"
            return f"needs {key!r} of {buffer.shape} {buffer.dtype}, but the optimizer holds {found}"
        if held.is_cpu is not on_cpu and buffer.name != "age":
            return f"keeps its state on {device}, but its {key!r} is on {held.device}"
    return None

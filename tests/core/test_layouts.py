"""Bytes promised by the layout are the bytes held, to the byte, and a shard's layout is a cut of the whole one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from baoc import BlockOptimizer, parse, state_bytes
from baoc.core.spec import SMALL_NUMEL
from tests.cases import SHAPES, by_configuration, by_shape, gradients, train, trained

ANY_SIZE = ("bf16a", "int8a", "fp8", "int4a", "log4")
"""Codecs that do not keep small tensors in fp32."""


@pytest.mark.parametrize(**by_configuration)
@pytest.mark.parametrize(**by_shape)
def test_promised_bytes_are_held(configuration, shape):
    optimizer, param = trained(configuration, shape, steps=3)
    assert state_bytes(optimizer) == configuration.state_bytes(shape) == optimizer.plan.state_bytes
    layout = configuration.layout(shape)
    for key, buffer in layout.buffers.items():
        held = optimizer.state[param][key]
        assert (tuple(held.shape), held.dtype) == (buffer.shape, buffer.dtype)


@pytest.mark.parametrize(**by_configuration)
def test_promised_bytes_do_not_depend_on_the_parameter(configuration):
    """bf16, non-contiguous and tied parameters hold what their shape says."""
    shape = (66, 80)
    half = nn.Parameter(torch.randn(shape).bfloat16())
    transposed = nn.Parameter(torch.randn(shape[::-1]).t())
    tied, twin, head = (nn.Linear(80, 66, bias=False) for _ in range(3))
    twin.weight = tied.weight
    model = nn.ModuleList([tied, twin, head.requires_grad_(False)])
    for params, param in (([half], half), ([transposed], transposed), (model, tied.weight)):
        optimizer = BlockOptimizer(params, plan=configuration)
        train(optimizer, param, gradients(shape, 3, dtype=param.dtype))
        held = configuration.with_weight("8") if param is half else configuration
        assert state_bytes(optimizer) == held.state_bytes(shape)  # nothing for the frozen head


@pytest.mark.parametrize(**by_configuration)
def test_small_tensors_keep_fp32_state(configuration):
    layout = configuration.layout((63, 65))
    assert math.prod((63, 65)) == SMALL_NUMEL - 1
    exact = {
        key
        for stored in layout.formats
        if configuration.codec(stored.slot.name).name not in ANY_SIZE
        for _, key in stored.keys
    }
    assert {layout.buffers[key].dtype for key in exact} <= {torch.float32}


def test_codecs_for_any_size_save_memory_in_small_matrices():
    for codec, size in (("int8", 4), ("bf16a", 2), ("int8a", 1), ("fp8", 1), ("int4a", 0.5)):
        (codes, *_) = parse(f"muon[m={codec}]").layout((16, 32)).formats[0].buffers
        assert codes.nbytes == size * 16 * 32


@pytest.mark.parametrize(**by_shape)
def test_fp8_holds_one_byte_for_every_element_of_small_tensors_and_vectors(shape):
    if math.prod(shape) < SMALL_NUMEL or len(shape) < 2:
        assert parse("adamw[m=fp8,v=fp8]").state_bytes(shape) == 2 * math.prod(shape)


@pytest.mark.parametrize("row", range(4, 70))
def test_short_rows_are_packed_without_padding(row):
    """Apart from an odd element, and the rest of a row's last group of 32."""
    codes, scales = parse("adamw[m=int4a,v=fp32]").layout((300, row)).formats[0].buffers
    groups = -(-row // 32)
    padded = row + row % 2 if row < 32 else 32 * groups
    assert (codes.nbytes, scales.nbytes) == (300 * padded // 2, 300 * 2 * groups)


@pytest.mark.parametrize(**by_configuration)
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_shards_hold_the_rows_of_the_whole(configuration, world_size):
    """Buffers by rows are cut on dim 0, all others are replicas, and the dtypes are the same."""
    for shape in SHAPES.values():
        if not shape or not math.prod(shape):
            continue
        whole = configuration.layout(shape)
        height = -(-shape[0] // world_size)
        shards = [
            configuration.layout(shape, rows=max(0, min(height, shape[0] - rank * height)))
            for rank in range(world_size)
        ]
        for key, buffer in whole.buffers.items():
            parts = [shard.buffers[key] for shard in shards]
            assert {part.dtype for part in parts} == {buffer.dtype}
            if buffer.by_rows and buffer.shape:
                assert [part.shape[1:] for part in parts] == [buffer.shape[1:]] * world_size
                assert sum(part.shape[0] for part in parts) == buffer.shape[0]
            else:
                assert all(part.shape == buffer.shape for part in parts)


def test_int8_never_costs_more_than_bf16():
    for shape in SHAPES.values():
        assert parse("adamw-8").state_bytes(shape) <= parse("adamw-16").state_bytes(shape)

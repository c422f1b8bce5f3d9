"""The kernels agree, and what must not grow does not grow."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from baoc import BlockOptimizer, parse
from baoc.core.sharding import WHOLE, Ranks, Whole
from baoc.core.spec import Hyper, Reach
from baoc.optim import kernels
from baoc.optim.kernels import compiled, eager
from baoc.optim.kernels.job import Job
from baoc.optim.state import new_state
from tests.cases import SHAPES, by_configuration, gradients, train
from tests.memory import PeakMemory

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
COMPILED = ("adamw-16", "adamw-8", "adamw[m=bf16,v=factored]", "adafactor-32", "sgdwm-8")
MATRICES = [shape for name, shape in SHAPES.items() if name in ("odd matrix", "rows of several groups", "just large")]


@pytest.mark.parametrize(**by_configuration)
def test_tiles_do_not_change_the_result(configuration, monkeypatch):
    """Bitwise, but for sums over rows, whose order follows the tiles."""
    results = []
    for tile_numel in (1 << 16, 700):
        monkeypatch.setattr(eager, "TILE_NUMEL", tile_numel)
        param = nn.Parameter(torch.ones(61, 83))
        train(BlockOptimizer([param], plan=configuration, kernel="eager"), param, gradients((61, 83), 3))
        results.append(param.detach())
    stored = configuration.layout((61, 83)).formats
    if configuration.mechanism.reach is Reach.SUMS or any(each.reach is Reach.SUMS for each in stored):
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(*results)


@pytest.mark.parametrize(("dtype", "cols"), [(torch.float32, 83), (torch.bfloat16, 77)], ids=str)
@pytest.mark.parametrize(**by_configuration)
def test_long_rows_are_cut_and_end_with_the_same_bits(configuration, dtype, cols, monkeypatch):
    """The rows of a stack are matrices, so a tile of whole rows was no bound."""
    configuration, results = configuration.with_weight("8" if dtype is torch.bfloat16 else None), []
    for tile_numel in (1 << 16, 600):  # a row is cut into 5 x 512 elements and a rest of 760 or 520
        monkeypatch.setattr(eager, "TILE_NUMEL", tile_numel)
        param = nn.Parameter(torch.ones(3, 40, cols, dtype=dtype))
        optimizer = BlockOptimizer([param], plan=configuration, kernel="eager", weight_decay=0.1)
        train(optimizer, param, (grad.to(dtype) for grad in gradients(param.shape, 3)))
        results.append([param.detach(), *(x for x in optimizer.state[param].values() if torch.is_tensor(x))])
    stored = configuration.layout((3, 40, cols)).formats
    has_sums = configuration.mechanism.reach is Reach.SUMS or any(each.reach is Reach.SUMS for each in stored)
    for whole, cut in zip(*results, strict=True):
        if has_sums:  # over tiles of another height
            torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(cut, whole)


@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize(**by_configuration)
def test_no_copy_of_a_whole_state_is_made(configuration, kernel):
    """A step's temporaries are tiles, however large the parameter is, or what iterations on a matrix need."""
    param = nn.Parameter(torch.randn(2048, 1024))
    optimizer = BlockOptimizer([param], plan=configuration, kernel=kernel, maximize=True)
    train(optimizer, param, gradients((2048, 1024), 1))
    param.grad = torch.randn(2048, 1024)
    with PeakMemory() as memory:
        optimizer.step()
    tile = eager.TILE_NUMEL * 4
    mechanism = configuration.mechanism
    of_matrix = mechanism.workspace(2048, 1024) * 4 if mechanism.reach is Reach.MATRIX else 0
    assert memory.peak <= 20 * tile + of_matrix and 20 * tile < param.numel() * 4


def test_a_stack_needs_no_more_than_its_matrices_do():
    """The squares that set lengths were of whole matrices: two more than ``Plan.workspace_bytes`` counts."""
    shape = (2, 1024, 768)
    param = nn.Parameter(torch.randn(shape))
    optimizer = BlockOptimizer([param], plan="muon-8", kernel="native")
    train(optimizer, param, gradients(shape, 1))
    param.grad = torch.randn(shape)
    with PeakMemory() as memory:
        optimizer.step()
    of_matrices = 2 * parse("muon-8").mechanism.workspace(1024, 768) * 4
    assert memory.peak <= of_matrices + 4 * eager.TILE_NUMEL * 4


@pytest.mark.parametrize("codec", ["factored", "row-mean", "col-mean"])
def test_means_of_parameters_that_share_a_graph_are_their_own(codec, monkeypatch):
    """A graph serves many heights, so it must not have the height of the first one built in."""
    monkeypatch.setattr(torch, "compile", lambda step, **settings: step)  # what the code says, without compiling it
    compiled._compiled_step.cache_clear()
    held = []
    for kernel in (compiled.CompiledKernel(), eager.EagerKernel()):
        layouts = [parse(f"adamw[m=int8,v={codec}]").layout(shape) for shape in ((64, 80), (640, 80))]
        params = [torch.zeros(layout.shape) for layout in layouts]
        grads = [next(iter(gradients(layout.shape, 1))) for layout in layouts]
        states = [new_state(layout, param.device) for layout, param in zip(layouts, params)]
        kernel.run([Job.of(*each, Hyper(1e-2)) for each in zip(layouts, params, grads, states)])
        held.append([state[key] for state in states for key in state if key.startswith("v") and key != "v.age"])
    compiled._compiled_step.cache_clear()
    for ours, theirs in zip(*held):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@needs_compiler
@pytest.mark.xdist_group("compile")
@pytest.mark.parametrize("configuration", COMPILED)
def test_compiled_equals_eager(configuration):
    for shape in MATRICES:
        params = {name: nn.Parameter(torch.ones(shape)) for name in ("eager", "compiled")}
        for name, param in params.items():
            optimizer = BlockOptimizer([param], lr=1e-2, plan=configuration, kernel=name)
            train(optimizer, param, gradients(shape, 4))
        torch.testing.assert_close(params["eager"], params["compiled"], rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.xdist_group("compile")
def test_pieces_of_a_large_parameter_are_updated_as_the_whole(monkeypatch):
    """Rows that end within a group go in pieces, which bounds what a compiled update keeps between its passes."""
    monkeypatch.setattr(compiled, "PIECE_NUMEL", 5000)
    params = [nn.Parameter(torch.ones(65, 300)) for _ in range(2)]
    for kernel, param in zip(("eager", "compiled"), params):
        train(BlockOptimizer([param], lr=1e-2, plan="sgdwm-8", kernel=kernel), param, gradients((65, 300), 3))
    assert len(compiled._pieces(parse("sgdwm-8").layout((65, 300)), 65, 300)) == 5
    torch.testing.assert_close(*params, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.xdist_group("compile")
def test_compiled_code_rounds_a_shard_as_the_whole():
    class Lower(Whole):
        first_row, rows, ranks = 32, 33, Ranks(None, rank=1, size=2)

    shape, codes = (65, 300), {}
    [grad] = gradients(shape, 1)
    for place, rows in ((WHOLE, slice(0, 65)), (Lower(), slice(32, 65))):
        layout = parse("sgdwm-8").layout(shape, rows=place.rows)
        state = new_state(layout, grad.device, place)
        param = torch.ones(shape)[rows].clone()
        job = Job.of(layout, param, grad[rows].clone(), state, Hyper(lr=1e-2), place=place)
        compiled.CompiledKernel().run([job])
        codes[place.first_row] = state["m.codes"]
    assert torch.equal(codes[0][32:], codes[32])


@needs_compiler
@pytest.mark.xdist_group("compile")
@pytest.mark.parametrize("configuration", COMPILED)
def test_compilations_do_not_grow_with_steps_rates_or_tensors(configuration):
    def graphs_after(shapes, steps) -> int:
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = BlockOptimizer(params, plan=configuration, kernel="compiled")
        for step in range(steps):
            optimizer.param_groups[0].update(lr=10.0**-step, betas=(0.9 - 0.01 * step, 0.99), weight_decay=0.1 * step)
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        return counters["stats"]["unique_graphs"]

    # one of each kind of matrix: square, short rows, exactly one group, whole groups, a group that is not full
    first = graphs_after([(64, 64), (90, 64), (80, 256), (70, 512), (65, 300)], steps=2)
    again = graphs_after([(81 + i, 257 + 7 * i) for i in range(30)] + [(77, 200), (83, 1024), (99, 256)], steps=6)
    assert again == first


def test_numbers_are_made_tensors_once_a_step_whatever_the_number_of_parameters(monkeypatch):
    """On a GPU each is a copy to the device."""
    monkeypatch.setattr(compiled, "_compiled_step", lambda *form: lambda *arguments: None)
    made = []
    monkeypatch.setattr(
        compiled.torch, "tensor", lambda *given, make=torch.tensor, **how: made.append(given) or make(*given, **how)
    )
    layout, hyper = parse("adamw-8").layout((64, 80)), Hyper(lr=1e-3)
    for tensors in (2, 8):
        known: dict = {}
        jobs = [
            Job.of(layout, *torch.ones(2, 64, 80), new_state(layout, torch.device("cpu")), hyper, known=known)
            for _ in range(tensors)
        ]
        made.clear()
        compiled.CompiledKernel().run(jobs)
        assert len(made) == 2, "scalars, and phases of rounding"


def test_the_choice_of_kernel_is_reported(caplog):
    param = nn.Parameter(torch.ones(4))
    optimizer = BlockOptimizer([param], kernel="eager")
    assert optimizer.kernel == "eager on cpu: asked for by name"
    with caplog.at_level(logging.INFO, logger="baoc"):
        train(optimizer, param, gradients((4,), 3))
    assert [record.getMessage() for record in caplog.records] == [f"kernel {optimizer.kernel}"]


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match=r"unknown kernel 'fast'.*'auto', 'native', 'triton', 'compiled', 'eager'"):
        BlockOptimizer([nn.Parameter(torch.ones(4))], kernel="fast")


def test_without_a_compiler_auto_falls_back_and_compiled_says_why(monkeypatch):
    monkeypatch.setattr(kernels.triton, "obstacle", lambda device: "triton is not installed")
    monkeypatch.setattr(kernels, "_obstacle_to_compiling", lambda device: "no C++ compiler was found")
    kernels.choose.cache_clear()
    device = torch.device("cuda:0")
    assert "no C++ compiler" in str(kernels.choose("auto", device))
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler was found\. Use kernel='eager'"):
        kernels.choose("compiled", device)
    kernels.choose.cache_clear()

"""The Triton kernels in Triton's interpreter, on CPU tensors: they do what the eager kernel does, bit for bit.

Triton reads its environment when it is imported, so these run in a process of their own: see ``test_triton.py``, or
``TRITON_INTERPRET=1 python -m pytest tests/optim/test_triton_interpreted.py``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from baoc import Split, parse
from baoc.core.codecs.weights import PARAM
from baoc.core.spec import Hyper
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.triton.tables import Tiles
from baoc.optim.kernels.triton.verify import HYPER, ExactRoots, Trial
from baoc.optim.state import new_state
from baoc.tools.selfcheck import SHAPES
from tests.cases import WEIGHTS
from tests.optim.triton_cases import (
    BF16,
    CPU,
    FP16,
    FP32,
    WITH_CODE,
    Refusing,
    Shard,
    assert_equal,
    is_exact,
    kernel,
    need_interpreter,
    shapes_with_code,
    streams,
)

need_interpreter()

LOW_BITS = ("16", "8", "sr")

# The interpreter divides where it does not use the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("configuration", WITH_CODE, ids=str)
def test_it_equals_eager(configuration):
    """All tensors at once, in fp32 and in one mix with bf16. All of it has Triton code."""
    pairs = [(FP32, FP32), [(BF16, BF16), (FP32, BF16)][WITH_CODE.index(configuration) % 2]]
    for param_dtype, grad_dtype in pairs[: 1 if configuration.mechanism_name == "sinkhorn" else None]:
        shapes = shapes_with_code(configuration)
        expected, found = (Trial(configuration, shapes, param_dtype) for _ in range(2))
        for grads in streams(2, grad_dtype, shapes):
            with ExactRoots():
                expected.step(EagerKernel(), grads)
                found.step(kernel(), grads)
            assert_equal(expected, found, is_exact(configuration))


@pytest.mark.parametrize(
    ("configuration", "weight", "dtype"),
    [(each, LOW_BITS[index % 3], BF16) for index, each in enumerate(WITH_CODE)]
    + [(parse("adamw-8"), each, BF16) for each in LOW_BITS]
    + [(parse(each), weight, FP16) for each in ("adamw-8", "adafactor", "muon-8") for weight in WEIGHTS],
    ids=str,
)
def test_weights_with_low_bits_equal_eager(configuration, weight, dtype):
    """Every configuration with one of the formats of slot ``w``, and some with all of them."""
    spelled, shapes = configuration.with_weight(weight), shapes_with_code(configuration)[:3]
    expected, found = (Trial(spelled, shapes, dtype) for _ in range(2))
    for grads in streams(2, dtype, shapes):
        with ExactRoots():
            expected.step(EagerKernel(), grads)
            found.step(kernel(), grads)
    if is_exact(configuration):
        assert_equal(expected, found, exact=True)
    step = {"16": 2.0**-18, "8": 2.0**-15}.get(weight, torch.finfo(dtype).eps)
    for ours, theirs in zip(_joined(found), _joined(expected)):
        apart = (ours - theirs).abs() > step * theirs.abs() + 1e-6
        assert apart.sum() <= apart.numel() // 1000


@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_code_of_fp16_takes_the_same_step(weight):
    """Tiny, infinite and undefined weights."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(256, 256)
    layout = parse("sgdw").with_weight(weight).layout(codes.shape)
    grads = [grad for (grad,) in streams(2, FP16, [(256, 256)])]
    results = []
    for each in (EagerKernel(), kernel()):
        param, state = codes.view(FP16).clone(), new_state(layout, CPU)
        if "w" in state:
            state["w"].copy_(codes.flip(0))
        for grad, lr in zip(grads, (1e-7, 1e-3)):
            jobs = [Job.of(layout, param, grad, state, Hyper(lr=lr, weight_decay=0.0))]
            each.run(jobs)
            advance_ages(jobs)
        lost = param.isnan()
        results.append([lost, *(held.masked_fill(lost, 0) for held in (param, state.get("w", param)))])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "spelling", ["adamw[m=fp8,v=fp8]", "adamw[m=int4a,v=factored]", "adamw[m=int4a,v=log4]", "muon[m=int4a]"]
)
def test_what_has_no_code_is_left_to_the_other_kernel(spelling):
    """The formats of small models. Other tensors of the same configuration are launched."""
    shapes = [*SHAPES, (17, 320)]
    expected, found = (Trial(parse(spelling), shapes) for _ in range(2))
    for grads in streams(2, FP32, shapes):
        with ExactRoots():
            expected.step(EagerKernel(), grads)
            found.step(kernel(EagerKernel), grads)
    assert_equal(expected, found, is_exact(parse(spelling)))


def _joined(trial: Trial) -> list[Tensor]:
    """The fp32 weights."""
    weights = []
    for layout, param, state in zip(trial.layouts, trial.params, trial.states):
        stored = next(each for each in layout.formats if each.slot.of_weight)
        parts = {**stored.held_in(state), PARAM: param.view(-1, 1) if param.dim() == 0 else param}
        weights.append(stored.decode(parts, slice(0, len(parts[PARAM]))))
    return weights


@pytest.mark.parametrize("configuration", ["adamw-8", "adamw[m=int8,v=factored]", "colnorm-8"])
def test_results_do_not_depend_on_the_size_of_programs(configuration):
    """On a GPU a tensor has many small programs, in the interpreter few large ones."""
    shapes = [(25, 300), (37, 256)]
    results = []
    for tiles in (None, Tiles(segments=4, tiles=3, blocks=2)):
        trained = Trial(parse(configuration), shapes)
        for grads in streams(1, FP32, shapes):
            trained.step(triton_kernels.TritonKernel(CPU, Refusing, tiles), grads)
        results.append(trained)
    assert_equal(*results, exact=is_exact(parse(configuration)))


@pytest.mark.parametrize("configuration", ["adamw[m=int8,v=factored]", "colnorm", "adafactor"])
def test_sums_do_not_depend_on_the_order_of_programs(configuration, monkeypatch):
    """On a GPU programs run in any order; here the order is reversed."""
    shapes = [(37, 600)]
    results = []
    for is_reversed in (False, True):
        trained, tiles = Trial(parse(configuration), shapes), Tiles(segments=16, tiles=1, blocks=1)
        one = triton_kernels.TritonKernel(CPU, Refusing, tiles)
        if is_reversed:
            _reverse_programs(monkeypatch)
        trained.step(one, streams(1, FP32, shapes)[0])
        results.append(trained)
    assert_equal(*results, exact=True)


def _reverse_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    place = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: place(builder.grid_dim[0] - 1 - x, y, z))


LAUNCHES = {
    "adamw-8": ["update"],
    "adamw[m=int8,v=factored]": ["add_up", "update"],
    "adamw[m=int8,v=col-mean]": ["add_up", "update"],
    "colnorm": ["add_up", "update"],
    "sinkhorn": ["add_up"] * 10 + ["update"],
    "adafactor": ["add_up", "measure", "update"],
    "muon-8": ["update", "update"],
}


@pytest.mark.parametrize("configuration", LAUNCHES)
def test_launches_are_few(configuration, monkeypatch):
    """Their number does not grow with the number of tensors."""
    from baoc.optim.kernels.triton import launch

    launched: list[str] = []

    class Launch:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **constants: launched.append(self.name)

    for name in ("add_up", "measure", "update"):
        monkeypatch.setattr(launch, name, Launch(name))
    shapes = [(64, 80)] * 5
    Trial(parse(configuration), shapes).step(kernel(), streams(1, FP32, shapes)[0])
    assert launched == LAUNCHES[configuration]


@pytest.mark.parametrize("configuration", ["adam-8", "adamw-32", "lion-4", "colnorm", "muon-8", "sgdm-16"])
def test_nonfinite_and_maximized_gradients_show_where_the_eager_kernel_shows_them(configuration):
    shapes = [(17, 272), (600,)]
    expected, found = (Trial(parse(configuration), shapes) for _ in range(2))
    one = kernel()
    for step, grads in enumerate(streams(3, FP32, shapes)):
        for grad in grads:
            grad.view(-1)[step * 5 : step * 5 + 3] = torch.tensor([math.nan, math.inf, 1e30]) if step < 2 else 1e-30
        with ExactRoots():
            expected.step(EagerKernel(), grads, maximize=True)
            found.step(one, grads, maximize=True)
        for key, held in expected.buffers().items():
            other = found.buffers()[key]
            assert torch.equal(other.isfinite(), held.isfinite()), key
            torch.testing.assert_close(other, held, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not found.params[0].isfinite().all()


def test_misaligned_storage_gives_the_same_result():
    def shifted(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)

    expected, found = (Trial(parse("adamw-8"), [(17, 272)] * 2) for _ in range(2))
    found.params[0] = shifted(found.params[0])  # the other tensor stays aligned: two launches
    found.states[0] = {key: shifted(x) if isinstance(x, Tensor) else x for key, x in found.states[0].items()}
    for grads in streams(2, FP32, [(17, 272)] * 2):
        with ExactRoots():
            expected.step(EagerKernel(), grads)
            found.step(kernel(), grads)
    assert found.params[0].data_ptr() % 16
    assert_equal(expected, found, exact=True)


@pytest.mark.parametrize("configuration", ["adamw-8", "sgdwm-4", "adamw-16"])
def test_a_shard_is_updated_like_its_rows_of_the_whole(configuration):
    shape, first, rows = (40, 272), 13, 20
    whole, layout = Trial(parse(configuration), [shape]), parse(configuration).layout(shape, rows=rows)
    part, state = whole.params[0][first : first + rows].clone(), new_state(layout, CPU)
    for (grad,) in streams(2, FP32, [shape]):
        whole.step(kernel(), [grad])
        local = grad[first : first + rows].clone()
        job = Job.of(layout, part, local, state, HYPER, place=Shard(first, rows))
        kernel().run([job])
        advance_ages([job])
    assert torch.equal(part, whole.params[0][first : first + rows])
    for key, held in state.items():
        if isinstance(held, Tensor):
            assert torch.equal(held, whole.states[0][key][first : first + rows]), key


@pytest.mark.parametrize("configuration", ["muon-8", "normuon-8", "spectral"])
@pytest.mark.parametrize("split", [Split((40, 40, 40)), Split((30, 30), dim=1)], ids=str)
def test_split_matrices_are_finished_apart(configuration, split):
    shape = (120, 60)
    layout = parse(configuration).layout(shape)
    params, states = [torch.ones(shape), torch.ones(shape)], [new_state(layout, CPU) for _ in range(2)]
    for (grad,) in streams(2, FP32, [shape]):
        for param, state, each in zip(params, states, (EagerKernel(), kernel())):
            jobs = [Job.of(layout, param, grad, state, HYPER, split=split)]
            with ExactRoots():
                each.run(jobs)
            advance_ages(jobs)
    torch.testing.assert_close(*params, rtol=1e-5, atol=1e-6)
    whole, state = torch.ones(shape), new_state(layout, CPU)
    (grad,) = streams(1, FP32, [shape])[0]
    kernel().run([Job.of(layout, whole, grad, state, HYPER)])
    assert not torch.equal(whole, params[0])

"""The Triton kernels in Triton's interpreter, on CPU tensors: they do what the eager kernel does, bit for bit.

Triton reads its environment when it is imported, so these run in a process of their own: see ``test_triton.py``, or
``TRITON_INTERPRET=1 python -m pytest tests/test_triton_interpreted.py``.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baoc import BAOC, BlockOptimizer, Configuration, parse
from baoc.core.spec import Hyper, Reach
from baoc.optim import groups, kernels
from baoc.optim.kernels import graphs
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.triton import lineup
from baoc.optim.kernels.triton.families import form_of
from baoc.optim.kernels.triton.tables import Tiles, Written
from baoc.optim.place import Whole
from baoc.optim.state import new_state
from baoc.selfcheck.equality import SHAPES, ExactRoots, Trained, shapes_for
from benchmarks import host
from tests.cases import CONFIGURATIONS, gradients

if not triton_kernels.is_interpreted():
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16

# The interpreter divides where it does not use the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Refusing:
    """A kernel that nothing may be left to."""

    name = "refusing"

    def run(self, jobs: Iterable[Job]) -> None:
        raise AssertionError(f"left: {[(str(job.layout.configuration), job.layout.shape) for job in jobs]}")


class Shard(Whole):
    """Rows from one on of a parameter."""

    def __init__(self, first_row: int, rows: int) -> None:
        self.first_row, self.rows = first_row, rows


def kernel(other: Any = Refusing) -> triton_kernels.TritonKernel:
    return triton_kernels.TritonKernel(CPU, other)


def streams(steps: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    """The gradients of each step, in which every seventh element rests."""
    by_shape = [list(gradients(shape, steps, dtype=dtype)) for shape in shapes]
    for grad in (grad for stream in by_shape for grad in stream):
        grad.view(-1)[::7] = 0
    return [[stream[step] for stream in by_shape] for step in range(steps)]


def assert_equal(expected: Trained, found: Trained, exact: bool) -> None:
    for key, held in expected.buffers().items():
        other = found.buffers()[key]
        if exact:
            assert torch.equal(other, held), key
        elif held.is_floating_point():  # sums are of another order, and a number at an edge may take the next code
            coarse = 2.0**-7 if held.dtype == BF16 else 2e-6
            apart = ~torch.isclose(other.float(), held.float(), rtol=coarse, atol=1e-6)
            assert apart.sum() <= held.numel() // 1000, key
        else:
            apart = (other.int() - held.int()).abs()
            assert apart.max() <= 1 and (apart > 0).sum() <= max(1, held.numel() // 1000), key


def is_exact(configuration: Configuration) -> bool:
    """Its operations are IEEE's, each by itself, or torch's in both kernels, as products of matrices are: no sums."""
    return configuration.layout((64, 64)).reach is not Reach.SUMS


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_it_equals_eager(configuration):
    """All tensors at once, and nothing is left to another kernel.

    In fp32, and in turns with parameters or only gradients in bf16, but for Sinkhorn, whose turns are many.
    """
    pairs = [(FP32, FP32), [(BF16, BF16), (FP32, BF16)][CONFIGURATIONS.index(configuration) % 2]]
    for param_dtype, grad_dtype in pairs[: 1 if configuration.mechanism_name == "sinkhorn" else None]:
        shapes = shapes_for(configuration)
        expected, found = (Trained(configuration, shapes, param_dtype) for _ in range(2))
        for grads in streams(2, grad_dtype, shapes):
            with ExactRoots():
                expected.step(EagerKernel(), grads)
                found.step(kernel(), grads)
            assert_equal(expected, found, is_exact(configuration))


@pytest.mark.parametrize("configuration", ["adamw-8", "adamw[m=int8,v=factored]", "colnorm-8"])
def test_programs_of_any_size_make_the_same(configuration):
    """A GPU's are small, so a tensor has many; here they are large."""
    shapes = [(25, 300), (37, 256)]
    results = []
    for tiles in (None, Tiles(segments=4, tiles=3, blocks=2)):
        trained = Trained(parse(configuration), shapes)
        for grads in streams(1, FP32, shapes):
            trained.step(triton_kernels.TritonKernel(CPU, Refusing, tiles), grads)
        results.append(trained)
    assert_equal(*results, exact=is_exact(parse(configuration)))


@pytest.mark.parametrize("configuration", ["adamw[m=int8,v=factored]", "colnorm", "adafactor"])
def test_sums_do_not_depend_on_who_comes_last(configuration, monkeypatch):
    """Programs run in any order on a GPU; here it is turned around."""
    shapes = [(37, 600)]
    results = []
    for turned in (False, True):
        trained, tiles = Trained(parse(configuration), shapes), Tiles(segments=16, tiles=1, blocks=1)
        one = triton_kernels.TritonKernel(CPU, Refusing, tiles)
        if turned:
            _turn_around(monkeypatch)
        trained.step(one, streams(1, FP32, shapes)[0])
        results.append(trained)
    assert_equal(*results, exact=True)


def _turn_around(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """However many tensors there are."""
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
    Trained(parse(configuration), shapes).step(kernel(), streams(1, FP32, shapes)[0])
    assert launched == LAUNCHES[configuration]


@pytest.mark.parametrize("configuration", ["adam-8", "adamw-32", "lion-4", "colnorm", "muon-8", "sgdm-16"])
def test_broken_and_maximized_gradients_show_where_the_eager_kernel_shows_them(configuration):
    shapes = [(17, 272), (600,)]
    expected, found = (Trained(parse(configuration), shapes) for _ in range(2))
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


def test_storage_that_is_not_aligned_is_read_as_it_is():
    def shifted(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)

    expected, found = (Trained(parse("adamw-8"), [(17, 272)] * 2) for _ in range(2))
    found.params[0] = shifted(found.params[0])  # the other tensor is as it was: two launches
    found.states[0] = {key: shifted(x) if isinstance(x, Tensor) else x for key, x in found.states[0].items()}
    for grads in streams(2, FP32, [(17, 272)] * 2):
        with ExactRoots():
            expected.step(EagerKernel(), grads)
            found.step(kernel(), grads)
    assert found.params[0].data_ptr() % 16
    assert_equal(expected, found, exact=True)


@pytest.mark.parametrize("configuration", ["adamw-8", "sgdwm-4", "adamw-16"])
def test_a_shard_is_updated_as_its_rows_of_the_whole_are(configuration):
    shape, first, rows = (40, 272), 13, 20
    whole, layout = Trained(parse(configuration), [shape]), parse(configuration).layout(shape, rows=rows)
    part, state = whole.params[0][first : first + rows].clone(), new_state(layout, CPU)
    for (grad,) in streams(2, FP32, [shape]):
        whole.step(kernel(), [grad])
        local = grad[first : first + rows].clone()
        job = Job.of(layout, part, local, state, Hyper(lr=1e-2, weight_decay=0.1), place=Shard(first, rows))
        kernel().run([job])
        advance_ages([job])
    assert torch.equal(part, whole.params[0][first : first + rows])
    for key, held in state.items():
        if isinstance(held, Tensor):
            assert torch.equal(held, whole.states[0][key][first : first + rows]), key


class Operations(TorchDispatchMode):
    """Counts what torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_step_copies_its_numbers_once_and_addresses_when_they_change():
    def operations(tensors: int) -> list[list[str]]:
        trained, found = Trained(parse("adamw-8"), [(16, 256)] * tensors), []
        grads = streams(1, FP32, [(16, 256)] * tensors)[0]
        one = kernel()
        one._launch = lambda *arguments: None  # the interpreter has operations of its own
        for step in range(3):
            if step == 2:
                grads[0] = grads[0].clone()
            with Operations() as counted:
                trained.step(one, grads)
            found.append(counted.names)
        return found

    (_, steady, moved), (_, many, _) = operations(2), operations(8)
    assert steady == many, "what torch does must not grow with tensors"
    assert sum("copy_" in name for name in steady) == 1, "the numbers of the step"
    assert sum("copy_" in name for name in moved) == 2, "and the addresses"
    assert not any("item" in name or "_local_scalar_dense" in name for name in steady), "nothing waits for the device"


def test_nothing_is_found_out_again_where_it_lies_as_it_lay(monkeypatch):
    """New tensors at the same addresses are no news; another dtype or another stride there is."""
    trained = Trained(parse("adamw-8"), [(64, 80)] * 2)
    grads = streams(1, FP32, [(64, 80)] * 2)[0]
    one = kernel(EagerKernel)
    one._launch = lambda *arguments: None
    looked_up: list[Job] = []
    monkeypatch.setattr(lineup, "form_of", lambda job, use: looked_up.append(job) or form_of(job, use))
    trained.step(one, grads)
    assert len(looked_up) == 2
    trained.step(one, [grad.view_as(grad) for grad in grads])
    assert len(looked_up) == 2
    other = grads[0].view(BF16)[:, :80]
    assert other.data_ptr() == grads[0].data_ptr()
    trained.step(one, [other.contiguous(), grads[1]])
    trained.step(one, [other, grads[1]])
    assert len(looked_up) == 4


def test_tensors_that_step_now_and_then_have_tables_of_their_own():
    """Those of one set of tensors are not those of another with the same first one."""
    shapes = [(16, 256)] * 3
    expected, found = (Trained(parse("adamw-8"), shapes) for _ in range(2))
    one = kernel()
    for step, grads in enumerate(streams(4, FP32, shapes)):
        for trained, each in ((expected, EagerKernel()), (found, one)):
            stepping = range(3) if step % 2 else range(2)
            jobs = [
                Job.of(trained.layouts[i], trained.params[i], grads[i], trained.states[i], Hyper(lr=1e-2))
                for i in stepping
            ]
            with ExactRoots():
                each.run(jobs)
            advance_ages(jobs)
    assert_equal(expected, found, exact=True)


def test_the_cost_on_the_host_can_be_measured():
    cost = host.measure("adamw-8", steps=1)
    assert cost.launches == 2 and cost.step > cost.kernel > 0


def test_what_is_written_later_lies_where_it_lay():
    """So a captured graph of launches reads the numbers of the step that it is replayed for."""
    written = Written(CPU, FP32)
    written.write([1.0, 2.0])
    address = written.tensor.data_ptr()
    written.write([3.0, 4.0])
    assert written.tensor.data_ptr() == address and written.tensor.tolist() == [3.0, 4.0]


def recorded(optimizer: BlockOptimizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As if a graph was captured of a step: what is launched is not run, but when the result is called."""
    one: Any = kernels.choose("triton", CPU).kernel
    launch, launched = one._launch, list[tuple[Any, ...]]()
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "is_capturing", lambda device: True)
        patch.setattr(one, "_launch", lambda *arguments: launched.append(arguments))
        optimizer.step()

    def replay() -> None:
        for arguments in launched:
            launch(*arguments)

    return replay


@pytest.mark.parametrize("configuration", ["adamw-8", "adamw[m=int8,v=factored]", "adafactor"])
def test_a_captured_step_is_replayed_with_the_numbers_of_its_step(configuration, monkeypatch):
    """Ages and learning rates go on, and usual steps may come between."""
    shape, results = (24, 272), []
    for captures in (False, True):
        param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        param.grad = torch.zeros(shape)
        optimizer = BlockOptimizer([param], lr=1e-2, plan=configuration, kernel="triton")
        replay = None
        for step, grad in enumerate(gradients(shape, 5)):
            optimizer.param_groups[0]["lr"] *= 0.9
            param.grad.copy_(grad)
            if captures and step == 1:
                replay = recorded(optimizer, monkeypatch)
            if replay is None or step == 3:
                optimizer.step()
            else:
                with graphs.replaying():
                    optimizer.step()
                replay()
        results.append((param, optimizer.state_dict()["state"][0]))
    (param, state), (replayed, found) = results
    assert torch.equal(param, replayed)
    for key, held in state.items():
        assert torch.equal(held, found[key]) if torch.is_tensor(held) else held == found[key], key


def test_what_a_graph_cannot_do_is_refused(monkeypatch):
    def optimizer(plan: str = "adamw-8", **settings: Any) -> BlockOptimizer:
        param = nn.Parameter(torch.ones(64, 80))
        param.grad = torch.ones(64, 80)
        return BlockOptimizer([("weight", param)], plan=plan, **{"kernel": "triton"} | settings)

    for made, refusal in (
        (optimizer(kernel="eager"), "kernel='eager' cannot be in a CUDA graph"),
        (optimizer(on_nonfinite="skip"), "on_nonfinite='skip' has to look at gradients"),
        (optimizer("normuon-8"), r"'weight' cannot be updated in a CUDA graph: .* normuon\[m=int8"),
    ):
        with pytest.raises(RuntimeError, match=refusal):
            recorded(made, monkeypatch)
    with graphs.replaying(), pytest.raises(RuntimeError, match="no step of these 1 parameters was captured"):
        optimizer().step()
    with graphs.replaying(), pytest.raises(RuntimeError, match="kernel='eager' cannot be in a CUDA graph"):
        optimizer(kernel="eager").step()
    captured = optimizer()
    other = nn.Parameter(torch.ones(64, 80))
    other.grad = torch.ones(64, 80)
    captured.param_groups[0]["params"].append(other)
    captured.param_groups[0]["param_names"].append("other")
    captured.step()
    recorded(captured, monkeypatch)
    captured.state[other]["m.age"] = 5  # so it has numbers of its own
    with graphs.replaying(), pytest.raises(RuntimeError, match="have changed since the step was captured"):
        captured.step()


class Tagged(Tensor):
    """A subclass that changes nothing."""


FALLBACKS = [
    ("the format FactoredFormat of 'v'", "adafactor", torch.ones(8, 16, 5, 5)),
    ("numbers of type torch.float16", "adamw-8", torch.ones(64, 80, dtype=torch.float16)),
    ("means over the matrices of a stack", "adamw[m=int8,v=factored]", torch.ones(4, 64, 80)),
    ("memory that is not contiguous", "adamw-8", torch.ones(80, 64).t()),
    ("memory that is not contiguous", "muon-8", torch.ones(80, 64).t()),
    ("a tensor of type Tagged", "adamw-8", torch.ones(64, 80).as_subclass(Tagged)),
]


@pytest.mark.parametrize(
    ("reason", "configuration", "value"), FALLBACKS, ids=lambda each: each if isinstance(each, str) else str(each.dtype)
)
def test_what_there_is_no_code_for_is_left_by_name(reason, configuration, value, caplog):
    layout = parse(configuration).layout(tuple(value.shape))
    results = []
    for each in (EagerKernel(), kernel(EagerKernel)):
        param, state = value.clone(), new_state(layout, CPU)
        job = Job.of(layout, param, torch.full_like(param, 0.5), state, Hyper(lr=0.1), name="weight")
        with caplog.at_level(logging.INFO, logger="baoc"):
            each.run([job])
        results.append(param)
    assert torch.equal(*results) and not torch.equal(results[0], value)
    assert [record.getMessage() for record in caplog.records] == [
        f"the eager kernel updates 'weight': there is no Triton code for {reason}"
    ]


def test_a_shard_of_what_has_means_is_left():
    layout = parse("adamw[m=int8,v=factored]").layout((64, 80), rows=20)
    param, state = torch.ones(20, 80), new_state(layout, CPU)
    job = Job.of(layout, param, torch.ones(20, 80), state, Hyper(lr=0.1), place=Shard(20, 20))
    assert form_of(job, "step") == "sums over the rows of a shard"


def test_an_optimizer_runs_on_it():
    params = {name: nn.Parameter(torch.ones(64, 80)) for name in ("triton", "eager")}
    for name, param in params.items():
        optimizer = BlockOptimizer([param], plan="adamw-8", kernel=name)
        for grad in gradients((64, 80), 2):
            param.grad = grad
            before = param._version
            optimizer.step()
            assert param._version > before, "autograd must see that it has changed"
        assert optimizer.kernel == f"{name} on cpu: asked for by name"
    torch.testing.assert_close(*params.values(), rtol=1e-6, atol=1e-7)


def test_it_moves_parameters_whose_momentum_is_in_host_memory(monkeypatch):
    monkeypatch.setattr(groups, "has_own_memory", lambda device: True)
    found = []
    for offload in (False, True):
        params = [nn.Parameter(torch.ones(64, 80)), nn.Parameter(torch.ones(96, 64)), nn.Parameter(torch.ones(64))]
        optimizer = BlockOptimizer(params, plan="muon-8 else adamw-8", kernel="triton", offload=offload)
        streams = [gradients(tuple(param.shape), 2) for param in params]
        for grads in zip(*streams):
            for param, grad in zip(params, grads):
                param.grad = grad
            optimizer.step()
        found.append([param.detach() for param in params])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


LATE = ["adamw-8", "adamw[m=int8,v=factored]", "adafactor", "colnorm-8", "muon-8", "normuon-8", "lion-4"]


@pytest.mark.parametrize("configuration", LATE)
@pytest.mark.parametrize("looks", [False, True], ids=["unwatched", "watched"])
def test_a_step_that_is_left_out_on_the_device_is_as_if_it_had_not_been(configuration, looks):
    """The host learns of it before the next step, or when somebody looks."""
    shape, at = (24, 272), (0, 2)
    stream = list(gradients(shape, 5))
    for step in at:
        stream[step][3, 77] = math.nan
    runs = []
    for grads in (stream, [grad for step, grad in enumerate(stream) if step not in at]):
        param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        optimizer = BlockOptimizer([param], plan=configuration, kernel="triton", on_nonfinite="skip")
        for grad in grads:
            param.grad = grad
            optimizer.step()
            if looks:
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append((param, optimizer.state_dict()["state"][0], optimizer.metrics()))
    (param, state, metrics), (spared, expected, _) = runs
    assert torch.equal(param, spared)
    for key, held in expected.items():
        assert torch.equal(held, state[key]) if torch.is_tensor(held) else held == state[key], key
    assert (metrics["nonfinite_steps"], metrics["skipped_steps"]) == (2, 2)


def test_the_host_waits_only_for_what_other_kernels_run():
    bad, shapes = torch.tensor([1.0, 0.0]), [(16, 256)] * 2

    def waits(configuration: str, grads: list[Tensor], one: Any) -> int:
        trained = Trained(parse(configuration), shapes)
        before = {key: held.clone() for key, held in trained.buffers().items()}
        jobs = [
            Job.of(layout, param, grad, state, Hyper(lr=0.1))
            for layout, param, grad, state in zip(trained.layouts, trained.params, grads, trained.states)
        ]
        with Operations() as counted:
            launch, one._launch = one._launch, lambda *arguments: None
            one.run(jobs, bad)
        one._launch = launch
        one.run(jobs, bad)
        assert all(torch.equal(held, before[key]) for key, held in trained.buffers().items())
        return sum("_local_scalar_dense" in name for name in counted.names)

    grads = streams(1, FP32, shapes)[0]
    for configuration in ("adamw-8", "adafactor", "muon-8", "sinkhorn"):
        assert waits(configuration, grads, kernel()) == 0, configuration
    assert waits("normuon-8", grads, kernel()) == 1, "torch's operations remember its directions"
    assert waits("adamw-8", [grads[0], grads[1].half()], kernel(EagerKernel)) == 1


def test_what_plans_asks_at_once_while_it_samples_and_takes_back_late_steps_after():
    found = {}
    for name in ("triton", "eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.Linear(96, 50))
        optimizer = BAOC(model, memory=0.8, warmup=2, kernel=name, on_nonfinite="skip", promote=False, quiet=True)
        late = []
        for bad in (True, False, False, True, False, True):
            loss = nn.functional.cross_entropy(model(torch.arange(32)), torch.arange(32))
            (loss * math.nan if bad else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            late.append(optimizer._guard._open is not None)
        assert late == [False] * 3 + [name == "triton"] * 3
        state = copy.deepcopy(optimizer).state_dict()["state"]
        ages = {key: float(held) for key, held in state[1].items() if key.endswith("age")}
        metrics = optimizer.metrics()
        found[name] = metrics["steps"], metrics["skipped_steps"], metrics["warmup"], ages
    assert found["triton"] == found["eager"] and found["eager"][:3] == (3, 3, 0)


def test_memory_that_was_freed_is_refused():
    param = nn.Parameter(torch.ones(64, 80))
    optimizer = BlockOptimizer([param], plan="adamw-8", kernel="triton")
    param.grad = torch.ones(64, 80)
    optimizer.step()
    param.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory of its gradient was freed"):
        optimizer.step()

"""Steps of the Triton kernel in Triton's interpreter: reused tables, CUDA graphs, skipped steps and fallbacks.

See ``test_triton.py`` for how these run.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baoc import BAOC, BlockOptimizer, PaperPlanner, parse
from baoc.core.spec import Hyper
from baoc.optim import kernels, members
from baoc.optim.kernels import graphs
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.triton.families import form_of
from baoc.optim.kernels.triton.tables import DeviceList
from baoc.optim.kernels.triton.verify import ExactRoots, Trial
from baoc.optim.state import new_state
from tests.cases import gradients
from tests.optim.triton_cases import BF16, CPU, FP32, Shard, assert_equal, kernel, need_interpreter, streams

need_interpreter()

# The interpreter divides where it does not use the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Operations(TorchDispatchMode):
    """Records the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_step_copies_its_scalars_once_and_addresses_only_when_they_change():
    def operations(tensors: int) -> list[list[str]]:
        trained, found = Trial(parse("adamw-8"), [(16, 256)] * tensors), []
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
    assert steady == many, "operations must not grow with the number of tensors"
    assert sum("copy_" in name for name in steady) == 1, "the scalars of the step"
    assert sum("copy_" in name for name in moved) == 2, "and the addresses"
    assert not any("item" in name or "_local_scalar_dense" in name for name in steady), "nothing waits for the device"


def test_forms_are_looked_up_again_only_if_dtypes_or_strides_change(monkeypatch):
    """New tensors at the same addresses do not count as a change."""
    trained = Trial(parse("adamw-8"), [(64, 80)] * 2)
    grads = streams(1, FP32, [(64, 80)] * 2)[0]
    one = kernel(EagerKernel)
    one._launch = lambda *arguments: None
    looked_up: list[Job] = []
    monkeypatch.setattr(triton_kernels.kernel, "form_of", lambda job, use: looked_up.append(job) or form_of(job, use))
    trained.step(one, grads)
    assert len(looked_up) == 2
    trained.step(one, [grad.view_as(grad) for grad in grads])
    assert len(looked_up) == 2
    other = grads[0].view(BF16)[:, :80]
    assert other.data_ptr() == grads[0].data_ptr()
    trained.step(one, [other.contiguous(), grads[1]])
    trained.step(one, [other, grads[1]])
    assert len(looked_up) == 4


def test_lists_of_jobs_with_the_same_first_parameter_have_their_own_tables():
    shapes = [(16, 256)] * 3
    expected, found = (Trial(parse("adamw-8"), shapes) for _ in range(2))
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


def test_values_of_the_same_length_keep_their_address():
    """So a captured graph reads the scalars of the step that it is replayed for."""
    written = DeviceList(CPU, FP32)
    written.write([1.0, 2.0])
    address = written.tensor.data_ptr()
    written.write([3.0, 4.0])
    assert written.tensor.data_ptr() == address and written.tensor.tolist() == [3.0, 4.0]


def recorded(optimizer: BlockOptimizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Simulate the capture of a step: its launches run when the returned function is called."""
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
def test_a_replayed_step_uses_its_own_scalars(configuration, monkeypatch):
    """Ages and learning rates advance, and ordinary steps may come between."""
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


def test_steps_that_a_graph_cannot_make_are_refused(monkeypatch):
    def optimizer(plan: str = "adamw-8", **settings: Any) -> BlockOptimizer:
        param = nn.Parameter(torch.ones(64, 80))
        param.grad = torch.ones(64, 80)
        return BlockOptimizer([("weight", param)], plan=plan, **{"kernel": "triton"} | settings)

    for made, refusal in (
        (optimizer(kernel="eager"), "kernel='eager' cannot be in a CUDA graph"),
        (optimizer(on_nonfinite="skip"), "on_nonfinite='skip' has to look at gradients"),
        (optimizer("normuon-8"), r"'weight' cannot be updated in a CUDA graph: normuon\[m=int8"),
    ):
        made.step()
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
    captured.state[other]["m.age"] = 5  # so it has scalars of its own
    with graphs.replaying(), pytest.raises(RuntimeError, match="have changed since the step was captured"):
        captured.step()


class Tagged(Tensor):
    """A subclass that changes nothing."""


FALLBACKS = [
    ("the format FactoredFormat of 'v'", "adafactor", torch.ones(8, 16, 5, 5)),
    ("numbers of type torch.float64", "adamw-8", torch.ones(64, 80, dtype=torch.float64)),
    ("means over the matrices of a stack", "adamw[m=int8,v=factored]", torch.ones(4, 64, 80)),
    ("memory that is not contiguous", "adamw-8", torch.ones(80, 64).t()),
    ("memory that is not contiguous", "muon-8", torch.ones(80, 64).t()),
    ("a tensor of type Tagged", "adamw-8", torch.ones(64, 80).as_subclass(Tagged)),
]


@pytest.mark.parametrize(
    ("reason", "configuration", "value"), FALLBACKS, ids=lambda each: each if isinstance(each, str) else str(each.dtype)
)
def test_jobs_without_triton_code_go_to_the_other_kernel_and_the_log_says_why(reason, configuration, value, caplog):
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


def test_a_shard_with_sums_has_no_triton_code():
    layout = parse("adamw[m=int8,v=factored]").layout((64, 80), rows=20)
    param, state = torch.ones(20, 80), new_state(layout, CPU)
    job = Job.of(layout, param, torch.ones(20, 80), state, Hyper(lr=0.1), place=Shard(20, 20))
    assert form_of(job, "step") == "sums over the rows of a shard"


def test_an_optimizer_runs_on_the_triton_kernel():
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


def test_matrices_with_momentum_in_host_memory_are_updated(monkeypatch):
    monkeypatch.setattr(members, "has_own_memory", lambda device: True)
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


SKIPPED = ["adamw-8", "adamw[m=int8,v=factored]", "adafactor", "colnorm-8", "muon-8", "normuon-8", "lion-4"]


@pytest.mark.parametrize("configuration", SKIPPED)
@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
def test_a_step_skipped_on_the_device_leaves_no_trace(configuration, reads):
    """The host learns of it before the next step, or when state is read."""
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
            if reads:
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append((param, optimizer.state_dict()["state"][0], optimizer.metrics()))
    (param, state, metrics), (spared, expected, _) = runs
    assert torch.equal(param, spared)
    for key, held in expected.items():
        assert torch.equal(held, state[key]) if torch.is_tensor(held) else held == state[key], key
    assert (metrics["nonfinite_steps"], metrics["skipped_steps"]) == (2, 2)


def test_the_host_waits_only_if_other_kernels_take_part():
    bad, shapes = torch.tensor([1.0, 0.0]), [(16, 256)] * 2

    def waits(configuration: str, grads: list[Tensor], one: Any) -> int:
        trained = Trial(parse(configuration), shapes)
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
    assert waits("normuon-8", grads, kernel()) == 1, "torch operations average its directions"
    assert waits("adamw-8", [grads[0], grads[1].double()], kernel(EagerKernel)) == 1


def test_a_planner_that_samples_knows_at_once_and_late_skips_are_taken_back_after():
    found = {}
    for name in ("triton", "eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.Linear(96, 50))
        planner = PaperPlanner(warmup=2)
        optimizer = BAOC(model, memory=0.8, planner=planner, kernel=name, on_nonfinite="skip", verbose=False)
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


def test_freed_memory_is_refused():
    param = nn.Parameter(torch.ones(64, 80))
    optimizer = BlockOptimizer([param], plan="adamw-8", kernel="triton")
    param.grad = torch.ones(64, 80)
    optimizer.step()
    param.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory of its gradient was freed"):
        optimizer.step()

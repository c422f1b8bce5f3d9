"""State in host memory: the same numbers, the bytes that were promised on each side, and buckets that lose nothing.

There is no accelerator here. Parameters on the CPU are sent through the buckets as if they were on one: by a lane that
copies at once, and by one that copies as late as it may, as streams might. Where only shapes and places matter, the
meta device is the other device.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc import (
    BAOC,
    Block,
    BlockOptimizer,
    Budget,
    EffectPlanner,
    ModelFacts,
    PaperPlanner,
    Plan,
    PlanError,
    collect_statistics,
    make_plan,
    parse,
    state_bytes,
)
from baoc.core.mechanisms import MECHANISMS
from baoc.core.roles import role_of
from baoc.optim import engine, members
from baoc.optim.staging import ALIGNMENT, BUFFERS, Load, Pair, PlainLane, aligned, bucket_bytes, buckets
from baoc.optim.state import held_bytes
from baoc.planners.placement import NoRoom, placed, plan_traffic, traffic
from tests.cases import SHAPES, by_configuration, gradients
from tests.toys import Polar

NATIVE = pytest.mark.skipif("not built" in BlockOptimizer([nn.Parameter(torch.ones(2))]).kernel, reason="no C compiler")
SMALL_BUCKET = 4096


class LateLane(PlainLane):
    """Copies when somebody waits, and not before: two queues, as two streams would have them."""

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[int, Callable[[], None]]]] = {"down": [], "up": []}
        self._numbers = itertools.count()
        self.late = 0  # copies that somebody had to wait for

    def down(self, pairs: Sequence[Pair], after: Any) -> Any:
        def copied() -> None:
            if after is not None:
                self._run("up", after)
            for host, device in pairs:
                host.copy_(device)

        return self._later("down", copied)

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Any:
        return self._later("up", lambda: PlainLane.up(self, pairs, in_turn=in_turn))

    def wait(self, ticket: Any) -> None:
        self._run("down", ticket)

    def end(self) -> None:
        self._run("up", math.inf)

    def _later(self, queue: str, copied: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._queues[queue].append((number, copied))
        return number

    def _run(self, queue: str, until: float) -> None:
        while self._queues[queue] and self._queues[queue][0][0] <= until:
            self.late += 1
            self._queues[queue].pop(0)[1]()


@pytest.fixture(params=[PlainLane, LateLane])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU has memory of its own for a while; the lane to it."""
    lane = request.param()
    monkeypatch.setattr(members, "has_own_memory", lambda device: True)
    monkeypatch.setattr(engine, "lane_to", lambda device: lane)
    return lane


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(1)
    return [(n, nn.Parameter(torch.randn(s, generator=generator).to(dtype))) for n, s in SHAPES.items()]


def steps(optimizer: BlockOptimizer, named: Sequence[tuple[str, nn.Parameter]], count: int = 3, seed: int = 0) -> None:
    streams = [gradients(tuple(p.shape), count, seed=seed + i, dtype=p.dtype) for i, (_, p) in enumerate(named)]
    for _ in range(count):
        for (_, param), stream in zip(named, streams):
            param.grad = next(stream)
        optimizer.step()


def assert_same(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]], *optimizers: Any) -> None:
    for (name, mine), (_, theirs) in zip(one, other):
        assert torch.equal(mine, theirs), name
        states = [optimizer.state.get(param, {}) for optimizer, param in zip(optimizers, (mine, theirs))]
        assert states[0].keys() == states[1].keys()
        for key in states[0]:
            left, right = states[0][key], states[1][key]
            assert torch.equal(left, right) if torch.is_tensor(left) else left == right, (name, key)


# ---- numbers ----


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(**by_configuration)
def test_an_offloaded_step_is_the_same_to_the_bit(configuration, dtype, apart):
    plan = f"{configuration} else adamw-32"
    here, there = parameters(dtype), parameters(dtype)
    plain = BlockOptimizer(here, lr=1e-2, weight_decay=0.1, plan=plan)
    offloaded = BlockOptimizer(there, lr=1e-2, weight_decay=0.1, plan=plan, offload=True, offload_bucket=SMALL_BUCKET)
    steps(plain, here)
    steps(offloaded, there)
    assert_same(here, there, plain, offloaded)
    if offloaded.plan.state_bytes:
        assert offloaded.metrics()["staging_bytes"] > 0
        assert not isinstance(apart, LateLane) or apart.late


def test_without_a_compiler_it_is_the_same_too(apart):
    here, there = parameters(), parameters()
    plain = BlockOptimizer(here, plan="normuon-8 else adamw[m=int8,v=factored]", kernel="eager")
    offloaded = BlockOptimizer(
        there, plan="normuon-8 else adamw[m=int8,v=factored]", kernel="eager", offload=True, offload_bucket=SMALL_BUCKET
    )
    steps(plain, here)
    steps(offloaded, there)
    assert_same(here, there, plain, offloaded)


@NATIVE
def test_blocks_here_and_there_and_a_large_bucket(apart):
    shapes = {name: tuple(param.shape) for name, param in parameters()}
    suited = {name: parse("muon-8 else adamw-8").suited(shape, role_of(shape)) for name, shape in shapes.items()}
    blocks = [
        Block(name, suited[name], {name: shape}, host=i % 2 == 0) for i, (name, shape) in enumerate(shapes.items())
    ]
    here, there = parameters(), parameters()
    plain = BlockOptimizer(here, plan=Plan(tuple(blocks)).offloaded(host=False))
    offloaded = BlockOptimizer(there, plan=Plan(tuple(blocks)))
    steps(plain, here)
    steps(offloaded, there)
    assert_same(here, there, plain, offloaded)
    assert offloaded.metrics()["host_bytes"] == offloaded.plan.host_bytes < offloaded.plan.state_bytes


@NATIVE
@pytest.mark.parametrize("settings", [{"maximize": True}, {"on_nonfinite": "skip"}, {"on_nonfinite": "step"}], ids=str)
def test_settings_and_guard_rails_hold(settings, apart):
    here, there = parameters(), parameters()
    plain = BlockOptimizer(here, plan="muon-8 else adamw-8", **settings)
    offloaded = BlockOptimizer(there, plan="muon-8 else adamw-8", offload=True, **settings)
    for optimizer, named in ((plain, here), (offloaded, there)):
        steps(optimizer, named, 2)
        for name, param in named:
            param.grad.view(-1)[:1] = math.inf if name in ("odd matrix", "vector") else 1e20
        optimizer.step()
        steps(optimizer, named, 1, seed=9)
        optimizer.metrics()
        steps(optimizer, named, 1, seed=10)
    for (name, mine), (_, theirs) in zip(here, there):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True, msg=name)
    ours, theirs = plain.metrics(), offloaded.metrics()
    assert theirs.pop("host_bytes") == plain.plan.state_bytes and theirs.pop("staging_bytes") > 0
    assert {key: str(value) for key, value in ours.items()} == {key: str(value) for key, value in theirs.items()}
    assert ours["nonfinite_steps"] == 1


def test_channels_last_and_views_go_through_as_they_lie(apart):
    def made() -> list[tuple[str, nn.Parameter]]:
        generator = torch.Generator().manual_seed(3)
        convolution = torch.randn(16, 12, 5, 5, generator=generator).to(memory_format=torch.channels_last)
        turned = torch.randn(80, 70, generator=generator).t()
        phases = torch.randn(40, 60, dtype=torch.complex64, generator=generator)
        return [("conv", nn.Parameter(convolution)), ("turned", nn.Parameter(turned)), ("phases", nn.Parameter(phases))]

    here, there = made(), made()
    plain = BlockOptimizer(here, plan="adamw-8")
    offloaded = BlockOptimizer(there, plan="adamw-8", offload=True, offload_bucket=SMALL_BUCKET)
    for optimizer, named in ((plain, here), (offloaded, there)):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for _, param in named:
                param.grad = torch.randn(param.shape, dtype=param.dtype, generator=generator)
                param.grad = param.grad.to(memory_format=torch.preserve_format).clone()
            optimizer.step()
    assert_same(here, there, plain, offloaded)
    assert [param.stride() for _, param in there] == [param.stride() for _, param in here]


class Coupled(Polar):
    """Its direction depends on the parameter."""

    name = "coupled"
    decoupled = False


class Own(Polar):
    """C code knows nothing of it."""

    name = "own"


@pytest.mark.parametrize("mechanism", [Coupled(), Own()], ids=lambda mechanism: mechanism.name)
def test_mechanisms_of_your_own_go_by_way_of_the_host_too(mechanism, apart, monkeypatch):
    monkeypatch.setitem(MECHANISMS, mechanism.name, mechanism)
    found = []
    for offload in (False, True):
        named = [("weight", nn.Parameter(torch.randn(80, 60, generator=torch.Generator().manual_seed(0))))]
        optimizer = BlockOptimizer(named, lr=0.1, weight_decay=0.5, plan=f"{mechanism.name}[m=int8]", offload=offload)
        steps(optimizer, named)
        found.append(named[0][1].detach())
    assert torch.equal(*found)


def test_what_is_freed_is_refused_before_anything_changes(apart):
    named = parameters()
    optimizer = BlockOptimizer(named, plan="adamw-8", offload=True)
    steps(optimizer, named, 1)
    before = [param.detach().clone() for _, param in named]
    dict(named)["odd matrix"].grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="'odd matrix' cannot be updated: the memory of its gradient was freed"):
        optimizer.step()
    assert all(torch.equal(param, old) for (_, param), old in zip(named, before))


@NATIVE
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plan", ["adamw-32", "adamw-8", "adamw[m=int8,v=factored]", "lion-4"])
def test_on_a_gpu_it_is_the_host_that_updates(plan):
    here, there = parameters(torch.bfloat16), [(n, nn.Parameter(p.cuda())) for n, p in parameters(torch.bfloat16)]
    plain = BlockOptimizer(here, plan=plan)
    offloaded = BlockOptimizer(there, plan=plan, offload=True, offload_bucket=SMALL_BUCKET)
    for step in range(20):
        for ((_, mine), (_, theirs)), seed in zip(zip(here, there), itertools.count(step)):
            mine.grad = next(gradients(tuple(mine.shape), 1, seed=seed, dtype=mine.dtype))
            theirs.grad = mine.grad.cuda()
        plain.step()
        offloaded.step()
    for (name, mine), (_, theirs) in zip(here, there):
        assert torch.equal(mine, theirs.cpu()), name


# ---- buckets ----

LOADS = [
    [],
    [Load(3, (40, 40), True)],
    [Load(1000, (40, 40), True), Load(7, (4, 8), True), Load(1, (10**6, 4), True), Load(50, (1000, 2000), False)],
    [Load(rows, (rows % 7 * 4, 64), rows % 3 > 0) for rows in range(1, 90)],
    [Load(5, (0, 0), True), Load(100_000, (4, 2), True), Load(2, (2048, 2048), True)],
]


@pytest.mark.parametrize("most", [4096, 10_000, 1 << 20])
@pytest.mark.parametrize("loads", LOADS, ids=range(len(LOADS)))
def test_buckets_have_all_once_in_order_and_are_no_larger_than_they_may_be(loads, most):
    found = buckets(loads, most)
    rows = [(part.load, row) for bucket in found for part in bucket for row in range(part.rows.start, part.rows.stop)]
    assert rows == [(index, row) for index, load in enumerate(loads) for row in range(load.rows)]
    for bucket in found:
        nbytes = sum(loads[part.load].nbytes(part.rows.stop - part.rows.start) for part in bucket)
        [first, *others] = bucket
        is_one = not others and (not loads[first.load].by_rows or first.rows.stop - first.rows.start == 1)
        assert nbytes <= most or is_one
    whole = [part for bucket in found for part in bucket if part.rows == slice(0, loads[part.load].rows)]
    fitting = [index for index, load in enumerate(loads) if load.nbytes(load.rows) <= most]
    assert set(fitting) <= {part.load for part in whole}, "what fits is not cut"
    for one, other in itertools.pairwise(found):
        room = most - sum(loads[part.load].nbytes(part.rows.stop - part.rows.start) for part in one)
        assert loads[other[0].load].nbytes(other[0].rows.stop - other[0].rows.start) > room, "no bucket is left early"


def test_buffers_hold_three_buckets_at_most(apart):
    named = [(str(i), nn.Parameter(torch.ones(64, 64))) for i in range(40)]
    optimizer = BlockOptimizer(named, plan="adamw-8", offload=True, offload_bucket=SMALL_BUCKET * 10)
    steps(optimizer, named, 2)
    held = optimizer.metrics()["staging_bytes"]
    assert 0 < held <= 3 * SMALL_BUCKET * 10
    large = nn.Parameter(torch.ones(512, 512))
    optimizer.add_param_group({"params": [("large", large)], "configuration": "adamw[m=int8,v=factored]"})
    steps(optimizer, [*named, ("large", large)], 3)
    one = 2 * large.nbytes  # a parameter whose sums need all of it, and its gradient
    assert held < optimizer.metrics()["staging_bytes"] <= 2 * SMALL_BUCKET * 10 + one, "one of them has grown"


@pytest.mark.parametrize("size", [0, -1, 4095, "50%", 0.5, "a lot", None, True], ids=str)
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"offload_bucket must be a size like '64MiB', or at least 4096 bytes, got"):
        BlockOptimizer(parameters(), offload_bucket=size)
    assert bucket_bytes("1MiB") == bucket_bytes(2**20) == 2**20 and bucket_bytes(2**20) % ALIGNMENT == 0


def test_what_is_neither_yes_nor_no_is_refused():
    with pytest.raises(ValueError, match=r"offload must be True .* got \['all'\]\. .* plan.offloaded\('matrices'\)"):
        BlockOptimizer(parameters(), plan="adamw-8", offload=["all"])
    with pytest.raises(TypeError, match=r"BAOC has no argument 'offload'. Did you mean 'host_memory'"):
        BAOC(Net(), offload=True)
    with pytest.raises(TypeError, match=r"BlockOptimizer has no argument 'host_memory'. Did you mean 'offload'"):
        BlockOptimizer(parameters(), host_memory=0.5)


# ---- bytes on each side ----


def on(kind: str, optimizer: BlockOptimizer) -> int:
    states = optimizer.state.values()
    return held_bytes(
        held for state in states for held in state.values() if torch.is_tensor(held) and held.device.type == kind
    )


@pytest.mark.parametrize(**by_configuration)
def test_bytes_promised_are_bytes_held_on_each_side(configuration):
    shapes = {name: shape for name, shape in SHAPES.items() if math.prod(shape)}
    suited = {n: parse(f"{configuration} else adamw-32").suited(shape, role_of(shape)) for n, shape in shapes.items()}
    blocks = tuple(Block(n, suited[n], {n: shape}, host=i % 2 == 0) for i, (n, shape) in enumerate(shapes.items()))
    named = [(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in shapes.items()]
    optimizer = BlockOptimizer(named, plan=Plan(blocks))
    counters = sum(  # torch's own habit: counters are on the CPU, whatever they count
        4 for name, _ in named for key in optimizer.plan.block_of(name).configuration.layout(shapes[name]).buffers
        if key.endswith(".age") and not optimizer.plan.block_of(name).host
    )  # fmt: skip
    assert optimizer.plan.device_bytes + optimizer.plan.host_bytes == optimizer.plan.state_bytes
    assert (on("cpu", optimizer), on("meta", optimizer)) == (
        optimizer.plan.host_bytes + counters,
        optimizer.plan.device_bytes - counters,
    )


def test_plans_move_state_between_host_and_device(apart):
    named = parameters()
    optimizer = BlockOptimizer(named, plan="muon-8 else adamw-8")
    twin_named = parameters()
    twin = BlockOptimizer(twin_named, plan="muon-8 else adamw-8")
    for plan in (optimizer.plan.offloaded(), optimizer.plan.offloaded("muon", host=False), optimizer.plan):
        optimizer.set_plan(plan)
        steps(optimizer, named, 2)
        steps(twin, twin_named, 2)
        assert optimizer.plan.host_bytes == plan.host_bytes
    assert_same(named, twin_named, optimizer, twin)
    optimizer.set_plan("adamw-16")
    assert optimizer.plan.host_bytes == 0


def test_a_plan_that_is_spelled_stays_where_the_optimizer_was_told():
    optimizer = BlockOptimizer(parameters(), plan="adamw-8", offload=True)
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(64, 64)))]})
    assert optimizer.plan.device_bytes == 0
    optimizer.set_plan("sgdm-8")
    assert optimizer.plan.device_bytes == 0 < optimizer.plan.host_bytes


def test_a_whole_plan_is_taken_to_the_host_or_back():
    plan = Plan.uniform("adamw-8", {name: tuple(param.shape) for name, param in parameters()})
    assert BlockOptimizer(parameters(), plan=plan, offload=True).plan.device_bytes == 0
    assert BlockOptimizer(parameters(), plan=plan.offloaded(), offload=False).plan.host_bytes == 0
    assert BlockOptimizer(parameters(), plan=plan.offloaded()).plan.host_bytes == plan.state_bytes
    with pytest.raises(PlanError, match=r"has no block 'nothing'. It has 'all'"):
        plan.offloaded("nothing")


def test_on_a_cpu_nothing_is_copied():
    named = parameters()
    optimizer = BlockOptimizer(named, plan="adamw-8", offload=True)
    steps(optimizer, named, 1)
    assert optimizer.metrics()["staging_bytes"] == 0
    assert optimizer.metrics()["host_bytes"] == optimizer.plan.host_bytes == state_bytes(optimizer)
    assert optimizer.kernel == BlockOptimizer(named, plan="adamw-8").kernel


def test_the_kernel_says_what_goes_by_way_of_the_host(apart):
    named = parameters()
    optimizer = BlockOptimizer(named, plan="spectral else adamw-8", offload=True)
    assert (
        f"of {len(named)} parameters on cpu with state in host memory, by way of 3 buffers of 64.0 MiB"
        in optimizer.kernel
    )
    with_state = sum(bool(member.layout.formats) for member in optimizer.members())
    assert f"for {with_state} of" in optimizer.kernel


# ---- checkpoints and copies ----


@pytest.mark.parametrize("was", [False, True])
@pytest.mark.parametrize("will_be", [False, True])
def test_checkpoints_go_between_host_and_device(was, will_be, apart):
    named = parameters()
    optimizer = BlockOptimizer(named, plan="muon-8 else adamw-8", offload=was)
    steps(optimizer, named, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [(name, nn.Parameter(param.detach().clone())) for name, param in named]
    resumed = [
        BlockOptimizer(again, offload=will_be),
        BlockOptimizer(again, plan="muon-8 else adamw-8", offload=will_be),
        BlockOptimizer(again),
    ]
    for each in resumed:
        each.load_state_dict(saved)
    assert [each.plan.device_bytes == 0 for each in resumed] == [will_be, will_be, was]
    steps(optimizer, named, 2, seed=5)
    steps(resumed[0], again, 2, seed=5)
    assert_same(named, again, optimizer, resumed[0])


def test_checkpoints_of_before_are_on_the_device():
    named = parameters()
    optimizer = BlockOptimizer(named, plan="adamw-8")
    steps(optimizer, named, 1)
    saved = optimizer.state_dict()
    content = json.loads(saved["param_groups"][0]["plan"])
    for block in content["blocks"]:
        del block["host"]
    saved["param_groups"][0]["plan"] = json.dumps(content)
    resumed = BlockOptimizer(named)
    resumed.load_state_dict(saved)
    assert resumed.plan == optimizer.plan and not resumed.plan.host_bytes


def test_copies_have_buffers_of_their_own(apart):
    named = parameters()
    optimizer = BlockOptimizer(named, plan="adamw-8", offload=True, offload_bucket=SMALL_BUCKET)
    steps(optimizer, named, 2)
    rows = [param[:1].nbytes for _, param in named if param.dim()]
    longest = max(2 * aligned(nbytes) for nbytes in rows)  # a row and its gradient are not cut
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.metrics()["staging_bytes"] == 0 and twin.plan == optimizer.plan
        copied = [(name, param) for (name, _), param in zip(named, twin.param_groups[0]["params"])]
        steps(twin, copied, 1, seed=7)
        assert 0 < twin.metrics()["staging_bytes"] <= BUFFERS * max(SMALL_BUCKET, longest)


# ---- what cannot be ----


def test_sharded_parameters_of_another_device_are_refused_by_name(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Parameter(DTensor.from_local(torch.empty(64, 64, device="meta"), mesh, [Shard(0)]))
        for build in (
            lambda: BlockOptimizer([("w", sharded)], plan="adamw-8", offload=True),
            lambda: BlockOptimizer([("w", sharded)], plan=Plan.uniform("adamw-8", {"w": (64, 64)}).offloaded()),
        ):
            with pytest.raises(
                PlanError, match=r"state of parameter 'w' cannot be in host memory .*meta: it is sharded"
            ):
                build()
        late = BlockOptimizer([("v", nn.Parameter(torch.ones(8)))], offload=True)
        with pytest.raises(PlanError, match=r"state of parameter 'w' cannot be in host memory"):
            late.add_param_group({"params": [("w", sharded)]})
        assert [member.name for member in late.members()] == ["v"], "as if it had never come"
        here = nn.Parameter(DTensor.from_local(torch.ones(64, 64), mesh, [Shard(0)]))
        assert BlockOptimizer([("w", here)], plan="adamw-8", offload=True).plan.device_bytes == 0
    finally:
        dist.destroy_process_group()


# ---- plans ----


def test_plan_files_say_where_and_older_ones_need_not():
    plan = Plan.uniform("muon-8 else adamw-8", {"wte.weight": (512, 64), "h.weight": (64, 64)}).offloaded("muon")
    assert Plan.from_json(plan.to_json()) == plan
    content = json.loads(plan.to_json())
    for block in content["blocks"]:
        del block["host"]
    assert Plan.from_json(json.dumps(content)) == plan.offloaded(host=False)
    content["blocks"][0]["host"] = "yes"
    with pytest.raises(PlanError, match=r"block 0 .*'host' must be true or false, got 'yes'"):
        Plan.from_json(json.dumps(content))
    text = str(plan)
    assert "4.1 KiB*" in text and "; *4.1 KiB in host memory" in text and "*" not in str(plan.offloaded(host=False))


class Net(nn.Module):
    def __init__(self, width: int = 48, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def batch(seed: int) -> Tensor:
    return torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(seed))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def planned(memory: Any, host_memory: Any = None) -> Plan:
    return EffectPlanner().initial_plan(ModelFacts(shapes_of(Net())), Budget(memory, host_memory))


SHARES = (0.0, 0.004, 0.03, 0.1, 0.25, 0.5, 1.0)


def test_both_budgets_hold_over_a_sweep():
    reference = ModelFacts(shapes_of(Net())).reference_bytes()
    least = planned(0.0).state_bytes
    divided = 0
    for device, host in itertools.product(SHARES, SHARES[1:]):
        most = int(device * reference), int(host * reference)
        if max(most) < least:
            continue
        plan = planned(device, host)
        assert plan.device_bytes <= most[0] and plan.host_bytes <= most[1]
        divided += 0 < plan.host_bytes < plan.state_bytes
        assert plan.to_json() == planned(device, host).to_json(), "the same every time"
    assert divided > 5


def test_what_fits_the_device_stays_there():
    plenty = planned(2.0, 0.5)
    assert plenty.host_bytes == 0 and plenty.state_bytes == planned(2.0).state_bytes
    nothing_here = planned(0.0, 2.0)
    assert nothing_here.device_bytes == 0 and nothing_here.state_bytes == plenty.state_bytes
    assert planned(0.25, 0).to_json() == planned(0.25).to_json()


@pytest.mark.parametrize("device", [0, 10_000, 40_000, 80_000, 10**9])
def test_little_more_is_moved_than_must_be(device):
    shapes = {f"{i}.weight": (64 + i, 64 + 7 * i) for i in range(9)} | {"wte.weight": (90, 70), "head.weight": (80, 80)}
    plan = Plan.uniform("muon-4 else adamw-8", shapes)
    found = placed(plan, device, 10**9)
    assert found.device_bytes <= device
    needed = plan.state_bytes - device
    best = math.inf
    sizes = [
        (sum(traffic(b.configuration, s)), b.configuration.state_bytes(s))
        for b in plan.blocks
        for s in b.parameters.values()
    ]
    for chosen in itertools.product((False, True), repeat=len(sizes)):
        held = sum(state for (_, state), there in zip(sizes, chosen) if there)
        if held >= needed:
            best = min(best, sum(moved for (moved, _), there in zip(sizes, chosen) if there))
    assert sum(plan_traffic(found)) <= best + max(moved for moved, _ in sizes)


def test_what_cannot_be_divided_is_told_in_bytes():
    plan = Plan.uniform("adamw-32", {"a": (100,), "b": (100,)})
    with pytest.raises(NoRoom) as caught:
        placed(plan, 900, 750)
    assert caught.value.lacking == 700
    assert placed(plan, 900, 800).host_bytes == 800


def test_a_sum_that_does_not_divide_is_planned_smaller():
    planner = EffectPlanner(candidates=["adamw-32", "adamw-8"], tolerance=0.0)
    shapes = {"a.weight": (128, 128), "b.weight": (128, 128)}
    most = int(5.2 * 128 * 128)  # together one in fp32 and one in int8, but neither has room for fp32
    plan = planner.initial_plan(ModelFacts(shapes), Budget(most, most))
    assert {block.configuration for block in plan.blocks} == {parse("adamw-8")}
    assert max(plan.device_bytes, plan.host_bytes) <= most
    with pytest.raises(PlanError, match=r"no plan fits"):
        planner.initial_plan(ModelFacts({"a.weight": (128, 128)}), Budget("24KiB", "24KiB"))


BAD = {
    "negative": ({"host_memory": -1}, "host_memory must be non-negative, got -1"),
    "a negative share": ({"host_memory": -0.5}, "host_memory must be non-negative, got -0.5"),
    "percent": ({"host_memory": 50}, "host_memory=50"),
    "words": ({"host_memory": "a lot"}, "'a lot'"),
    "auto": ({"memory": "auto", "host_memory": "1GiB"}, "memory='auto' sets no limit for the device"),
    "ranks": ({"memory": "1MiB/rank", "host_memory": "1GiB"}, "one is for each rank, the other for all"),
    "too little": ({"memory": "1KiB", "host_memory": "1KiB"}, "no plan fits memory='1KiB' and host_memory='1KiB'"),
    "a choice": ({"host_memory": True}, "host_memory must be a number or a string, got True"),
}


@pytest.mark.parametrize("given, message", BAD.values(), ids=BAD)
@pytest.mark.parametrize("planner", [EffectPlanner(), PaperPlanner(forbid="sgd*")], ids=["effects", "paper"])
def test_bad_budgets_are_one_clear_line(given, message, planner):
    with pytest.raises(PlanError, match=message) as caught:
        BAOC(Net(), **{"memory": 0.5, "planner": planner, "verbose": False, **given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("memory, host_memory", [(0.1, 0.4), (0.0, 0.3), ("20KiB", "100KiB")], ids=str)
@pytest.mark.parametrize("planner", [EffectPlanner(), PaperPlanner(warmup=3)], ids=["effects", "paper"])
def test_baoc_keeps_both_budgets(memory, host_memory, planner, apart):
    torch.manual_seed(0)
    model = Net()
    settings: dict[str, Any] = {"lr": 1e-3, "planner": planner, "verbose": False}
    optimizer = BAOC(model, memory=memory, host_memory=host_memory, **settings)
    for seed in range(6):
        loss(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.is_warming_up:
            continue
        found = optimizer.metrics()
        assert found["host_bytes"] == optimizer.plan.host_bytes <= found["host_budget_bytes"]
        assert found["state_bytes"] - found["host_bytes"] <= found.get("budget_bytes", 0)
    assert not optimizer.is_warming_up and optimizer.plan.host_bytes > 0
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = Net()
    twin.load_state_dict(saved["model"])
    resumed = BAOC(twin, memory=memory, host_memory=host_memory, **settings)
    resumed.load_state_dict(saved["optimizer"])
    for each, its in ((model, optimizer), (twin, resumed)):
        loss(each, batch(9)).backward()
        its.step()
    assert {block.name: block for block in resumed.plan.blocks} == {
        block.name: block for block in optimizer.plan.blocks
    }
    assert resumed.plan.settings == optimizer.plan.settings
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters()))
    here = BAOC(twin, memory=0.5, **settings)
    here.load_state_dict(optimizer.state_dict())
    for _ in range(4):
        here.step()
    assert here.plan.host_bytes == 0, "the script's budgets win"
    optimizer.replan(memory=1.0, host_memory=0)
    assert optimizer.plan.host_bytes == 0


def test_gradient_statistics_serve_both_budgets():
    seen = collect_statistics(Net(), loss, [batch(0)], steps=3)
    for planner in (EffectPlanner(), PaperPlanner()):
        plan = make_plan(seen, 0.1, host_memory=0.4, planner=planner)
        assert 0 < plan.host_bytes <= 0.4 * plan.reference_bytes and plan.device_bytes <= 0.1 * plan.reference_bytes
        of_ranks = make_plan(seen, "10KiB/rank", host_memory="40KiB/rank", ranks=2, planner=planner)
        assert 0 < of_ranks.host_bytes_per_rank <= 40 * 1024 and of_ranks.device_bytes_per_rank <= 10 * 1024

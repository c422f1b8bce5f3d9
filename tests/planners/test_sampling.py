"""Laws of the sampled gradient streams and of the statistics that are made from them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper.coordinates import Coordinates, draw, sample_count
from baoc.planners.paper.metrics import direction_stability
from baoc.planners.paper.sampling import Sampler, history_steps
from baoc.planners.paper.statistics import GradientStatistics, StatisticsError
from baoc.tools.models import MODELS
from tests.cases import SHAPES, gradients
from tests.memory import PeakMemory

HISTORY = history_steps(0.9)
MORE_SHAPES = {
    **SHAPES,
    "prime vector": (7919,),
    "prime matrix": (499, 503),
    "one element": (1, 1, 1),
    "no matrices": (0, 3, 3),
    "stack of nothing": (4, 0, 3),
    "large stack": (40, 50, 60),
    "odd dims": (3, 1, 7, 1, 11),
    "column": (5003, 1),
}
by_shape = pytest.mark.parametrize("shape", MORE_SHAPES.values(), ids=MORE_SHAPES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(shape: tuple[int, ...], seed: int, ratio: float, floor: int) -> Coordinates:
    return draw(shape, generator(seed), sample_count(math.prod(shape), ratio, floor))


def flat_indices(coordinates: Coordinates) -> list[int]:
    """Where the samples are in the flattened tensor, from the definition of the grid."""
    rows, cols = (1, *coordinates.shape)[-2:] if len(coordinates.shape) > 1 else (math.prod(coordinates.shape), 1)
    axes = (coordinates.matrices, coordinates.rows, coordinates.cols)
    grid = itertools.product(*(axis.places().tolist() for axis in axes))
    return [(m * rows + r) * cols + c for m, r, c in itertools.islice(grid, coordinates.count)]


def slow_take(coordinates: Coordinates, tensor: Tensor) -> Tensor:
    flat = tensor.detach().double().flatten().tolist()
    return torch.tensor([flat[i] for i in flat_indices(coordinates)], dtype=torch.float32)


def parameter(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator(1)).to(dtype))


def observed(shape: tuple[int, ...], steps: int = 3, **settings) -> tuple[Sampler, dict[str, nn.Parameter]]:
    params = {"w": parameter(shape)}
    sampler = Sampler(params, **settings)
    for grad in gradients(shape, steps):
        params["w"].grad = grad
        assert sampler.observe(params)
    return sampler, params


def contents(sampler: Sampler) -> list[object]:
    """Everything the streams hold, comparable with ``==``."""
    return [
        (name, *(tensor.tolist() for tensor in (s.first, s.second, s.previous, s.dots, s.squares)))
        for name, s in sampler.streams.items()
    ]


# Coordinates


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.07, 0.1, 0.37, 1.0])
def test_a_sample_has_exactly_the_promised_size(ratio):
    """``ceil(s * d)``, but at least the floor or all; ``s`` is the number that was written, not its nearest float."""
    for numel in (*range(0, 300_000, 97), *range(1000, 3_000_000, 10_000), 38_597_376):
        exact = math.ceil(Fraction(str(ratio)) * numel)
        assert sample_count(numel, ratio) == exact, numel
        assert sample_count(numel, ratio, 256) == min(numel, max(exact, 256)), numel


@by_shape
def test_as_many_coordinates_are_drawn(shape):
    for ratio, floor in itertools.product((0.001, 0.01, 0.37, 1.0), (1, 256)):
        coordinates = drawn(shape, 0, ratio, floor)
        assert coordinates.count == sample_count(math.prod(shape), ratio, floor)
        assert coordinates.take(torch.zeros(shape)).shape == (coordinates.count,)


@by_shape
@pytest.mark.parametrize("ratio", [0.001, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_coordinates_are_distinct_and_in_row_major_order(shape, ratio, seed):
    coordinates = drawn(shape, seed, ratio, 16)
    indices = flat_indices(coordinates)
    assert len(indices) == coordinates.count <= math.prod(coordinates.grid)
    assert all(i < j for i, j in itertools.pairwise(indices))
    assert all(0 <= i < math.prod(shape) for i in indices)


@pytest.mark.parametrize("shape", [(768, 3072), (3072, 768), (64, 4096), (16, 300, 500)])
def test_a_sample_sees_many_rows_and_many_columns(shape):
    coordinates = drawn(shape, 0, 0.001, 256)
    matrices, rows, cols = coordinates.grid
    assert rows * matrices >= 8 and cols >= 5
    assert len({i // shape[-1] for i in flat_indices(coordinates)}) >= 8
    assert matrices >= min(8, math.prod(shape[:-2]))


def test_every_row_and_column_is_as_likely_as_another():
    hits = np.zeros((20, 30))
    for seed in range(1000):
        hits.flat[flat_indices(drawn((20, 30), seed, 0.001, 64))] += 1
    for share in (hits.sum(0), hits.sum(1)):
        assert share == pytest.approx(np.full(len(share), 64_000 / len(share)), rel=0.2)


def test_a_seed_fixes_the_coordinates():
    def indices(seed: int) -> list[list[int]]:
        params = {name: parameter(shape) for name, shape in SHAPES.items()}
        return [flat_indices(s.coordinates) for s in Sampler(params, ratio=0.01, seed=seed).streams.values()]

    first = indices(0)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert indices(0) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert all(a != b for a, b, shape in zip(first, indices(1), SHAPES.values()) if math.prod(shape) >= 4000)


def test_coordinates_do_not_depend_on_dtype_or_default_device():
    def indices(dtype: torch.dtype) -> list[int]:
        with torch.device("cpu"):
            params = {"w": parameter((100, 100), dtype)}
        return flat_indices(Sampler(params).streams["w"].coordinates)

    expected = indices(torch.float32)
    assert indices(torch.bfloat16) == indices(torch.float64) == expected
    with torch.device("meta"):  # as after torch.set_default_device
        assert indices(torch.float32) == expected


@by_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_take_gives_exactly_the_sampled_entries(shape, dtype):
    tensor = torch.randn(shape, generator=generator()).to(dtype)
    coordinates = drawn(shape, 0, 0.01, 64)
    taken = coordinates.take(tensor)
    assert taken.dtype == torch.float32 and taken.shape == (coordinates.count,)
    assert torch.equal(taken, slow_take(coordinates, tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take_reads_any_memory_layout(dtype):
    layouts = {
        "transposed": torch.randn(70, 90).to(dtype).t(),
        "every second": torch.randn(140, 90).to(dtype)[::2, 1:],
        "expanded": torch.randn(70, 1).to(dtype).expand(70, 90),
        "permuted stack": torch.randn(9, 30, 40).to(dtype).permute(2, 0, 1),
        "channels last": torch.randn(16, 12, 5, 5).to(dtype, memory_format=torch.channels_last),
        "strided vector": torch.randn(1000).to(dtype)[::3],
    }
    for name, tensor in layouts.items():
        assert not tensor.is_contiguous()
        for seed in range(3):
            coordinates = drawn(tuple(tensor.shape), seed, 0.01, 100)
            assert torch.equal(coordinates.take(tensor), slow_take(coordinates, tensor)), name


# Observing


@pytest.mark.parametrize("shape", [(), (300,), (40, 30), (3, 20, 10)])
def test_complex_parameters_are_pairs_of_real_ones(shape):
    param = nn.Parameter(torch.randn(shape, dtype=torch.complex64))
    param.grad = torch.randn(shape, dtype=torch.complex64)
    sampler = Sampler({"w": param}, floor=50)
    sampler.observe({"w": param})
    stream = sampler.streams["w"]
    assert stream.coordinates.shape == (*shape, 2)
    assert torch.equal(stream.previous, slow_take(stream.coordinates, torch.view_as_real(param.grad)))
    values = GradientStatistics.from_sampler(sampler, {"w": param}).records["w"].values
    assert torch.equal(torch.from_numpy(values).float(), slow_take(stream.coordinates, torch.view_as_real(param)))


@by_shape
def test_moments_follow_the_papers_recurrence(shape):
    """Eq. 3 in plain loops."""
    steps, betas = list(gradients(shape, 5)), (0.8, 0.95)
    sampler, _ = observed(shape, 5, betas=betas, floor=50)
    stream = sampler.streams["w"]
    taken = [slow_take(stream.coordinates, grad).tolist() for grad in steps]
    for k in range(stream.coordinates.count):
        m = v = 0.0
        for grad in taken:
            m = betas[0] * m + (1 - betas[0]) * grad[k]
            v = betas[1] * v + (1 - betas[1]) * grad[k] ** 2
        assert float(stream.first[k]) == pytest.approx(m, rel=1e-5, abs=1e-6)
        assert float(stream.second[k]) == pytest.approx(v, rel=1e-5)
    assert stream.squares.tolist() == pytest.approx([sum(x * x for x in grad) for grad in taken])
    pairs = zip(taken, [[0.0] * stream.coordinates.count, *taken])
    assert stream.dots.tolist() == pytest.approx(
        [sum(x * y for x, y in zip(a, b)) for a, b in pairs], rel=1e-6, abs=1e-6
    )


def held_bytes(value: object) -> int:
    """Bytes of all storages that can be reached from an object."""
    storages: dict[int, int] = {}
    pending, seen = [value], []
    while pending:
        each = pending.pop()
        if any(each is other for other in seen):
            continue
        if isinstance(each, Tensor):
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
        elif isinstance(each, (list, tuple)):
            pending.extend(each)
        elif isinstance(each, dict):
            pending.extend(each.values())
        elif hasattr(each, "__dict__") and not isinstance(each, type):
            seen.append(each)
            pending.extend(vars(each).values())
    return sum(storages.values())


def test_nbytes_is_what_is_held_from_the_first_step_to_the_last():
    params = {name: parameter(shape) for name, shape in SHAPES.items()}
    sampler = Sampler(params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    promised = sampler.nbytes
    for _ in range(HISTORY + 2):
        on_host = sampler._history.numel() * 4
        assert sampler.nbytes == held_bytes(sampler) - on_host == promised
        assert sampler.observe(params)


def test_samples_take_a_third_of_a_percent_of_the_parameters():
    """Everything that is held, on GPT2-small at the paper's ratio."""
    pytest.importorskip("transformers")
    with torch.device("meta"):
        params = dict(MODELS["gpt2-small"]().named_parameters())
    assert Sampler(params, ratio=0.001).nbytes <= 0.0035 * sum(4 * param.numel() for param in params.values())


@pytest.mark.parametrize(
    "grad",
    [
        torch.zeros(3000, 1000),
        torch.zeros(16, 300, 500),
        torch.zeros(256, 128, 3, 3).to(memory_format=torch.channels_last),
        torch.zeros(2000, 1500).t(),
        torch.zeros(3_000_017),
    ],
    ids=["matrix", "stack", "channels last", "transposed", "vector"],
)
def test_sampling_never_holds_a_copy_of_a_gradient(grad):
    """Neither drawing coordinates nor observing them takes memory in proportion to the tensor."""
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    with PeakMemory() as memory:
        sampler = Sampler({"w": param})
        sampler.observe({"w": param})
    assert memory.peak < grad.numel()  # a quarter of its bytes


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_step_is_skipped_and_counted(bad, dtype):
    """The streams go on as if it had never been, those of the other parameters too."""
    params = {"a": parameter((10, 10), dtype), "b": parameter((5,), dtype)}
    sampler, untouched = Sampler(params, floor=256), Sampler(params, floor=256)
    for step in range(4):
        for param in params.values():
            param.grad = torch.randn(param.shape).to(dtype)
        untouched.observe(params)
        if step in (0, 2):
            good, before = params["b"].grad.clone(), contents(sampler)
            params["b"].grad[3] = bad
            assert sampler.observe(params) is False
            assert contents(sampler) == before
            params["b"].grad = good
        assert sampler.observe(params) is True
    assert (sampler.steps, sampler.skipped) == (4, 2)
    assert contents(sampler) == contents(untouched)


def test_a_gradient_whose_square_overflows_does_not_poison_the_stream():
    param = parameter((10,))
    sampler = Sampler({"w": param})
    for scale in (1.0, 1e25, 1.0):
        param.grad = torch.full((10,), scale)
        sampler.observe({"w": param})
    stream = sampler.streams["w"]
    assert all(torch.isfinite(tensor).all() for tensor in (stream.first, stream.second, stream.previous))


def test_a_missing_gradient_counts_as_zero():
    params = {"a": parameter((30, 30)), "b": parameter((7,))}
    sampler, expected = Sampler(params), Sampler(params)
    for step in range(4):
        for param in params.values():
            param.grad = torch.randn(param.shape)
        missing = params["ab"[step % 2]]
        missing.grad = torch.zeros_like(missing)
        assert expected.observe(params)
        missing.grad = None
        assert sampler.observe(params)
    assert contents(sampler) == contents(expected)


def test_what_is_in_grad_is_what_is_sampled():
    """Accumulated and clipped gradients as the optimizer sees them; neither they nor the parameters change."""
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 5))
    params = dict(model.named_parameters())
    sampler = Sampler(params, floor=100)
    for _ in range(3):
        model.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 20)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = {name: (p.clone(), p.grad.clone(), p._version, p.grad._version) for name, p in params.items()}
        sampler.observe(params)
        for name, param in params.items():
            value, grad, *versions = before[name]
            assert torch.equal(param, value) and torch.equal(param.grad, grad)
            assert [param._version, param.grad._version] == versions
            stream = sampler.streams[name]
            assert torch.equal(stream.previous, slow_take(stream.coordinates, grad))
            assert float(stream.squares[-1]) <= 0.01 + 1e-6


@pytest.mark.parametrize("shape", [(), (7,), (4, 4)])
def test_streams_share_nothing_with_the_gradient(shape):
    param = parameter(shape)
    sampler = Sampler({"w": param})
    param.grad = torch.ones(shape, requires_grad=True)  # as after backward(create_graph=True)
    sampler.observe({"w": param})
    before = contents(sampler)
    param.grad.data.zero_()
    assert contents(sampler) == before
    stream = sampler.streams["w"]
    assert not any(t.requires_grad for t in (stream.first, stream.second, stream.previous))


def test_streams_do_not_depend_on_threads():
    def streams(threads: int) -> list[object]:
        torch.set_num_threads(threads)
        sampler, _ = observed((400, 500), 3, ratio=0.5)
        compact = Sampler({"w": parameter((400, 500))}, ratio=0.5)
        for grad in gradients((400, 500), 3):
            param = parameter((400, 500))
            param.grad = grad
            compact.observe({"w": param})
        return contents(sampler) + contents(compact)

    before = torch.get_num_threads()
    try:
        assert streams(1) == streams(2) == streams(3)
    finally:
        torch.set_num_threads(before)


class HostReads(TorchDispatchMode):
    """Counts how often a tensor's value is asked for by the host, which a GPU would have to be waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_a_step_is_one_number_for_the_host():
    params = {name: parameter(shape) for name, shape in MORE_SHAPES.items()}
    sampler = Sampler(params)
    for param in params.values():
        param.grad = torch.ones_like(param)
    with HostReads() as reads:
        sampler.observe(params)
    assert reads.count == 1


def test_dots_and_squares_are_of_the_last_steps_in_order():
    param = parameter((3,))
    sampler = Sampler({"w": param}, floor=3)
    for step in range(1, 2 * HISTORY + 4):
        param.grad = torch.full((3,), float(step))
        sampler.observe({"w": param})
        stream = sampler.streams["w"]
        seen = range(max(1, step - HISTORY + 1), step + 1)
        assert stream.squares.tolist() == [3.0 * i * i for i in seen]
        assert stream.dots.tolist() == [3.0 * i * (i - 1) for i in seen]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_what_is_forgotten_does_not_matter(beta):
    """The stability of the last steps is that of all, to the precision of doubles."""
    random = np.random.default_rng(0)
    squares, dots = random.uniform(0.5, 2, 5000), random.uniform(-0.5, 0.5, 5000)
    kept = history_steps(beta)
    every = direction_stability(dots, squares, beta)
    assert direction_stability(dots[-kept:], squares[-kept:], beta) == pytest.approx(every, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("steps", [0, 1, 5, HISTORY + 3])
def test_a_resumed_sampler_goes_on_bit_by_bit(steps, tmp_path):
    params = {name: parameter(shape) for name, shape in MORE_SHAPES.items()}
    sampler = Sampler(params, ratio=0.01, seed=5, betas=(0.8, 0.95))
    random = generator(2)

    def observe(*samplers: Sampler) -> None:
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=random)
        for each in samplers:
            assert each.observe(params)

    for _ in range(steps):
        observe(sampler)
    torch.save(sampler.state_dict(), tmp_path / "samples.pt")
    resumed = Sampler.from_state_dict(torch.load(tmp_path / "samples.pt", weights_only=True), params)
    for _ in range(3):
        assert contents(resumed) == contents(sampler)
        observe(sampler, resumed)
    assert resumed.steps == sampler.steps == steps + 3


def test_parameters_may_have_other_names_in_the_run_that_resumes():
    params = {name: parameter(shape) for name, shape in MORE_SHAPES.items()}
    sampler = Sampler(params)
    for param in params.values():
        param.grad = torch.randn(param.shape)
    sampler.observe(params)
    renamed = {f"module.{name}": param for name, param in params.items()}
    resumed = Sampler.from_state_dict(sampler.state_dict(), renamed)
    assert contents(resumed) == [(f"module.{name}", *streams) for name, *streams in contents(sampler)]


def test_saved_samples_without_their_tensors_start_anew():
    """As a distributed checkpoint reads them before it loads tensors."""
    sampler, params = observed((30, 40))
    state = sampler.state_dict()
    state["history"] = None
    state["parts"] = [part | dict.fromkeys(("first", "second", "previous")) for part in state["parts"]]
    resumed = Sampler.from_state_dict(state, params)
    assert resumed.steps == 0 < sampler.steps
    assert resumed.streams["w"].coordinates == sampler.streams["w"].coordinates


def changed_part(**changes):
    return lambda state: state | {"parts": [state["parts"][0] | changes]}


DAMAGED_SAMPLES = {
    "steps": (lambda state: state | {"steps": -1}, "steps of the samples is -1"),
    "betas": (lambda state: state | {"betas": (0.9, 1.0)}, "betas of the samples"),
    "beta_rho": (lambda state: state | {"beta_rho": 1.0}, "betas of the samples"),
    "counts": (lambda state: state | {"counts": [4]}, "4 samples of 'w'"),
    "ratio": (lambda state: state | {"ratio": 0.0}, "sampling ratio"),
    "names": (changed_part(names=[1]), "other parameters"),
    "dtype": (changed_part(first=torch.zeros(3, dtype=torch.float64)), "'first' of the samples"),
    "no number": (changed_part(second=torch.full((3,), math.nan)), "'second' of the samples"),
    "negative": (changed_part(second=-torch.ones(3)), "negative"),
    "history": (lambda state: state | {"history": torch.zeros(2, 3, 1)}, f"not of {HISTORY} steps"),
    "size": (changed_part(first=torch.zeros(4)), "split"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED_SAMPLES.values(), ids=DAMAGED_SAMPLES)
def test_damaged_samples_are_refused(damage, message):
    sampler, params = observed((3,))
    Sampler.from_state_dict(sampler.state_dict(), params)
    with pytest.raises((ValueError, RuntimeError), match=message):
        Sampler.from_state_dict(damage(sampler.state_dict()), params)


def test_saved_samples_may_have_been_divided_among_devices_otherwise():
    params = {name: parameter(shape) for name, shape in MORE_SHAPES.items()}
    sampler = Sampler(params)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator())
    sampler.observe(params)
    state, streams = sampler.state_dict(), sampler.streams
    (whole,) = state["parts"]

    def part(positions: list[int]) -> dict[str, object]:
        mine = [list(params)[position] for position in positions]
        keys = ("first", "second", "previous")
        slots = {key: torch.cat([getattr(streams[name], key) for name in mine]) for key in keys}
        return {"names": positions, **slots}

    state["parts"] = [part(whole["names"][1::2]), part(whole["names"][::2])]
    assert contents(Sampler.from_state_dict(state, params)) == contents(sampler)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, math.nan])
def test_a_senseless_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="sampling ratio"):
        Sampler({"w": parameter((3,))}, ratio=ratio)


# Statistics


def test_statistics_hold_moments_as_printed_and_values():
    """EMAs start at zero; divided by their mass, a constant gradient's are exact after any number of steps."""
    param = parameter((30, 40))
    sampler = Sampler({"w": param}, floor=256)
    param.grad = torch.full((30, 40), 0.5)
    for steps in range(1, 6):
        sampler.observe({"w": param})
        statistics = GradientStatistics.from_sampler(sampler, {"w": param})
        record = statistics.records["w"]
        assert record.first == pytest.approx(np.full(256, 0.5 * (1 - 0.9**steps)), rel=1e-5)
        assert record.second == pytest.approx(np.full(256, 0.25 * (1 - 0.999**steps)), rel=1e-4)
        assert statistics.masses == pytest.approx((1 - 0.9**steps, 1 - 0.999**steps))
        assert len(record.dots) == len(record.squares) == steps
    coordinates = sampler.streams["w"].coordinates
    assert torch.equal(torch.from_numpy(record.values).float(), slow_take(coordinates, param))
    assert (record.numel, record.grid) == (1200, coordinates.grid)


def test_saved_statistics_are_the_same(tmp_path):
    params = {name: parameter(shape) for name, shape in SHAPES.items()}
    sampler = Sampler(params, ratio=0.02, floor=256, seed=7, betas=(0.85, 0.99))
    for step in range(4):
        for param in params.values():
            param.grad = torch.randn(param.shape)
        if step == 2:
            params["vector"].grad[0] = math.nan
        sampler.observe(params)
    statistics = GradientStatistics.from_sampler(sampler, params)
    statistics.save(tmp_path / "statistics.pt")
    loaded = GradientStatistics.load(tmp_path / "statistics.pt")
    assert list(loaded.records) == list(statistics.records) == list(SHAPES)
    assert loaded.shapes == statistics.shapes == SHAPES
    for name, record in statistics.records.items():
        for key, value in vars(record).items():
            other = getattr(loaded.records[name], key)
            if isinstance(value, np.ndarray):
                assert value.dtype == other.dtype == np.float64 and np.array_equal(value, other)
            else:
                assert type(value) is type(other) and value == other
    settings = ("steps", "skipped", "seed", "ratio", "betas")
    assert [getattr(loaded, key) for key in settings] == [3, 1, 7, 0.02, (0.85, 0.99)]
    assert [getattr(statistics, key) for key in settings] == [3, 1, 7, 0.02, (0.85, 0.99)]


def test_statistics_outlive_their_sampler():
    """What is observed later does not change it."""
    param = parameter((4,))
    sampler = Sampler({"w": param})
    param.grad = torch.ones(4)
    sampler.observe({"w": param})
    record = GradientStatistics.from_sampler(sampler, {"w": param}).records["w"]
    before = {key: np.copy(value) for key, value in vars(record).items() if isinstance(value, np.ndarray)}
    param.data.zero_()
    param.grad = torch.full((4,), 9.0)
    sampler.observe({"w": param})
    assert all(np.array_equal(getattr(record, key), value) for key, value in before.items())


def test_statistics_need_observations():
    param = parameter((4,))
    sampler = Sampler({"w": param})
    with pytest.raises(StatisticsError, match="no gradients were observed"):
        GradientStatistics.from_sampler(sampler, {"w": param})
    param.grad = torch.full((4,), math.nan)
    sampler.observe({"w": param})
    with pytest.raises(StatisticsError, match="1 steps had non-finite"):
        GradientStatistics.from_sampler(sampler, {"w": param})


def saved(**changes: object) -> dict[str, object]:
    """The content of a small file, with changes; ``None`` leaves a key out."""
    content = {"format": "baoc.gradient-statistics", "version": 1, "records": [], "steps": 1, "skipped": 0, "seed": 0}
    content |= {"ratio": 0.001, "betas": (0.9, 0.999), "model": ModelFacts({}).plain()} | changes
    return {key: value for key, value in content.items() if value is not None}


WRONG_FILES = {
    "empty": (b"", "not a file of gradient statistics"),
    "text": (b"no pickle at all", "not a file of gradient statistics"),
    "json": (b'{"format": "baoc.plan"}', "not a file of gradient statistics"),
    "list": ([1, 2, 3], "not a file of gradient statistics"),
    "checkpoint": ({"state": {}, "param_groups": []}, "not a file of gradient statistics"),
    "module": (nn.Linear(2, 2), "not a file of gradient statistics"),
    "another version": (saved(version=99), "version 99"),
    "no version": (saved(version=None), "version None"),
    "no records": (saved(records=None), "damaged"),
    "half a record": (saved(records=[{"name": "w"}]), "damaged"),
    "records no list": (saved(records=5), "damaged"),
    "no betas": (saved(betas=None), "damaged"),
    "a huge shape": (
        saved(records=[{"name": "w", "shape": (1 << 40, 1 << 40)}]),
        "damaged: ValueError: shape cannot be",
    ),
    "a huge size": (saved(records=[{"name": "w", "shape": (10**400,)}]), "damaged.*shape cannot be"),
}


@pytest.mark.parametrize(("content", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_refused(content, message, tmp_path):
    path = tmp_path / "statistics.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(StatisticsError, match=message):
        GradientStatistics.load(path)


def test_the_smallest_right_file_is_read(tmp_path):
    """So that the refusals above are for what was changed."""
    torch.save(saved(), tmp_path / "statistics.pt")
    assert GradientStatistics.load(tmp_path / "statistics.pt").steps == 1


def test_a_cut_file_is_refused_and_a_missing_one_is_missing(tmp_path):
    sampler, params = observed((100, 100))
    path = tmp_path / "statistics.pt"
    GradientStatistics.from_sampler(sampler, params).save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(StatisticsError, match="not a file of gradient statistics"):
        GradientStatistics.load(path)
    with pytest.raises(FileNotFoundError):
        GradientStatistics.load(tmp_path / "nothing.pt")

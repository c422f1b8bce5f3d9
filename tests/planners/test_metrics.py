"""The paper's diagnostics, each against a slow reference written from its formula; and what they say at the edges.

The reference works on recorded gradients in plain loops and double precision, with bias correction: EMAs are divided by
their mass. `test_paper_reference.py` compares the formulas as printed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baoc.core.codecs import CODECS, Format
from baoc.core.configuration import CATALOG, Configuration, parse
from baoc.core.rounding import NEAREST
from baoc.core.spec import Hyper
from baoc.planners.paper.metrics import Metrics, MetricSettings
from baoc.planners.paper.sampling import Sampler
from baoc.planners.paper.statistics import GradientStatistics

HYPER = Hyper(lr=1e-3)
BETAS = (0.9, 0.999)
EPSILON = 1e-12
CORRECTED = MetricSettings(bias_correction=True)
Shapes = dict[str, tuple[int, ...]]
Stream = Callable[[Shapes, int], Iterator[dict[str, Tensor]]]  # the gradients of every step

ONE: dict[str, Shapes] = {
    "matrix": {"w": (64, 80)},
    "wide matrix": {"w": (9, 700)},
    "thin matrix": {"w": (2100, 2)},
    "row": {"w": (1, 4500)},
    "stack": {"w": (5, 31, 33)},
    "convolution": {"w": (16, 12, 5, 5)},
    "vector": {"w": (5003,)},
    "all of a matrix": {"w": (12, 20)},
    "all of a vector": {"w": (7,)},
    "one coordinate": {"w": ()},
}
SEVERAL: dict[str, Shapes] = {
    "layer": {"w": (64, 80), "b": (80,)},
    "densities": {"a": (150, 200), "b": (64, 70), "c": (5003,), "d": (16,), "e": ()},
    "mixed": {"empty": (0, 8), "conv": (16, 12, 5, 5), "stack": (3, 40, 40), "norm": (12,), "none": (4, 0, 2)},
    "vectors": {"a": (5003,), "b": (300,), "c": (3,)},
}
by_block = pytest.mark.parametrize("shapes", [*ONE.values(), *SEVERAL.values()], ids=[*ONE, *SEVERAL])
by_one = pytest.mark.parametrize("shapes", ONE.values(), ids=ONE)


# Streams


def plain(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    """Signal and noise, with scales that differ by tensor and by element."""
    generator = torch.Generator().manual_seed(5)

    def randn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    scales = {name: (randn(shape) - index).exp() for index, (name, shape) in enumerate(shapes.items())}
    signals = {name: randn(shape) for name, shape in shapes.items()}
    for _ in range(steps):
        yield {name: scales[name] * (signals[name] + randn(shape)) for name, shape in shapes.items()}


def with_zero_steps(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    for step, grads in enumerate(plain(shapes, steps)):
        yield {name: grad * (step not in (0, 3, 4)) for name, grad in grads.items()}


def clipped(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    for step, grads in enumerate(plain(shapes, steps)):
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        yield {name: grad * min(1.0, (0.1 if step % 3 else 10.0) / norm) for name, grad in grads.items()}


def with_dead_rows(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    """As an embedding's: the upper half never gets a gradient."""
    for grads in plain(shapes, steps):
        for grad in grads.values():
            if grad.dim():
                grad[len(grad) // 2 :] = 0
        yield grads


def noise(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def constant(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    return itertools.repeat(next(plain(shapes, 1)), steps)


def silence(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
    for _ in range(steps):
        yield {name: torch.zeros(shape) for name, shape in shapes.items()}


STREAMS = [plain, with_zero_steps, clipped, with_dead_rows, noise, constant, silence]
by_stream = pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.__name__)


# The reference


@dataclasses.dataclass
class Sampled:
    """One tensor's samples as plain numbers."""

    shape: tuple[int, ...]
    grid: tuple[int, int, int]
    share: float  # elements for each sample
    grads: list[list[float]]  # steps x coordinates
    values: list[float]

    @cached_property
    def first(self) -> list[float]:
        return [ema([grad[k] for grad in self.grads], BETAS[0]) for k in range(len(self.values))]

    @cached_property
    def second(self) -> list[float]:
        return [ema([grad[k] ** 2 for grad in self.grads], BETAS[1]) for k in range(len(self.values))]


@dataclasses.dataclass
class Recording:
    """A warm-up: what the sampler made of it, and the gradients themselves."""

    statistics: GradientStatistics
    tensors: list[Sampled]

    def metrics(self, **settings) -> Metrics:
        return Metrics(
            self.statistics, self.statistics.records, HYPER, MetricSettings(bias_correction=True, **settings)
        )

    @property
    def weights(self) -> list[float]:
        return [1.0 for t in self.tensors for _ in t.values]

    @property
    def shares(self) -> list[float]:
        return [t.share for t in self.tensors for _ in t.values]

    def joined(self, key: str) -> list[float]:
        return [x for tensor in self.tensors for x in getattr(tensor, key)]


def record(shapes: Shapes, stream: Stream = plain, steps: int = 12, scale: float = 1.0, **settings) -> Recording:
    generator = torch.Generator().manual_seed(1)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    sampler = Sampler(params, betas=BETAS, **{"floor": 256} | settings)
    history = []
    for grads in stream(shapes, steps):
        for name, param in params.items():
            param.grad = scale * grads[name]
        assert sampler.observe(params)
        history.append({name: param.grad.clone() for name, param in params.items()})
    tensors = []
    for name, shape in shapes.items():
        if not math.prod(shape):
            continue
        coordinates = sampler.streams[name].coordinates
        taken = [coordinates.take(grads[name]).double().tolist() for grads in history]
        values = coordinates.take(params[name].detach()).double().tolist()
        tensors.append(Sampled(shape, coordinates.grid, math.prod(shape) / len(values), taken, values))
    return Recording(GradientStatistics.from_sampler(sampler, params), tensors)


def ema(values: list[float], beta: float) -> float:
    mean = 0.0
    for value in values:
        mean = beta * mean + (1 - beta) * value
    return mean / (1 - beta ** len(values))


def norm(x: list[float], weights: list[float]) -> float:
    return math.sqrt(sum(w * a * a for w, a in zip(weights, x)))


def cosine(x: list[float], y: list[float], weights: list[float], epsilon: float) -> float:
    dot = sum(w * a * b for w, a, b in zip(weights, x, y))
    return dot / (norm(x, weights) * norm(y, weights) + epsilon)


def quantile(x: list[float], weights: list[float], q: float) -> float:
    """Linear between the centres of the samples' shares; for equal weights between the order statistics, as usual.

    Equal samples are taken lighter ones first, so that the order of tensors does not matter.
    """
    pairs = sorted(zip(x, weights))
    centres, total = [], 0.0
    for _, weight in pairs:
        centres.append(total + weight / 2)
        total += weight
    target = centres[0] + q * (centres[-1] - centres[0])
    for k in range(len(pairs) - 1):
        if target <= centres[k + 1]:
            share = (target - centres[k]) / (centres[k + 1] - centres[k])
            return pairs[k][0] + share * (pairs[k + 1][0] - pairs[k][0])
    return pairs[-1][0]


def slow_anisotropy(block: Recording, epsilon: float) -> float:
    v = block.joined("second")
    low, high = (quantile(v, block.weights, q) for q in (0.1, 0.9))
    return math.log((high + epsilon) / (low + epsilon))  # Eq. anisotropy


def slow_stability(block: Recording, epsilon: float) -> float:
    steps = [[x for tensor in block.tensors for x in tensor.grads[t]] for t in range(block.statistics.steps)]
    cosines = [cosine(a, b, block.weights, epsilon) for a, b in itertools.pairwise(steps)]
    return ema(cosines, 0.9) if cosines else 0.0  # Eq. rho_bar


def slow_snr(block: Recording, epsilon: float) -> float:
    m, v = block.joined("first"), block.joined("second")
    return norm(m, block.weights) ** 2 / (sum(w * abs(x) for w, x in zip(block.weights, v)) + epsilon)  # Eq. rho_bar


def slow_distortion(block: Recording, epsilon: float) -> float:
    p = [1 / (math.sqrt(v) + epsilon) for v in block.joined("second")]
    mean = sum(w * x for w, x in zip(block.weights, p)) / sum(block.weights)
    values = block.joined("values")
    distorted = [(x / mean - 1) * theta for x, theta in zip(p, values)]
    return norm(distorted, block.weights) / (norm(values, block.weights) + epsilon)  # Eq. distortion


def slow_residual(block: Recording, epsilon: float) -> float | None:
    """Over the matrices of the sampled grid, of which only full rows are used."""
    error = total = 0.0
    found = False
    for tensor in block.tensors:
        if len(tensor.shape) < 2:
            continue
        _, height, width = tensor.grid
        rows = [tensor.second[i : i + width] for i in range(0, len(tensor.second) - width + 1, width)]
        for start in range(0, len(rows), height):
            matrix = rows[start : start + height]
            if len(matrix) < min(2, tensor.shape[-2]) or width < min(2, tensor.shape[-1]):
                continue
            found = True
            row_means = [sum(row) / len(row) for row in matrix]
            col_means = [sum(row[j] for row in matrix) / len(matrix) for j in range(width)]
            mean = sum(row_means) / len(row_means)
            for i, j in itertools.product(range(len(matrix)), range(width)):
                estimate = row_means[i] * col_means[j] / mean if mean else 0.0
                error += (matrix[i][j] - estimate) ** 2
                total += matrix[i][j] ** 2
    return math.sqrt(error) / (math.sqrt(total) + epsilon) if found else None  # Eq. structure_res


def slow_precision(block: Recording, bits: int, epsilon: float) -> float:
    exact: list[float] = []
    stored: list[float] = []
    for tensor in block.tensors:
        masses = block.statistics.masses
        raw = [[x * mass for x in moment] for moment, mass in zip((tensor.first, tensor.second), masses)]
        m, v = ([y / mass for y in quantized(tensor, x, bits, signed)] for x, mass, signed in zip(raw, masses, (1, 0)))
        exact += [a / (math.sqrt(b) + HYPER.eps) for a, b in zip(tensor.first, tensor.second)]
        stored += [a / (math.sqrt(b) + HYPER.eps) for a, b in zip(m, v)]
    return cosine(exact, stored, block.weights, epsilon)  # Eq. precision_cos


def quantized(tensor: Sampled, x: list[float], bits: int, signed: bool) -> list[float]:
    """Small tensors and fp32 as they are; bf16; int8 in groups along rows, vectors and short rows in bf16."""
    if bits == 32 or math.prod(tensor.shape) < 4096:
        return x
    if bits == 16 or len(tensor.shape) < 2 or math.prod(tensor.shape[1:]) < 8:
        return torch.tensor(x, dtype=torch.float32).bfloat16().tolist()
    width = min(tensor.grid[2], 256)
    assert tensor.grid[2] <= 256 and len(tensor.shape) == 2
    groups = [x[i : i + width] for i in range(0, len(x), width)]
    return [y for group in groups for y in nearest_levels(group, signed)]


def nearest_levels(group: list[float], signed: bool) -> list[float]:
    """Signed: 16 levels an octave, seven octaves, and 16 below them down to zero. Unsigned: 8 an octave, 32 octaves."""
    top = max(abs(x) for x in group)
    if top == 0:
        return group
    steps, octaves = (16, 8) if signed else (8, 32)
    end = 2.0 ** (math.floor(math.log2(top)) + 1)
    end *= 1 if top < end * (1 - 0.25 / steps) else 2  # the largest must not round to where the levels end
    levels = [end * 2.0 ** (e - octaves) * (1 + k / steps) for e in range(octaves) for k in range(steps)]
    if signed:
        lowest = levels[steps]
        levels = [lowest * k / steps for k in range(steps)] + levels[steps:]
    allowed = levels if signed else levels[1:]
    return [math.copysign(min(allowed, key=lambda y: abs(y - abs(x))), x) if x else 0.0 for x in group]


def assert_all_match(block: Recording, epsilon: float = EPSILON) -> None:
    metrics = block.metrics(epsilon=epsilon)
    near = {"rel": 2e-5, "abs": 2e-6}  # the sampler's moments are fp32
    assert metrics.anisotropy == pytest.approx(slow_anisotropy(block, epsilon), rel=1e-4, abs=1e-4)
    assert metrics.direction_stability == pytest.approx(slow_stability(block, epsilon), **near)
    assert metrics.snr == pytest.approx(slow_snr(block, epsilon), **near)
    assert metrics.distortion == pytest.approx(slow_distortion(block, epsilon), rel=1e-4, abs=1e-4)
    residual = slow_residual(block, epsilon)
    assert metrics.structure_residual == (residual and pytest.approx(residual, rel=1e-4, abs=1e-5))


# Against the reference


@by_one
@by_stream
def test_one_tensor_gives_the_papers_formulas(shapes, stream):
    assert_all_match(record(shapes, stream))


@by_one
@pytest.mark.parametrize("epsilon", [1e-6, 1e-2])
def test_epsilon_stands_where_the_paper_has_it(shapes, epsilon):
    """Of one tensor's samples, all of equal weight, the numbers are the paper's whatever share was sampled."""
    assert_all_match(record(shapes, scale=0.03), epsilon)


@pytest.mark.parametrize("shapes", SEVERAL.values(), ids=SEVERAL)
@by_stream
def test_several_tensors_are_one_vector_of_samples(shapes, stream):
    assert_all_match(record(shapes, stream))
    assert_all_match(record(shapes, stream, ratio=0.05, floor=10, seed=3))


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_any_number_of_steps_will_do(steps):
    assert_all_match(record(SEVERAL["layer"], steps=steps))


@pytest.mark.parametrize("seed", range(10))
def test_random_blocks(seed):
    random = np.random.default_rng(seed)
    shapes = {
        str(i): tuple(int(n) for n in random.integers(1, (200, 60, 12, 6)[dims], size=dims + 1))
        for i, dims in enumerate(random.integers(0, 4, size=3))
    }
    stream = STREAMS[seed % len(STREAMS)]
    assert_all_match(record(shapes, stream, int(random.integers(1, 20)), 10.0 ** random.integers(-2, 2), floor=40))


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize(
    "shapes",
    [ONE["matrix"], ONE["wide matrix"], ONE["thin matrix"], ONE["vector"], *SEVERAL.values()],
    ids=["matrix", "wide matrix", "thin matrix", "vector", *SEVERAL],
)
@pytest.mark.parametrize("stream", [plain, with_zero_steps, with_dead_rows], ids=lambda stream: stream.__name__)
def test_precision_sensitivity(shapes, stream, bits):
    """Eq. precision_cos with the formats that this package stores; in int8 a sampled row is a group of its own."""
    if bits == 8:  # how groups run in tensors of more dims is test_a_fully_sampled_tensor's business
        shapes = {name: shape for name, shape in shapes.items() if len(shape) < 3}
    block = record(shapes, stream)
    lost, expected = 1 - block.metrics().precision(bits), 1 - slow_precision(block, bits, EPSILON)
    # a sample in the middle between two codes of bf16 may go either way, and is 3% of the loss of 256
    assert lost == pytest.approx(expected, rel=0.06 if bits == 16 else 0.02, abs=1e-9)


def encoded(stored: Format, x: Tensor) -> Tensor:
    buffers = {b.name: torch.zeros(b.shape, dtype=b.dtype) for b in stored.buffers}
    stored.encode(buffers, slice(0, len(x)), x, NEAREST)
    return stored.decode(buffers, slice(0, len(x))).clone()


def true_loss(configuration: Configuration, block: Recording) -> float:
    """``1 - Q`` of a fully sampled tensor, had the optimizer's own codecs stored it as a whole."""
    (tensor,) = block.tensors
    masses = dict(zip("mv", block.statistics.masses))
    means = {
        name: torch.tensor(getattr(tensor, key)).view(tensor.shape) for name, key in (("m", "first"), ("v", "second"))
    }
    exact, stored = dict(means), dict(means)
    for slot in configuration.mechanism.slots:
        codec = configuration.codec(slot.name)
        twin = CODECS["factored" if codec.factored else "fp32"]
        exact[slot.name], stored[slot.name] = (
            encoded(c.at(tuple(tensor.shape), slot), means[slot.name] * masses[slot.name]) / masses[slot.name]
            for c in (twin, codec)
        )
    u, w = (slots["m"].double() / (slots["v"].double().sqrt() + HYPER.eps) for slots in (exact, stored))
    return 1 - float((u * w).sum() / (u.norm() * w.norm()))


FULL_SHAPES = {
    "matrix": (64, 80),
    "short rows": (600, 9),
    "several groups": (12, 700),
    "stack": (5, 31, 33),
    "convolution": (16, 12, 5, 5),
    "pointwise convolution": (64, 65, 1, 1),
    "vector": (5003,),
}


@pytest.mark.parametrize("shape", FULL_SHAPES.values(), ids=FULL_SHAPES)
@pytest.mark.parametrize("spelling", ["adamw-16", "adamw-8", "adafactor-16", "adafactor-8", "adamw[m=int8,v=factored]"])
def test_a_fully_sampled_tensor_is_stored_as_the_optimizer_stores_it(spelling, shape):
    """Matrices and vectors exactly; of other tensors, whose groups a grid of samples can only resemble, about."""
    configuration = parse(spelling)
    block = record({"w": shape}, ratio=1.0)
    lost, expected = 1 - block.metrics().alignment(configuration), true_loss(configuration, block)
    if len(shape) < 3:
        assert lost == pytest.approx(expected, rel=0.02, abs=1e-9)
    else:
        assert expected / 1.5 <= lost + 1e-9 and lost <= 1.5 * expected + 1e-9


@pytest.mark.parametrize("shape", [(300, 200), (50, 20, 60), (64, 100, 3, 3), (300, 200, 1, 1)], ids=str)
def test_a_few_samples_tell_what_int8_loses(shape):
    """Within a factor of three, for gradients that are alike everywhere."""
    few, every = (record({"w": shape}, noise, ratio=ratio) for ratio in (0.001, 1.0))
    for configuration in (parse("adamw-8"), parse("adafactor-8")):
        lost, expected = 1 - few.metrics().alignment(configuration), true_loss(configuration, every)
        assert expected / 3 < lost < 3 * expected, configuration


# Precision


@by_block
def test_fp32_loses_nothing(shapes):
    metrics = record(shapes, steps=5).metrics()
    assert metrics.precision(32) == pytest.approx(1, abs=1e-9)
    for spelling in ("adam-32", "sgdm-32", "sgdwm-32", "adafactor[v=fp32]"):
        assert metrics.alignment(parse(spelling)) == pytest.approx(1, abs=1e-9), spelling


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1e-6, 1e6])
def test_fp32_loses_nothing_at_any_scale(scale):
    """An epsilon must not be taken for a loss where gradients are small."""
    metrics = record(ONE["matrix"], scale=scale).metrics()
    for spelling in ("adamw-32", "sgdm-32", "adafactor-32", "adamw[v=factored]"):
        assert metrics.alignment(parse(spelling)) == pytest.approx(1, abs=1e-6), spelling


@by_block
@by_stream
def test_less_precision_is_no_better(shapes, stream):
    metrics = record(shapes, stream, steps=5).metrics()
    if not metrics.has_signal:  # Eq. 8 of zero updates is 0 / epsilon
        assert metrics.precision(32) == metrics.precision(8) == 0
        return
    q32, q16, q8 = (metrics.precision(bits) for bits in (32, 16, 8))
    assert 1 + 1e-9 >= q32 >= q16 - 1e-6
    assert q16 >= q8 - 1e-5
    assert q8 > 0.5


@by_stream
def test_without_state_nothing_is_lost(stream):
    metrics = record(SEVERAL["mixed"], stream, steps=5).metrics()
    for spelling in ("sgd-32", "sgd-16", "sgd-8", "sgdw-32", "sgdw-8"):
        assert metrics.alignment(parse(spelling)) == pytest.approx(1, abs=1e-9)


@by_block
def test_factorization_is_not_a_loss_of_precision(shapes):
    """The exact twin of a factored codec is the fp32 factorization."""
    metrics = record(shapes, steps=5).metrics()
    assert metrics.alignment(parse("adamw[m=fp32,v=factored]")) == pytest.approx(1, abs=1e-9)
    assert metrics.alignment(parse("adafactor-32")) == pytest.approx(1, abs=1e-9)


def test_small_tensors_keep_fp32():
    metrics = record({"a": (63, 65), "b": (4095,)}).metrics()
    for configuration in CATALOG:
        assert metrics.alignment(configuration) == pytest.approx(1, abs=1e-9), configuration


@by_stream
def test_every_number_is_finite(stream):
    for shapes, steps in itertools.product((ONE["matrix"], ONE["one coordinate"], *SEVERAL.values()), (1, 4)):
        metrics = record(shapes, stream, steps).metrics()
        numbers = [metrics.anisotropy, metrics.direction_stability, metrics.snr, metrics.distortion]
        numbers += [metrics.structure_residual or 0.0]
        numbers += [f(c) for f in (metrics.alignment, metrics.update_rms) for c in CATALOG]
        assert all(isinstance(x, float) and math.isfinite(x) for x in numbers)
        assert metrics.anisotropy >= 0 and metrics.snr >= 0 and metrics.distortion >= 0
        assert abs(metrics.direction_stability) <= 1 + 1e-9


# Edges


def test_no_gradients_at_all():
    metrics = record(SEVERAL["mixed"], silence).metrics()
    assert not metrics.has_signal
    assert (metrics.anisotropy, metrics.direction_stability, metrics.snr) == (0, 0, 0)
    assert metrics.distortion == pytest.approx(0, abs=1e-12)
    assert metrics.structure_residual == 0
    assert all(metrics.alignment(configuration) == 1 for configuration in CATALOG)
    assert metrics.update_rms(parse("adamw-32")) == metrics.update_rms(parse("sgd")) == 0


def test_one_gradient_is_a_signal():
    def once(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
        for step in range(steps):
            yield {name: torch.full(shape, 1e-3 * (step == 0)) for name, shape in shapes.items()}

    assert record({"a": (4,), "b": (3,)}, once).metrics().has_signal


def test_a_zero_norm_makes_a_cosine_of_zero():
    """Steps 1, 4 and 5 of constant gradients are zero: only pairs of steps around them count, as 1."""

    def gaps(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
        for step in range(steps):
            yield {"w": torch.full((50,), 2.0 * (step not in (0, 3, 4)))}

    cosines = [0, 1, 0, 0, 0, 1, 1]
    assert record({"w": (50,)}, gaps, 8).metrics().direction_stability == pytest.approx(ema(cosines, 0.9), rel=1e-9)


@by_block
def test_constant_gradients_are_all_signal(shapes):
    metrics = record(shapes, constant, 30).metrics()
    assert metrics.snr == pytest.approx(1, rel=1e-4)
    assert metrics.direction_stability == pytest.approx(1, rel=1e-6)


def test_noise_is_no_signal():
    """White noise leaves (1 - beta) / (1 + beta) of its power in an EMA; successive gradients have nothing to share."""
    metrics = record(SEVERAL["layer"], noise, 300).metrics()
    assert metrics.snr == pytest.approx(0.1 / 1.9, rel=0.3)
    assert abs(metrics.direction_stability) < 0.06


def test_a_short_warm_up_does_not_inflate_the_snr():
    """Undivided, 10 steps would have 30 times the SNR of 300."""
    short, long = (record(ONE["matrix"], noise, steps).metrics().snr for steps in (10, 300))
    assert short < 4 * long


def test_alternating_gradients_are_unstable():
    def alternating(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
        for step in range(steps):
            yield {name: torch.full(shape, (-1.0) ** step) for name, shape in shapes.items()}

    metrics = record(SEVERAL["layer"], alternating, 100).metrics()
    assert metrics.direction_stability == pytest.approx(-1, rel=1e-6)
    assert metrics.snr < 0.01


def test_one_step_has_no_stability():
    metrics = record(SEVERAL["layer"], steps=1).metrics()
    assert metrics.direction_stability == 0
    assert metrics.snr == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("shape", [(64, 80), (5, 31, 33), (16, 12, 5, 5)], ids=str)
@pytest.mark.parametrize("ratio", [0.001, 1.0])
def test_a_rank_1_second_moment_has_no_residual(shape, ratio):
    def outer(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
        rows, cols = torch.randn(*shape[:-1], 1).exp(), torch.randn(*shape[:-2], 1, shape[-1]).exp()
        for step in range(steps):
            yield {"w": (step + 1) * rows * cols}

    residual = record({"w": shape}, outer, ratio=ratio).metrics().structure_residual
    assert residual is not None and residual < 1e-5


def test_a_diagonal_second_moment_has_a_large_residual():
    def diagonal(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
        for _ in range(steps):
            yield {"w": torch.eye(30)}

    residual = record({"w": (30, 30)}, diagonal, ratio=1.0).metrics().structure_residual
    assert residual == pytest.approx(math.sqrt(29 / 30), rel=1e-6)


def test_without_a_matrix_there_is_no_residual():
    assert record(SEVERAL["vectors"]).metrics().structure_residual is None
    assert record({"w": (), "empty": (0, 3)}).metrics().structure_residual is None


def test_one_coordinate_is_isotropic_and_undistorted():
    metrics = record(ONE["one coordinate"]).metrics()
    assert metrics.anisotropy == 0
    assert metrics.distortion == pytest.approx(0, abs=1e-12)


def test_embedding_rows_without_gradient_are_anisotropic():
    metrics = record({"w": (200, 32)}, with_dead_rows).metrics()
    assert metrics.has_signal
    assert metrics.anisotropy > 20
    assert 0.5 < metrics.distortion < 2  # their preconditioner is twice the mean, all others' nearly zero
    assert metrics.precision(8) > 0.9


def test_anisotropy_is_the_log_ratio_of_known_quantiles():
    """Second moments 1, 2, ..., 101: the 10% quantile is 11, the 90% one 91."""

    def ramp(shapes: Shapes, steps: int) -> Iterator[dict[str, Tensor]]:
        for _ in range(steps):
            yield {"w": torch.arange(1.0, 102.0).sqrt()}

    assert record({"w": (101,)}, ramp).metrics().anisotropy == pytest.approx(math.log(91 / 11), rel=1e-4)


def test_samples_tell_what_all_elements_would():
    for shapes in (ONE["matrix"], {"w": (100, 120), "b": (300,), "stack": (6, 50, 40)}):
        few, every = (record(shapes, steps=20, ratio=ratio).metrics() for ratio in (0.1, 1.0))
        assert few.anisotropy == pytest.approx(every.anisotropy, rel=0.15)
        assert few.snr == pytest.approx(every.snr, rel=0.25)
        assert few.direction_stability == pytest.approx(every.direction_stability, abs=0.15)
        assert few.update_rms(parse("adamw")) == pytest.approx(every.update_rms(parse("adamw")), rel=0.1)


@pytest.mark.parametrize("stream", [plain, with_dead_rows], ids=lambda stream: stream.__name__)
def test_the_order_of_tensors_does_not_matter(stream):
    block = record(SEVERAL["densities"], stream)
    names = list(block.statistics.records)
    one, other = (Metrics(block.statistics, order, HYPER, CORRECTED) for order in (names, names[::-1]))
    for key in ("anisotropy", "direction_stability", "snr", "distortion", "structure_residual"):
        assert getattr(one, key) == pytest.approx(getattr(other, key), rel=1e-9), key
    for configuration in CATALOG:
        assert one.alignment(configuration) == pytest.approx(other.alignment(configuration), rel=1e-9)


def test_metrics_survive_a_file(tmp_path):
    block = record(SEVERAL["mixed"])
    block.statistics.save(tmp_path / "statistics.pt")
    loaded = Metrics(GradientStatistics.load(tmp_path / "statistics.pt"), block.statistics.records, HYPER, CORRECTED)
    metrics = block.metrics()
    for key in ("anisotropy", "direction_stability", "snr", "distortion", "structure_residual"):
        assert getattr(loaded, key) == getattr(metrics, key)
    for configuration in CATALOG:
        assert loaded.alignment(configuration) == metrics.alignment(configuration)
        assert loaded.update_rms(configuration) == metrics.update_rms(configuration)


# The length of updates


@by_block
def test_update_rms_of_adamw(shapes):
    block = record(shapes)
    updates = [m / (math.sqrt(v) + HYPER.eps) for m, v in zip(block.joined("first"), block.joined("second"))]
    expected = norm(updates, block.shares) / math.sqrt(sum(block.shares))
    for spelling in ("adamw-32", "adamw-16", "adamw-8", "adam-32"):
        assert block.metrics().update_rms(parse(spelling)) == pytest.approx(expected, rel=1e-4)


@by_block
def test_update_rms_of_sgd_is_the_gradients_own(shapes):
    block = record(shapes)
    mean = sum(w * v for w, v in zip(block.shares, block.joined("second"))) / sum(block.shares)
    assert block.metrics().update_rms(parse("sgd")) == pytest.approx(math.sqrt(mean), rel=1e-4)
    assert block.metrics().update_rms(parse("sgdw-8")) == pytest.approx(math.sqrt(mean), rel=1e-4)


def test_update_rms_of_momentum_counts_what_it_has_gathered():
    block = record(SEVERAL["layer"], steps=20)
    mean = norm(block.joined("first"), block.shares) / math.sqrt(sum(block.shares))
    gathered = sum(0.9**k for k in range(20))
    assert block.metrics().update_rms(parse("sgdm-16")) == pytest.approx(gathered * mean, rel=1e-4)


def test_update_rms_of_adafactor_is_relative_to_the_parameters():
    """Updates of RMS 1 at most, times the RMS of each tensor; all but the step's cap at 1 / sqrt(t)."""
    block = record(SEVERAL["layer"])
    squares = sum(t.share * x * x for t in block.tensors for x in t.values)
    expected = math.sqrt(squares / sum(block.shares))
    assert block.metrics().update_rms(parse("adafactor")) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("spelling", "peer"),
    [
        ("adamw-32", lambda params: torch.optim.AdamW(params, lr=HYPER.lr, weight_decay=0.0)),
        ("sgdm-32", lambda params: torch.optim.SGD(params, lr=HYPER.lr, momentum=0.9)),
    ],
)
def test_update_rms_is_how_far_torchs_own_optimizer_moves(spelling, peer):
    shapes = SEVERAL["layer"]
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer = peer(params.values())
    for grads in plain(shapes, 15):
        before = {name: param.detach().clone() for name, param in params.items()}
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
    moved = torch.cat([(param.detach() - before[name]).flatten() for name, param in params.items()]).double()
    metrics = record(shapes, steps=15, ratio=1.0).metrics()
    assert metrics.update_rms(parse(spelling)) * HYPER.lr == pytest.approx(
        float(moved.square().mean().sqrt()), rel=1e-3
    )


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_ratio_of_update_lengths_matches_learning_rates(scale):
    """Gradients times c: AdamW moves as before, SGD c times as far, so that its matched lr is divided by c."""
    one, other = record(SEVERAL["layer"]).metrics(), record(SEVERAL["layer"], scale=scale).metrics()
    adamw, adafactor = parse("adamw-16"), parse("adafactor")
    assert other.update_rms(adamw) == pytest.approx(one.update_rms(adamw), rel=1e-3)
    assert other.update_rms(adafactor) == pytest.approx(one.update_rms(adafactor), rel=1e-3)
    for spelling in ("sgd", "sgdw", "sgdm-8", "sgdwm-16"):
        configuration = parse(spelling)
        ratios = [metrics.update_rms(adamw) / metrics.update_rms(configuration) for metrics in (one, other)]
        assert ratios[1] == pytest.approx(ratios[0] / scale, rel=1e-3)


@pytest.mark.parametrize("lr", [0.0, 1e-8, 0.01])
def test_update_rms_is_in_units_of_lr(lr):
    """The same at any lr, also at the 0 that a schedule may begin with."""
    block = record(SEVERAL["layer"])
    metrics = Metrics(block.statistics, block.statistics.records, Hyper(lr=lr))
    for spelling in ("adamw", "sgd", "sgdm", "adafactor"):
        expected = block.metrics().update_rms(parse(spelling))
        assert metrics.update_rms(parse(spelling)) == pytest.approx(expected, rel=1e-6), spelling

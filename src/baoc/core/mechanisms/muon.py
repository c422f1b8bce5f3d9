"""Muon and its variants, and the Newton-Schulz iterations that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from baoc.core.mechanisms.base import Evidence
from baoc.core.mechanisms.normalised import MOMENTUM, MOMENTUM_RISE, NESTEROV, UPDATE_RMS, Normalised, momentum_at
from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import FP32_TINY, Hyper, Reach, Scalars, Setting, Shape, Slot

Coefficients = tuple[tuple[float, float, float], ...]

YOU_JIACHENG: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""You Jiacheng's coefficients, one triple per iteration: https://x.com/YouJiacheng/status/1905861218138804534, as in
https://github.com/KellerJordan/modded-nanogpt. Polar Express (https://arxiv.org/abs/2505.16932) has other values."""

MUON: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""The coefficients of ``torch.optim.Muon``. Singular values end between 0.7 and 1.2."""

_SMALLEST_NORM = torch.finfo(torch.float32).tiny


def products_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: bf16 where the hardware multiplies it several times as fast.

    Args:
        device: where the matrices are.

    Returns:
        The dtype. Singular values end close enough to one with either.

    Example:
        >>> products_dtype(torch.device("cpu")), products_dtype(torch.device("cuda"))
        (torch.float32, torch.bfloat16)
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalised(
    stacked: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Bring the singular values of matrices close to one by Newton-Schulz iterations.

    Args:
        stacked: fp32 matrices, shape ``(batch, rows, cols)``. They are overwritten.
        coefficients: one triple ``(a, b, c)`` per iteration ``x <- a x + b (x x') x + c (x x')^2 x``.
        scratch: memory for a copy of the batch and two Gram matrices of each, see :func:`workspace`.
        dtype: the dtype of matrix products; by default :func:`products_dtype`.

    Returns:
        The result in fp32, as a view of ``stacked`` or ``scratch``.

    Example:
        >>> x = torch.eye(4, 9, dtype=torch.float32, device="cpu").mul(1e-6).unsqueeze(0)
        >>> bool((orthogonalised(x, YOU_JIACHENG).diagonal(dim1=1, dim2=2) - 1).abs().max() < 0.2)
        True
    """
    batch, side, length = stacked.shape[0], min(stacked.shape[-2:]), max(stacked.shape[-2:])
    is_tall = stacked.shape[-2] > stacked.shape[-1]
    dtype = dtype or products_dtype(stacked.device)
    shapes = (batch, side, length), (batch, side, side), (batch, side, side)
    sizes = [aligned(math.prod(shape)) for shape in shapes]
    scratch = stacked.new_empty(sum(sizes)) if scratch is None else scratch[: sum(sizes)]
    parts = scratch.split_with_sizes(sizes)
    copy = parts[0][: math.prod(shapes[0])].view(shapes[0])
    gram, polynomial = (part.view(dtype)[: math.prod(shapes[1])].view(shapes[1]) for part in parts[1:])
    x, other = (copy.copy_(stacked.mT), stacked.view(copy.shape)) if is_tall else (stacked, copy)
    for order in (torch.inf, 2):  # first by the largest element: squares of tiny gradients would underflow
        x.div_(torch.linalg.vector_norm(x, order, dim=(-2, -1), keepdim=True).clamp_(min=_SMALLEST_NORM))
    if dtype == torch.float32:
        x, other = _iterated(x, other, gram, polynomial, coefficients)
        return other.view(stacked.shape).copy_(x.mT) if is_tall else x
    # `other` has room for two copies of x in bf16
    first, second = (part.view(x.shape) for part in other.view(-1).view(dtype).split_with_sizes([x.numel()] * 2))
    found, _ = _iterated(first.copy_(x), second, gram, polynomial, coefficients)
    return x.view(stacked.shape).copy_(found.mT if is_tall else found)


def _iterated(
    x: Tensor, other: Tensor, gram: Tensor, polynomial: Tensor, coefficients: Sequence[tuple[float, float, float]]
) -> tuple[Tensor, Tensor]:
    """Iterate on x, shape (batch, side, length). Return the result and the free memory; one is ``x``, one ``other``."""
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x, other


def aligned(numel: int) -> int:
    """Round a number of elements up to whole cache lines. Results of matrix products depend on their alignment."""
    return -(-numel // 16) * 16


def workspace(rows: int, cols: int) -> int:
    """Return how many elements :func:`orthogonalised` needs for one matrix, the matrix included."""
    return rows * cols + aligned(rows * cols) + 2 * aligned(min(rows, cols) ** 2)


def operations(rows: int, cols: int, iterations: int) -> int:
    """Return the floating-point operations of :func:`orthogonalised` for one matrix.

    An iteration has two products with the matrix and one of Gram matrices.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        iterations: how many iterations.

    Returns:
        Multiplications and additions.

    Example:
        >>> operations(768, 768, 5)
        13589544960
    """
    side = min(rows, cols)
    return iterations * (4 * side * rows * cols + 2 * side**3)


def _is_finite(x: object) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


NEWTON_SCHULZ = Setting(
    "newton_schulz",
    YOU_JIACHENG,
    "one to twenty triples of finite numbers, one triple for each iteration",
    lambda x: 0 < len(x) <= 20 and all(len(triple) == 3 and all(map(_is_finite, triple)) for triple in x),
    "coefficients (a, b, c) of x <- a x + b (x x') x + c (x x')^2 x; torch.optim.Muon has "
    "((3.4445, -4.775, 2.0315),) * 5",
)
ROW_MEMORY = Setting(
    "normuon_beta2", 0.95, "a number in [0, 1)", lambda x: 0 <= x < 1, "decay of NorMuon's mean square per row"
)


class Spectral(Normalised):
    """The gradient with all singular values made one: Muon without momentum, so without state."""

    name = "spectral"
    momentum = False
    reach = Reach.MATRIX
    settings: ClassVar[tuple[Setting, ...]] = (*Normalised.settings, NEWTON_SCHULZ)

    def suits(self, shape: Shape, role: Role) -> bool:
        return role in HIDDEN

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        triples = enumerate(NEWTON_SCHULZ.of(hyper))
        iterations = {f"iteration.{i}.{name}": float(x) for i, triple in triples for name, x in zip("abc", triple)}
        return super().scalars(hyper, ages) | iterations

    def finish(self, stacked: Tensor, scalars: Scalars) -> Tensor:
        batch, *shape = stacked.shape
        return self.finish_in(stacked, stacked.new_empty(batch * self.scratch(*shape)), scalars)

    def finish_in(self, stacked: Tensor, scratch: Tensor, scalars: Scalars) -> Tensor:
        # An orthogonal matrix has min(rows, cols) singular values of one. This factor makes its RMS one.
        return orthogonalised(stacked, _coefficients(scalars), scratch).mul_(math.sqrt(max(stacked.shape[-2:])))

    def workspace(self, rows: int, cols: int) -> int:
        return workspace(rows, cols)

    def operations(self, rows: int, cols: int) -> int:
        return operations(rows, cols, len(YOU_JIACHENG))

    def scratch(self, rows: int, cols: int) -> int:
        return workspace(rows, cols) - rows * cols


MAX_UPDATE_RMS = Setting(
    "max_update_rms",
    0.45,
    "a number > 0",
    lambda x: x > 0,
    "the largest RMS of an update of muon and normuon in units of lr; with update_rms=1e9, the RMS of every update",
)


class Muon(Spectral):
    """Momentum with all singular values made one, as ``torch.optim.Muon``, and with a length that follows the signal.

    AdamW's updates are longer where gradients agree with each other (early in training, in fine-tuning), and become
    shorter where gradients vanish. The same ratio sets the length here: the RMS of the momentum to the root of ``s``,
    the running mean square of the gradient, one number per matrix. Updates have the RMS ``update_rms`` where gradients
    are noise and the momentum is full, and at most ``max_update_rms``.
    """

    name = "muon"
    momentum = True
    slots: ClassVar[tuple[Slot, ...]] = (MOMENTUM, Slot("s", signed=False, sets_length=True, codecs=("mean",)))
    default_codecs = {"s": "mean"}
    settings = (*Spectral.settings, MAX_UPDATE_RMS)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        numbers = super().scalars(hyper, ages)
        keep, add = numbers["of_m"], numbers["of_grad"]
        mass = keep * self.mass("m", ages["m"], hyper) + add  # of the weights in the look ahead
        s_mass = max(self.mass("s", ages["s"], hyper), FP32_TINY)  # a schedule may set beta2 to 1
        return numbers | {
            "step": hyper.lr * hyper.lr_scale,
            "s.keep": hyper.beta2,
            "s.add": 1.0 - hyper.beta2,
            "length": UPDATE_RMS.of(hyper) / _rms_of_noise(keep, hyper) * math.sqrt(s_mass) / mass,
            "max_length": float(MAX_UPDATE_RMS.of(hyper)),
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad if slot == "m" else grad * grad

    def length(self, direction_square: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        ratio = (direction_square / slots["s"].clamp(min=FP32_TINY)).sqrt()
        return (ratio * scalars["length"]).clamp(max=scalars["max_length"])

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - hyper.beta2**age) if slot == "s" else super().mass(slot, age, hyper)

    def infer(self, slot: str, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        if slot != "s" or "v" in means:
            return means.get("v") if slot == "s" else None
        # as if the momentum had averaged noise: then updates have their usual length
        noise = _rms_of_noise(momentum_at(max(1, ages.get("m", 0)), hyper), hyper)
        return means["m"].square() / noise**2 if "m" in means else None

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        memory = round(1.0 / (1.0 - NESTEROV.of(hyper)))  # gradients that m averages
        return ages.get("v", min(ages.get("m", 0), memory)) if slot == "s" else 0

    def late_age(self, slot: str, rms: float, hyper: Hyper) -> int:
        # An empty momentum's first direction is 1 - momentum^2 of the gradient. Relative to noise that falls with the
        # momentum, which rises with age.
        if slot != "m":
            return 0
        wanted = rms / UPDATE_RMS.of(hyper)
        oldest = 1 + math.ceil(MOMENTUM_RISE.of(hyper) * NESTEROV.of(hyper) / (1.0 - NESTEROV.of(hyper)))
        momenta = ((age, momentum_at(age + 1, hyper)) for age in range(oldest))
        return next((age for age, keep in momenta if (1.0 - keep**2) / _rms_of_noise(keep, hyper) <= wanted), oldest)

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        usual, means = float(UPDATE_RMS.of(hyper)), evidence.means
        known = {name: (x.square() if name == "m" else x).mean().item() for name, x in means.items() if name in "msv"}
        known |= evidence.mean_squares
        s = known.get("s", known.get("v"))
        if s is None:  # it will be inferred from m so that updates have their usual length, or starts late
            return usual
        # Without m, the first direction is the gradient, and the RMS of a typical gradient is the root of s.
        ratio = math.sqrt(known.get("m", s) / max(s, FP32_TINY))
        noise = _rms_of_noise(momentum_at(1 + evidence.ages.get("m", 0), hyper), hyper)
        return min(usual / noise * ratio, float(MAX_UPDATE_RMS.of(hyper)))


def _rms_of_noise(keep: float, hyper: Hyper) -> float:
    """Return the RMS of Nesterov's look ahead that counts as noise, for gradients with an RMS of one.

    A momentum that has just begun to rise averages little noise away. By itself that would make early updates as short
    as later ones, and AdamW's early updates are longer. The geometric mean of the noise now and with full momentum is
    in between, and ends lower than either on language and image models together (`docs/results/length.md`).

    Args:
        keep: the momentum of this step.
        hyper: the hyper-parameters of the param group.

    Returns:
        The RMS.

    Example:
        >>> [round(_rms_of_noise(keep, Hyper(lr=1e-3)), 2) for keep in (0.0, 0.5, 0.95)]
        [0.42, 0.36, 0.17]
    """

    def square(momentum: float) -> float:
        # momentum^2 of the average before the step, whose variance is (1 - momentum) / (1 + momentum), and
        # 1 - momentum^2 of the gradient
        return momentum**4 * (1.0 - momentum) / (1.0 + momentum) + (1.0 - momentum**2) ** 2

    return math.sqrt(math.sqrt(square(keep) * square(NESTEROV.of(hyper))))


class NorMuon(Muon):
    """Muon with rows divided by the root of their running mean square (https://arxiv.org/abs/2510.05491)."""

    name = "normuon"
    slots = (*Muon.slots, Slot("o", signed=False, of_direction=True, codecs=("row-mean",)))
    default_codecs = {**Muon.default_codecs, "o": "row-mean"}
    settings = (*Muon.settings, ROW_MEMORY)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep = ROW_MEMORY.of(hyper)
        numbers = {"o.keep": keep, "o.add": 1.0 - keep, "o.mean_floor": 0.0, "o.mass": self.mass("o", ages["o"], hyper)}
        return super().scalars(hyper, ages) | numbers

    def adapt(self, finished: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return finished / (slots["o"] / scalars["o.mass"]).sqrt().clamp(min=FP32_TINY)

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - ROW_MEMORY.of(hyper) ** age) if slot == "o" else super().mass(slot, age, hyper)


def _coefficients(scalars: Scalars) -> list[tuple[float, float, float]]:
    count = sum(name.startswith("iteration.") for name in scalars) // 3
    return [tuple(float(scalars[f"iteration.{i}.{name}"]) for name in "abc") for i in range(count)]  # type: ignore[misc]

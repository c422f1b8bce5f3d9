"""Compare Triton code with the eager update on small tensors.

:class:`Verifier` does so for each family before its first use in a process, and ``baoc selfcheck`` for every
configuration. The eager update runs on the CPU as the reference. Both have their own tensors, state and random
generator, so training is not affected.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baoc.core.configuration import Configuration
from baoc.core.spec import Hyper
from baoc.optim.kernels import graphs
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.triton.families import Family, Form, Use, form
from baoc.optim.kernels.triton.kernel import TritonKernel
from baoc.optim.state import new_state

logger = logging.getLogger("baoc")

Promise = Literal["bits", "rounding", "products"]
"""How close the results are: the same bits; sums in another order, so a last bit or a code differs here and there; or
matrix products in bf16."""

HYPER = Hyper(lr=0.1, weight_decay=0.1)
"""A large learning rate, so that a wrong direction shows in the parameter beyond rounding."""

_STEPS = 2  # the first one reads zeros as state
# Each kind of state format, aligned and not: long rows, rows too short for int4, rows too short for int8, large
# vectors, rows of whole groups of int4; then small matrices and vectors, which have fp32 state.
_SHAPES = (
    *((17, 272), (17, 273), (264, 16), (457, 9), (2064, 2), (1371, 3), (4112,), (4111,), (17, 320)),
    *((3, 48), (3, 7), (48,), (7,)),
)
_SHAPES_OF_SUMS = ((144, 272), (145, 273), (144, 320), *_SHAPES)  # large enough for several programs per sum
_CODES_APART = 1e-3  # share of elements that may differ if sums have another order
_PRODUCTS_APART = 0.05  # of the norm of a matrix's movement
_CPU = torch.device("cpu")

_problems: dict[tuple[torch.device, Family], str | None] = {}  # of this process; None: the family matches
_warned: set[torch.device] = set()


class Verifier:
    """Verifies families on a device before their first use, once per family, device and process.

    Args:
        device: The device of all tensors.
        strict: Raise if a family does not match. Otherwise log one warning per device.
    """

    def __init__(self, device: torch.device, *, strict: bool) -> None:
        self._device, self._strict = device, strict

    @property
    def mismatches(self) -> list[Family]:
        """The families that do not match on this device, as far as this process has verified them."""
        return [family for (device, family), problem in _problems.items() if problem and device == self._device]

    def accepts(self, family: Family, job: Job, use: Use) -> bool:
        """Return whether the Triton code of a family matches the eager update.

        Args:
            family: The family to launch.
            job: A job of this family, for its configuration and dtypes.
            use: Which part of the update the family is for.

        Raises:
            RuntimeError: The family does not match and the verifier is strict, or a CUDA graph is being captured and
                the family was not verified before.
        """
        key = self._device, family
        if key not in _problems:
            if graphs.is_capturing(self._device):
                raise RuntimeError(
                    f"the captured step needs Triton code that has not been verified on {self._device} yet: {family}. "
                    "Run at least one ordinary step with gradients for all parameters before the capture."
                )
            _problems[key] = _problem(family, job.layout.configuration, (job.param.dtype, job.grad.dtype), use, key[0])
        problem = _problems[key]
        if problem is None:
            return True
        self._report(family, problem)
        return False

    def _report(self, family: Family, problem: str) -> None:
        if not self._strict and self._device in _warned:
            return  # the kernel logs what updates the parameters instead
        about = machine(self._device)
        name, versions = about.pop("device"), ", ".join(f"{key} {value}" for key, value in about.items())
        what = f"the Triton code for {family} does not match the eager update on {self._device} ({name}): {problem}."
        report = f"Please report this message together with the output of `baoc selfcheck`: {versions}."
        if self._strict:
            raise RuntimeError(f"{what} Use kernel='auto' to train with another kernel. {report}")
        _warned.add(self._device)
        then = "Another kernel updates these parameters, more slowly. This is the only warning for this device."
        logger.warning("%s %s %s", what, then, report)


@torch.no_grad()
def _problem(
    family: Family,
    configuration: Configuration,
    dtypes: tuple[torch.dtype, torch.dtype],
    use: Use,
    device: torch.device,
) -> str | None:
    """Return how a family differs from the eager update, or ``None`` if it matches."""
    try:
        found = compare_family(family, configuration, dtypes, use, device)
    except torch.OutOfMemoryError:
        raise  # says nothing about the family
    except Exception as error:  # whatever the compiler or the driver raises: another kernel can go on
        return f"it fails with {type(error).__name__}: {error}".splitlines()[0]
    if not found:
        return None
    return f"the largest difference is {max(each.largest for each in found):.3g} ({'; '.join(map(str, found))})"


def compare_family(
    family: Family,
    configuration: Configuration,
    dtypes: tuple[torch.dtype, torch.dtype],
    use: Use,
    device: torch.device,
) -> list[Difference]:
    """Run a family and the eager update on a small tensor.

    Args:
        family: The family to verify.
        configuration: A configuration with tensors of this family.
        dtypes: The dtypes of parameters and gradients.
        use: Which part of the update the family is for.
        device: The device to verify.

    Returns:
        What differs more than promised: bits, or rounding if the family has sums.

    Raises:
        LookupError: No small tensor of the configuration is of this family.
    """
    shapes = [small_shape(family, configuration, dtypes, use)]
    start, expected = (Trial(configuration, shapes, dtypes[0]) for _ in range(2))
    found = Trial(configuration, shapes, dtypes[0], device, aligned=family.aligned)
    kernel = TritonKernel(device, EagerKernel)
    for step in range(_STEPS):
        grads = [gradient(shape, step).to(dtypes[1]) for shape in shapes]
        with ExactRoots():
            expected.step(EagerKernel(), grads, use=use)
        found.step(kernel, [grad.to(device) for grad in grads], use=use)
    return differences(expected, found, "rounding" if family.sums else "bits", start)


def small_shape(
    family: Family, configuration: Configuration, dtypes: tuple[torch.dtype, torch.dtype], use: Use
) -> tuple[int, ...]:
    """Return the shape of a small tensor of a family.

    Some formats always have rows that can be aligned. Their tensors are of a family without alignment if their memory
    is not aligned.

    Raises:
        LookupError: No small tensor of the configuration is of this family.
    """
    for wanted in dict.fromkeys((family, family._replace(aligned=True))):
        for shape in _SHAPES_OF_SUMS if family.sums else _SHAPES:
            small = form(configuration.layout(shape), torch.Size(shape), *dtypes, use)
            if isinstance(small, Form) and small.family == wanted:
                return shape
    raise LookupError(f"no small tensor of {configuration} is of the family {family}")


class Trial:
    """Parameters of one configuration with their state, which any kernel can advance.

    Args:
        configuration: The configuration of all parameters.
        shapes: The shapes of the parameters.
        dtype: The dtype of the parameters.
        device: The device of parameters and state.
        aligned: Whether the memory of parameters and directions allows vector loads.
    """

    def __init__(
        self,
        configuration: Configuration,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
        *,
        aligned: bool = True,
    ) -> None:
        self.layouts = [configuration.layout(shape) for shape in shapes]
        self.params = [_normal(shape, seed).to(device, dtype) for seed, shape in enumerate(shapes, 100)]
        self.directions = [_normal(shape, seed).to(device) for seed, shape in enumerate(shapes, 200)]
        if not aligned:
            self.params, self.directions = list(map(_shifted, self.params)), list(map(_shifted, self.directions))
        self.states = [new_state(layout, device) for layout in self.layouts]

    def step(self, kernel: Any, grads: Sequence[Tensor], *, maximize: bool = False, use: Use = "step") -> None:
        """Make one step, or the part of a step that is row by row before or after matrix products."""
        known: dict[object, Any] = {}
        jobs = [
            Job.of(layout, param, grad, state, HYPER, maximize=maximize, name=str(tuple(param.shape)), known=known)
            for layout, param, grad, state in zip(self.layouts, self.params, grads, self.states)
        ]
        if use == "step":
            kernel.run(jobs)
        elif use == "direction":
            kernel.rows(jobs).directions(jobs, self.directions)
        else:
            kernel.rows(jobs).move(jobs, self.directions)
        advance_ages(jobs)

    def buffers(self) -> dict[str, Tensor]:
        """Return everything that a step changes."""
        held = {f"{index}.param": param for index, param in enumerate(self.params)}
        held |= {f"{index}.direction": direction for index, direction in enumerate(self.directions)}
        for index, state in enumerate(self.states):
            held |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return held


class Difference(NamedTuple):
    """A tensor that differs more than promised."""

    buffer: str
    what: str
    largest: float  # of the absolute differences

    def __str__(self) -> str:
        return f"{self.buffer}: {self.what}"


def differences(expected: Trial, found: Trial, promised: Promise, start: Trial) -> list[Difference]:
    """Return what differs more than promised between two trials with the same start."""
    problems = []
    before, others = start.buffers(), found.buffers()
    for key, tensor in expected.buffers().items():
        held, other = tensor.cpu(), others[key].cpu()
        if torch.equal(other, held):
            continue
        apart = (other.double() - held.double()).abs().nan_to_num(nan=math.inf)
        what = None
        if promised == "bits":
            what = f"{int((apart > 0).sum())} of {held.numel()} elements differ"
        elif promised == "products" and key.endswith("param"):
            movement = (held.double() - before[key].double()).norm()
            if not apart.norm() <= _PRODUCTS_APART * movement:
                what = f"differs by {apart.norm() / movement:.1%} of its movement"
        elif held.is_floating_point():
            rounding = max(torch.finfo(held.dtype).eps, 1e-5)
            far = int((apart > 1e-6 + rounding * held.double().abs()).sum())
            if far > _CODES_APART * held.numel():
                what = f"{far} of {held.numel()} elements differ by more than rounding"
        elif apart.max() > 1 or (apart > 0).sum() > max(1, _CODES_APART * held.numel()):
            what = f"{int((apart > 0).sum())} of {held.numel()} codes differ"
        if what is not None:
            problems.append(Difference(key, what, float(apart.max())))
    return problems


class ExactRoots(TorchFunctionMode):
    """Rounds square roots on the CPU correctly; torch's may be off in the last bit.

    The double result has more than twice as many bits as needed, so rounding it again is exact.

    >>> with ExactRoots():
    ...     torch.tensor(2.0).sqrt()
    tensor(1.4142)
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.sqrt and args[0].device == _CPU:
            return args[0].double().sqrt().to(args[0].dtype)
        return function(*args, **(kwargs or {}))


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """Return a gradient over four orders of magnitude, in which every seventh element is zero."""
    grad = _normal(shape, step) * torch.logspace(-3, 1, shape[-1], dtype=torch.float32, device=_CPU)
    grad.view(-1)[step % 7 :: 7] = 0
    return grad


def _shifted(tensor: Tensor) -> Tensor:
    """Return a copy whose memory begins one element later than that of new tensors."""
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)


def _normal(shape: Iterable[int], seed: int) -> Tensor:
    generator = torch.Generator(device=_CPU).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device=_CPU)


def machine(device: torch.device) -> dict[str, str]:
    """Return the device and the versions to report."""
    import triton

    is_gpu = device.type == "cuda"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "none"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else f"{platform.processor() or 'cpu'}, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else cuda,
        "python": platform.python_version(),
    }

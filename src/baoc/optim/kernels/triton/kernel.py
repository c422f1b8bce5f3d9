"""``TritonKernel``: sorts the jobs of a step by family, writes their tables and launches them.

While jobs keep their dtypes, layouts and addresses, the tables of the last step are reused: a step then writes its
scalars and launches.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from baoc.core.codecs import Format
from baoc.core.configuration import Layout
from baoc.core.sharding import Place
from baoc.core.spec import Reach, Scalar
from baoc.optim.kernels import graphs
from baoc.optim.kernels.eager import EagerRows, run_matrices, sets_length
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton.families import ALIGNMENT, Family, Form, Use, Word, form_of
from baoc.optim.kernels.triton.tables import Numbers, Tables, Tiles

logger = logging.getLogger("baoc")

INTERPRETER = "TRITON_INTERPRET"
_INTERPRETED = Tiles(segments=64, tiles=1, blocks=2)  # in the interpreter a program takes milliseconds at any size
_MATRIX_TILE = 1 << 22  # elements per torch operation around matrix products
_CACHED = 256  # launch lists with their tables


def is_interpreted() -> bool:
    """Return whether Triton runs its code on the CPU, in its interpreter."""
    return os.environ.get(INTERPRETER, "0").lower() in ("1", "true", "yes", "on")


class _Other(Protocol):
    name: str

    def run(self, jobs: Iterable[Job]) -> bool: ...


class _Verifier(Protocol):  # baoc.optim.kernels.triton.verify.Verifier, which imports this module
    @property
    def mismatches(self) -> Sequence[Family]: ...

    def accepts(self, family: Family, job: Job, use: Use) -> bool: ...


class TritonKernel:
    """Updates parameters on a GPU; on a CPU it runs in Triton's interpreter, which is for tests.

    Args:
        device: The device of all tensors.
        other: Makes the kernel that updates what has no Triton code.
        tiles: How much of a tensor one program updates. Default: what suits the device.
        verifier: Compares a family with the eager update before its first use. Jobs of families that it does not accept
            are left to the other kernel. Default: all families are trusted.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        other: Callable[[], _Other],
        tiles: Tiles | None = None,
        verifier: _Verifier | None = None,
    ) -> None:
        from baoc.optim.kernels.triton.launch import launch

        self._launch, self._device, self._on_gpu = launch, device, device.type == "cuda"
        self._tiles = tiles or (_INTERPRETED if is_interpreted() else Tiles.on(64 if torch.version.hip else 32))
        self._own_memory = self._memory = LaunchMemory(device)
        self._captured: dict[tuple[int, int], list[LaunchMemory]] = {}  # by the jobs of the captured step
        self._flag: Tensor | None = None
        self._is_skipped: bool | None = None  # what the flag says; None: the host has not read it
        self._verifier = verifier
        self._verified_matrices: list[Layout] = []
        self._make_other = other
        self._other: _Other | None = None
        self._reported: set[str] = set()

    def run(self, jobs: Iterable[Job], flag: Tensor | None = None) -> bool:
        """Update the parameters of all jobs.

        Args:
            jobs: The jobs of one step.
            flag: A tensor on the device. If its first element is not zero, nothing is changed. The host reads it only
                if other kernels have a part in the step, since they cannot read it on the device.

        Returns:
            Whether some gradient may be non-finite: nothing here looks at them.
        """
        jobs = list(jobs)
        if graphs.is_replaying():
            self._write_for_replay(jobs)
            return False
        is_captured = graphs.is_capturing(self._device)
        # a graph keeps reading the addresses of its capture, so it needs memory of its own
        self._memory = LaunchMemory(self._device, cached=None) if is_captured else self._own_memory
        rows: list[Job] = []
        matrices: list[Job] = []
        for job in jobs:
            if job.layout.reach is not Reach.MATRIX:
                rows.append(job)
            elif job.place.numel(job.param):  # of the whole parameter: a shard without rows takes part in collectives
                job.refuse_freed()  # before anything has changed
                matrices.append(job)
        self._verify_matrices(matrices)
        self._memory.numbers.write(jobs)
        self._flag, self._is_skipped = flag, None
        left = [rows[index] for index in self.launch_jobs(rows, "step")]
        # all in one call, whichever kernel updates their rows: every rank must form the same batches
        run_matrices(matrices, _TritonRows(self))
        if left and self.allows_torch(left[0]):
            self._fallback().run(left)
        if is_captured:
            self._captured.setdefault(_key(jobs), []).append(self._memory)
        return True

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> _TritonRows:
        """Return the row-wise part of jobs with matrices. Call it after :meth:`run` of the same step."""
        self._memory, self._flag, self._is_skipped = self._own_memory, None, None
        self._memory.numbers.write(jobs)
        if spiked is not None:
            spiked.append(bool(jobs))
        return _TritonRows(self)

    def launch_jobs(self, jobs: Sequence[Job], use: Use, directions: Sequence[Tensor] = ()) -> Sequence[int]:
        """Launch jobs, all of a family at once.

        Args:
            jobs: Jobs whose scalars were written in this step.
            use: Which part of the update to launch.
            directions: One tensor per job: the output of ``"direction"``, or the input of ``"move"``.

        Returns:
            The indices of the jobs that have no Triton code, and were not launched.
        """
        if not jobs:
            return ()
        numbers = self._memory.numbers
        flag = numbers.never_skip if self._flag is None else self._flag
        rows = [numbers.row(job) for job in jobs]
        key = use, *_key(jobs)
        launches = self._memory.launches.get(key)
        if launches is None or not launches.is_current(jobs, rows, directions):
            launches = self._make_launches(jobs, use, rows, directions, launches)
        self._memory.cache(key, launches)
        with torch.cuda.device(self._device) if self._on_gpu else nullcontext():  # triton launches on the current one
            for family, tables in launches.families:
                self._launch(family, tables, numbers.tensor, flag, self._tiles)
        if use != "direction":
            torch.autograd.graph.increment_version([jobs[index].param for index in launches.launched])
        return launches.left

    def device_scalars(self, job: Job) -> dict[str, Scalar]:
        """Return the scalars of a job that are in the table of numbers, as tensors that read it."""
        return self._memory.numbers.scalars(job)

    @contextmanager
    def unless_skipped(self, jobs: Sequence[Job], chosen: Callable[[Format], bool]) -> Iterator[None]:
        """Undo what torch operations do to chosen slots if the flag says so. The host does not read the flag."""
        formats = [(job, stored) for job in jobs for stored in job.layout.formats if chosen(stored)]
        held = [tensor for job, stored in formats for tensor in stored.held_in(job.held).values()]
        before = [] if self._flag is None else [tensor.clone() for tensor in held]
        yield
        for tensor, old in zip(held, before):
            tensor.copy_(torch.where(cast(Tensor, self._flag)[0] != 0, old, tensor))

    def allows_torch(self, job: Job) -> bool:
        """Return whether torch operations may update a job in this step.

        The host waits for the flag of the step here, once per step.

        Raises:
            RuntimeError: The step is being captured.
        """
        if graphs.is_capturing(self._device):
            raise RuntimeError(
                f"parameter {job.name!r} cannot be updated in a CUDA graph: {job.layout.configuration} needs other "
                "operations than Triton's, and the graph would repeat the scalars of this step."
            )
        if self._is_skipped is None:
            self._is_skipped = self._flag is not None and bool(self._flag[0])
        return not self._is_skipped

    @property
    def left_out(self) -> str:
        """The families that this kernel does not update because they do not match the eager update, as text."""
        mismatches = () if self._verifier is None else self._verifier.mismatches
        listed = "; ".join(map(str, mismatches))
        return f", but another kernel updates what does not match the eager update here: {listed}" if listed else ""

    def _make_launches(
        self,
        jobs: Sequence[Job],
        use: Use,
        rows: Sequence[int],
        directions: Sequence[Tensor],
        last: Launches | None,
    ) -> Launches:
        """Write the tables of jobs. Forms and tables of the last launches are reused as far as they still hold."""
        before: Sequence[JobSignature | None] = [None] * len(jobs) if last is None else last.signatures
        written: dict[Family, Tables] = {} if last is None else dict(last.families)
        left: list[int] = []
        launched: list[int] = []
        signatures: list[JobSignature] = []
        families: dict[Family, list[tuple[Form, list[int]]]] = {}
        for index, job in enumerate(jobs):
            signature = JobSignature.of(job, use, directions[index] if directions else None, before[index])
            signatures.append(signature)
            form = signature.form
            if not all(signature.addresses):
                job.refuse_freed()
            if isinstance(form, str):
                left.append(index)
                self._report(job, form, self._name_of_other(use))
            elif job.param.numel():
                words = _words(job, signature, form, use, rows[index])
                family = form.family
                if family.aligned and any(word % ALIGNMENT for word in words[: Word.ROW_PARTS]):
                    family = family._replace(aligned=False)
                if self._verifier is None or self._verifier.accepts(family, job, use):
                    launched.append(index)
                    families.setdefault(family, []).append((form, words))
                else:
                    left.append(index)
                    self._report(job, f"{family} that matches the eager update here", self._name_of_other(use))
        launches = []
        for family, members in families.items():
            tables = written.get(family) or Tables(family, self._device, self._tiles)
            tables.write([form for form, _ in members], [words for _, words in members])
            launches.append((family, tables))
        return Launches(signatures, rows, launched, left, launches)

    def _write_for_replay(self, jobs: Sequence[Job]) -> None:
        captured = self._captured.get(_key(jobs))
        if captured is None:
            raise RuntimeError(
                f"no step of these {len(jobs)} parameters was captured. Capture one with torch.cuda.graph(...), and "
                "give the same parameters gradients in every later step."
            )
        for memory in captured:
            memory.write_for_replay(jobs)

    def _verify_matrices(self, jobs: Sequence[Job]) -> None:
        """Verify the families of matrices before anything has changed: they are launched after all other jobs."""
        layouts = [job.layout for job in jobs]
        if self._verifier is None or layouts == self._verified_matrices:
            return
        # directions lie one after the other, so a matrix of odd size may misalign those that follow
        is_odd = any(job.param.numel() % (ALIGNMENT // 4) for job in jobs)
        uses: tuple[Use, ...] = ("direction", "move")
        for job, use in itertools.product(jobs, uses):
            form = form_of(job, use)
            if isinstance(form, Form) and job.param.numel():
                for aligned in {form.family.aligned, form.family.aligned and not is_odd}:
                    self._verifier.accepts(form.family._replace(aligned=aligned), job, use)
        self._verified_matrices = layouts

    def _name_of_other(self, use: Use) -> str:
        return self._fallback().name if use == "step" else "eager"

    def _fallback(self) -> _Other:
        if self._other is None:
            self._other = self._make_other()
        return self._other

    def _report(self, job: Job, reason: str, other: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            logger.info("the %s kernel updates %r: there is no Triton code for %s", other, job.name, reason)


class JobSignature(NamedTuple):
    """Everything of a job that its table row depends on. It holds no tensors, so gradients can be freed."""

    layout: Layout
    place: Place
    kinds: tuple[object, ...]  # types, dtypes and strides, as far as they matter
    form: Form | str
    keys: tuple[str, ...]  # of the buffers
    addresses: list[int]  # of the parameter, the gradient and the buffers
    direction: int  # its address, or 0

    @classmethod
    def of(cls, job: Job, use: Use, direction: Tensor | None, last: JobSignature | None) -> JobSignature:
        """Make the signature of a job, with the form of the last signature if that still holds."""
        address = 0 if direction is None else direction.data_ptr()
        if last is not None and last.has_form_of(job):
            return last._replace(addresses=_addresses(job, last.keys), direction=address)
        form = form_of(job, use)
        pairs = form.buffers if isinstance(form, Form) else [pair for each in job.layout.formats for pair in each.keys]
        keys = tuple(key for _, key in pairs)
        return cls(job.layout, job.place, _kinds(job, keys), form, keys, _addresses(job, keys), address)

    def has_form_of(self, job: Job) -> bool:
        """Return whether a job has the same form, at any address."""
        return job.layout is self.layout and job.place is self.place and _kinds(job, self.keys) == self.kinds

    def is_current(self, job: Job) -> bool:
        """Return whether a job, apart from its direction and its scalars, is unchanged."""
        return self.has_form_of(job) and _addresses(job, self.keys) == self.addresses


class Launches(NamedTuple):
    """The launches for a list of jobs."""

    signatures: Sequence[JobSignature]
    rows: Sequence[int]  # of the table of numbers
    launched: Sequence[int]  # indices of jobs with elements to update
    left: Sequence[int]  # indices of jobs without Triton code
    families: Sequence[tuple[Family, Tables]]

    def is_current(self, jobs: Sequence[Job], rows: Sequence[int], directions: Sequence[Tensor]) -> bool:
        """Return whether these launches serve a list of as many jobs."""
        return (
            rows == self.rows
            and all(signature.is_current(job) for signature, job in zip(self.signatures, jobs))
            and all(each.direction == direction.data_ptr() for each, direction in zip(self.signatures, directions))
        )


class LaunchMemory:
    """The device memory that launches read, with the launches themselves.

    Args:
        device: The device of all tensors.
        cached: How many launches to keep; ``None`` keeps all, for a captured graph.
    """

    def __init__(self, device: torch.device, cached: int | None = _CACHED) -> None:
        self.numbers = Numbers(device)
        self.launches: OrderedDict[tuple[Use, int, int], Launches] = OrderedDict()
        self._cached = cached

    def cache(self, key: tuple[Use, int, int], launches: Launches) -> None:
        """Keep launches, and drop those that have not been used for the longest time."""
        self.launches[key] = launches
        self.launches.move_to_end(key)
        if self._cached is not None and len(self.launches) > self._cached:
            self.launches.popitem(last=False)

    def write_for_replay(self, jobs: Sequence[Job]) -> None:
        """Write the scalars of a step that a graph makes, and the first time also what its capture postponed."""
        self.numbers.write_for_replay(jobs)
        for launches in self.launches.values():
            for _, tables in launches.families:
                tables.flush()


class _TritonRows(EagerRows):
    """The row-wise part of matrices: momentum before their products, and the parameter's move after them."""

    def __init__(self, kernel: TritonKernel) -> None:
        super().__init__(_MATRIX_TILE)
        self._kernel = kernel

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        left = self._kernel.launch_jobs(jobs, "direction", out)
        if left and self._kernel.allows_torch(jobs[left[0]]):
            super().directions([jobs[index] for index in left], [out[index] for index in left])

    def adapt(self, jobs: Sequence[Job], finished: Sequence[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
        adapts = any(stored.slot.of_direction for job in jobs for stored in job.layout.formats)
        if adapts:
            return super().adapt(jobs, finished, squares) if self._kernel.allows_torch(jobs[0]) else list(finished)
        return self.lengthen(jobs, list(finished), squares) if sets_length(jobs[0]) else list(finished)

    def lengthen(self, jobs: Sequence[Job], directions: list[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
        """Do it with scalars on the device, so that a captured graph reads those of its own step."""
        on_device = [job._replace(scalars=self._kernel.device_scalars(job), memo=None) for job in jobs]
        with self._kernel.unless_skipped(jobs, lambda stored: stored.slot.sets_length):
            return super().lengthen(on_device, directions, squares)

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        left = self._kernel.launch_jobs(jobs, "move", directions)
        if left and self._kernel.allows_torch(jobs[left[0]]):
            super().move([jobs[index] for index in left], [directions[index] for index in left])


def _key(jobs: Sequence[Job]) -> tuple[int, int]:
    """Identify a list of jobs by its length and the address of its first parameter."""
    return len(jobs), jobs[0].param.data_ptr() if jobs else 0


def _words(job: Job, signature: JobSignature, form: Form, use: Use, row: int) -> list[int]:
    words = [0] * len(Word)
    words[Word.PARAM], words[Word.GRAD], *held = signature.addresses
    for (word, _), address in zip(form.buffers, held):
        words[word] = address
    if signature.direction:
        words[Word.PARAM if use == "direction" else Word.M] = signature.direction
    words[Word.NUMBERS] = row
    words[Word.FIRST_ELEMENT] = job.place.first_row * (job.param.numel() // max(1, job.param.shape[0]))
    return words


def _addresses(job: Job, keys: Sequence[str]) -> list[int]:
    held = job.held
    return [job.param.data_ptr(), job.grad.data_ptr(), *[held[key].data_ptr() for key in keys]]


def _kinds(job: Job, keys: Sequence[str]) -> tuple[object, ...]:
    param, grad, held = job.param, job.grad, job.held
    return (
        type(param), param.dtype, param.is_contiguous(), param.is_neg(),
        type(grad), grad.dtype, grad.is_contiguous(), grad.is_neg(),
        *[held[key].is_contiguous() for key in keys],
    )  # fmt: skip

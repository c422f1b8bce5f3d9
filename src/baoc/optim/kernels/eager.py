"""The reference kernel: plain torch operations, one tile of rows at a time, and whole matrices in batches.

A tile bounds the temporaries: no fp32 copy of a whole low-precision state is ever made. Rows that are longer than a
tile are cut, but for update rules and codecs that need sums over a row, which for a stack is a matrix. Updates that
need whole matrices hold the directions of one batch of them: equal shapes are finished together, which is what matrix
products like. A batch and all that is made of it on the way has at most ``BATCH_NUMEL`` elements, or is one matrix. A
larger stack of matrices is cut. ``Plan.workspace_bytes`` counts on that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from baoc.core.mechanisms.newton_schulz import aligned
from baoc.core.roles import as_matrices, matrix_shape
from baoc.core.sharding import Ranks
from baoc.core.spec import BATCH_NUMEL, Reach
from baoc.core.splits import finish, scratch_numel, workspace
from baoc.optim.kernels.job import Job, matrices_of, rows_of, stretches_of, whole
from baoc.optim.kernels.update import Update, row_tiles

# ---- whole matrices ----


class Rows(Protocol):
    """What is done row by row, before matrices are finished and after."""

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        """Advance the state of jobs and write their directions, which start as zeros."""

    def adapt(self, jobs: Sequence[Job], finished: Sequence[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
        """What slots of whole matrices make of finished directions, once they have taken them in.

        ``squares`` has the mean square of each matrix of each job before it was finished, of the rows here.
        """

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        """Move the parameters of jobs."""


class EagerRows:
    """In torch operations, a tile at a time."""

    def __init__(self, tile_numel: int) -> None:
        self._tile_numel = tile_numel

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        for job, direction in zip(jobs, out):
            for part, cut in stretches_of(job, self._tile_numel):
                update, tiles = Update(part), row_tiles(part.param.shape, self._tile_numel)
                update.absorb(tiles)
                for rows in tiles:
                    cut(direction)[rows] = update.direction(rows)

    def adapt(self, jobs: Sequence[Job], finished: Sequence[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
        if any(stored.slot.of_direction for stored in jobs[0].layout.formats):
            for job, direction in zip(jobs, finished):
                for part, cut in matrices_of(job) if _is_stack(job) else [(job, whole)]:
                    Update(part).adapt(cut(direction), row_tiles(part.param.shape, self._tile_numel))
        return self.lengthen(jobs, list(finished), squares) if sets_length(jobs[0]) else list(finished)

    def lengthen(self, jobs: Sequence[Job], directions: list[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
        """Advance the slots that set lengths, and scale directions by what they say."""
        updates = [Update(job) for job in jobs]
        partials = [self.square_partial(job, update) for job, update in zip(jobs, updates)]
        ranks = _spread_over(jobs[0])
        if ranks is not None:  # in one message for all of them
            sent = [each for each in (*partials, *squares) if each is not None]
            summed = ranks.sum(torch.cat(sent)).split_with_sizes([each.numel() for each in sent])
            partials, squares = list(summed[: len(jobs)]), summed[len(jobs) :]
        for update, partial, square, direction in zip(updates, partials, squares, directions):
            direction.mul_(update.length(partial, square))
        return directions

    def square_partial(self, job: Job, update: Update) -> Tensor | None:
        return update.square_partial(row_tiles(job.param.shape, self._tile_numel))

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        for job, direction in zip(jobs, directions):
            for part, cut in stretches_of(job, self._tile_numel):
                update = Update(part)
                for rows in row_tiles(part.param.shape, self._tile_numel):
                    update.move(rows, cut(direction)[rows], job.scalars["step"])


def run_matrices(jobs: Iterable[Job], by_rows: Rows) -> None:
    """Run jobs whose mechanism reaches over matrices."""
    found = list(batches(jobs))
    owners = _owners(found)
    # one piece of memory for all of them: allocators do not give back what batches of many sizes leave between them
    needed: dict[torch.device, int] = {}
    for batch, each in zip(found, owners):
        device = batch[0].param.device
        needed[device] = max(needed.get(device, 0), _held(batch, each))
    memory = {device: torch.empty(numel, dtype=torch.float32, device=device) for device, numel in needed.items()}
    for batch, each in zip(found, owners):
        _run_batch(batch, each, by_rows, memory[batch[0].param.device])


def _run_batch(batch: Sequence[Job], owners: Owners | None, by_rows: Rows, memory: Tensor) -> None:
    sizes = [job.param.numel() for job in batch]
    flat, scratch = memory[: sum(sizes)].zero_(), memory[aligned(sum(sizes)) :]
    by_rows.directions(batch, _as_rows(flat, batch))
    squares = _mean_squares(flat, batch) if sets_length(batch[0]) else ()
    layout, scalars = batch[0].layout, batch[0].scalars
    stacked = flat.view(-1, *as_matrices(layout.shape)[1:]) if owners is None else owners.gather(flat)
    finished = finish(layout.mechanism, batch[0].split, stacked, scratch, scalars) if len(stacked) else stacked
    finished = finished.reshape(-1) if owners is None else owners.scatter(finished)
    by_rows.move(batch, by_rows.adapt(batch, _as_rows(finished, batch), squares))


def sets_length(job: Job) -> bool:
    """Whether a slot sets the length of a job's updates."""
    return any(stored.slot.sets_length for stored in job.layout.formats)


def _mean_squares(flat: Tensor, batch: Sequence[Job]) -> list[Tensor]:
    """The mean square of each matrix of each job; of a matrix that is spread over ranks, what its rows here add."""
    _, rows, cols = as_matrices(batch[0].layout.shape)
    if _spread_over(batch[0]) is None:
        norms = torch.linalg.vector_norm(flat.view(-1, rows * cols), dim=1)
        means = norms.square() / (rows * cols)
        return list(means.split_with_sizes([as_matrices(tuple(job.param.shape))[0] for job in batch]))
    parts = flat.split_with_sizes([job.param.numel() for job in batch])
    return [torch.linalg.vector_norm(part).square().view(1) / (rows * cols) for part in parts]


def _as_rows(flat: Tensor, batch: Sequence[Job]) -> list[Tensor]:
    parts = flat.split_with_sizes([job.param.numel() for job in batch])
    return [part.view(job.param.shape) for part, job in zip(parts, batch)]


def _owners(found: Sequence[Sequence[Job]]) -> list[Owners | None]:
    """Of every batch whose matrices are spread over ranks."""
    owners: list[Owners | None] = []
    turn = 0
    for batch in found:
        ranks = _spread_over(batch[0])
        rows, cols = as_matrices(batch[0].layout.shape)[1:]
        owners.append(None if ranks is None else Owners(ranks, (len(batch), rows, cols), turn))
        turn += len(batch)
    return owners


def _spread_over(job: Job) -> Ranks | None:
    """The ranks that have rows of each of its matrices; a stack is cut between them."""
    return None if _is_stack(job) else job.place.ranks


def batches(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Jobs that can be finished together: one mechanism, one step's numbers, matrices of one shape."""
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in itertools.chain.from_iterable(map(_parts, jobs)):
        # not the local shape: every rank must make the same batches
        shape = as_matrices(job.layout.shape)[1:]
        key = job.layout.mechanism.name, id(job.scalars), job.param.device, shape, job.split, _spread_over(job)
        alike.setdefault(key, []).append(job)
    for group in alike.values():
        batch: list[Job] = []
        for job in group:
            if batch and sum(map(_workspace, (*batch, job))) > BATCH_NUMEL:
                yield batch
                batch = []
            batch.append(job)
        yield batch


def _parts(job: Job) -> Iterator[Job]:
    """Cut a stack that is too large for a batch. Its matrices are whole on this rank, so ranks may cut differently."""
    if not _is_stack(job) or _workspace(job) <= BATCH_NUMEL:
        yield job
        return
    matrices = max(1, BATCH_NUMEL * len(job.param) // _workspace(job))
    for start in range(0, len(job.param), matrices):
        yield rows_of(job, slice(start, min(start + matrices, len(job.param))))


def _held(batch: Sequence[Job], owners: Owners | None) -> int:
    """Elements of memory that a batch takes: its directions', and the scratch of the matrices finished here."""
    _, rows, cols = as_matrices(batch[0].layout.shape)
    here = sum(as_matrices(tuple(job.param.shape))[0] for job in batch) if owners is None else owners.mine
    return aligned(sum(job.param.numel() for job in batch)) + scratch_numel(
        batch[0].layout.mechanism, batch[0].split, here, rows, cols
    )


def _workspace(job: Job) -> int:
    """Elements that a job's matrices need, or this rank's share of them."""
    _, rows, cols = as_matrices(job.layout.shape)
    each, ranks = workspace(job.layout.mechanism, job.split, rows, cols), job.place.ranks
    return each * len(job.param) if _is_stack(job) else each // (1 if ranks is None else ranks.size)


def _is_stack(job: Job) -> bool:
    return len(matrix_shape(job.layout.shape)) > 2


class Owners:
    """Who owns which matrices of a batch, all of one shape: runs of them in order, of equal length but for one.

    Args:
        ranks: that have the rows.
        shape: of the batch, ``(matrices, rows, cols)``.
        turn: the rank that gets the first matrix where they do not come out even, so that it is not always the same.
    """

    def __init__(self, ranks: Ranks, shape: tuple[int, int, int], turn: int) -> None:
        matrices, height, self._width = shape
        each, over = divmod(matrices, ranks.size)
        self._counts = [each + ((rank - turn) % ranks.size < over) for rank in range(ranks.size)]
        self._heights = [rows.stop - rows.start for rows in (ranks.rows(height, rank) for rank in range(ranks.size))]
        self._ranks = ranks

    @property
    def mine(self) -> int:
        """How many matrices this rank owns."""
        return self._counts[self._ranks.rank]

    def gather(self, parts: Tensor) -> Tensor:
        """From this rank's rows of all matrices, flat, to the matrices that it owns: ``(mine, rows, cols)``."""
        received = self._ranks.exchange(parts, self._sent, self._received)
        pieces = zip(received.split_with_sizes(self._received), self._heights)
        return torch.cat([piece.view(self.mine, height, self._width) for piece, height in pieces], 1)

    def scatter(self, owned: Tensor) -> Tensor:
        """And back."""
        sent = owned.new_empty(owned.numel())
        for part, piece in zip(sent.split_with_sizes(self._received), owned.split_with_sizes(self._heights, 1)):
            part.view(piece.shape).copy_(piece)
        return self._ranks.exchange(sent, self._received, self._sent)

    @property
    def _sent(self) -> Sequence[int]:
        """Elements of the rows here that go to each rank."""
        return [count * self._heights[self._ranks.rank] * self._width for count in self._counts]

    @property
    def _received(self) -> Sequence[int]:
        """Elements that come from each."""
        return [self.mine * height * self._width for height in self._heights]


# ---- the kernel ----

TILE_NUMEL = 1 << 16  # 256 KiB of fp32 per temporary: stays in a core's L2 cache


class EagerKernel:
    name = "eager"

    def run(self, jobs: Iterable[Job]) -> bool:
        jobs, matrices, sums = list(jobs), [], []
        for job in jobs:
            job.refuse_freed()
        for job in jobs:
            if job.place.numel(job.param) == 0:  # the whole of it: a shard without rows is asked by the others
                continue
            if job.layout.reach is Reach.MATRIX:
                matrices.append(job)
            elif job.layout.reach is Reach.SUMS and job.place.ranks is not None:
                sums.append(job)
            elif job.layout.reach is Reach.SUMS:
                Update(job).run(row_tiles(job.param.shape, TILE_NUMEL))
            else:
                for part, _ in stretches_of(job, TILE_NUMEL):
                    Update(part).run(row_tiles(part.param.shape, TILE_NUMEL))
        _run_shards(sums)
        run_matrices(matrices, self.rows(matrices))
        return True

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> EagerRows:
        """What goes row by row of jobs with matrices. ``spiked``: see :meth:`Kernel.rows`."""
        if spiked is not None:
            spiked.append(bool(jobs))
        return EagerRows(TILE_NUMEL)


def _run_shards(jobs: Sequence[Job]) -> None:
    """Jobs that need sums over ranks: those that their state keeps go in one message for all of them."""
    updates = [(Update(job), row_tiles(job.param.shape, TILE_NUMEL)) for job in jobs]
    partials = [update.partials(tiles) for update, tiles in updates]
    by_ranks: dict[Ranks, list[Tensor]] = {}
    for job, mine in zip(jobs, partials):
        by_ranks.setdefault(cast(Ranks, job.place.ranks), []).extend(each for each in mine if each is not None)
    for ranks, found in by_ranks.items():
        if found:
            summed = ranks.sum(torch.cat([each.reshape(-1) for each in found]))
            for each, total in zip(found, summed.split_with_sizes([each.numel() for each in found])):
                each.copy_(total.view(each.shape))
    for (update, tiles), mine in zip(updates, partials):
        update.finish_sums(mine)
        update.advance(tiles)

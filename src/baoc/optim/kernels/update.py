"""One parameter's update, written once. The eager kernel runs it tile by tile; the compiled one on larger pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from baoc.core.codecs import MatrixMeanFormat, SummedFormat
from baoc.core.codecs.weights import PARAM
from baoc.core.roles import matrix_shape
from baoc.core.rounding import Rounding
from baoc.core.spec import FP32_TINY, SPIKE, WEIGHT, Reach, Scalar
from baoc.optim.kernels.job import Job

_PART_NUMEL = 1 << 16  # as many numbers of a matrix are squared at a time


class Update:
    """Reads and writes the rows of one parameter, its gradient and its state."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._param, self._scalars = job.param.detach(), job.scalars
        self._mechanism = job.layout.mechanism
        self._held = {each.slot.name: each.held_in(job.held) for each in job.layout.formats}
        self._formats = [each for each in job.layout.formats if each.slot.is_average]
        self._low_bits = next((each for each in job.layout.formats if each.slot.of_weight), None)

    def run(self, tiles: Sequence[slice]) -> None:
        """Advance the state and the parameter in place, touching one tile of rows (dim 0) at a time."""
        self.absorb(tiles)
        self.advance(tiles)

    def advance(self, tiles: Sequence[slice]) -> None:
        """All but what :meth:`absorb` has done."""
        step: Scalar = self._scalars["step"]
        balance = None
        if self._mechanism.norms:
            balance = Balance(self._mechanism.norms, self._job, self._peek)
            balance.fit(tiles)
        elif self._mechanism.reach is Reach.SUMS:
            step = step * self._step_factor(tiles)
        for rows in tiles:
            grad = self._grad(rows)
            direction = self.direction(rows, grad)
            self.move(rows, direction if balance is None else balance.scaled(rows, direction), step, grad)

    def absorb(self, tiles: Sequence[slice]) -> None:
        """Take the gradient into the slots that keep sums over all rows."""
        place = self._job.place
        self.finish_sums([None if partial is None else place.sum(partial) for partial in self.partials(tiles)])

    def partials(self, tiles: Sequence[slice]) -> list[Tensor | None]:
        """The first half of :meth:`absorb`: what of the rows here goes into sums, for each slot that keeps some."""
        return [self._partial(stored, tiles, lambda rows: self._clean(self._grad(rows))) for stored in self._summed]

    def finish_sums(self, sums: Sequence[Tensor | None]) -> None:
        """The second half, given the sums over all rows."""
        for stored, total in zip(self._summed, sums):
            self._finish(stored, total)

    @property
    def _summed(self) -> list[SummedFormat]:
        return [stored for stored in self._formats if isinstance(stored, SummedFormat)]

    def adapt(self, finished: Tensor, tiles: Sequence[slice]) -> Tensor:
        """Take a finished direction into the slots that remember those; what they make of it."""
        formats = self._job.layout.formats
        stored = [each for each in formats if each.slot.of_direction and isinstance(each, SummedFormat)]
        for each in stored:
            partial = self._partial(each, tiles, lambda rows: finished[rows])
            self._finish(each, None if partial is None else self._job.place.sum(partial))
        for rows in tiles if stored else ():
            slots = {each.slot.name: self._expanded(each, rows) for each in stored}
            finished[rows] = self._mechanism.adapt(finished[rows], slots, self._scalars)
        return finished

    def square_partial(self, tiles: Sequence[slice]) -> Tensor | None:
        """What of the rows here goes into the slot that sets the length of matrices, before sums over ranks."""
        stored = self._length_format
        if len(stored.matrix) == 2:
            return self._partial(stored, tiles, lambda rows: self._clean(self._grad(rows)))
        keep, add, rounding = self._blending(stored)
        for rows in tiles:
            stored.absorb(self._held[stored.slot.name], rows, self._mean_squares(rows), keep, add, rounding, None)
        return None

    def _mean_squares(self, rows: slice) -> Tensor:
        """The mean of what that slot sees of each matrix of a stack, ``(rows, 1)``, part by part: they may be large."""
        name, (height, *rest) = self._length_format.slot.name, self._param.shape[1:]
        sums = torch.zeros(rows.stop - rows.start, 1, dtype=torch.float32, device=self._param.device)
        for part in row_tiles((height, len(sums), *rest), _PART_NUMEL):
            sums += self._mechanism.observe(name, self._clean(self._grad((rows, part)))).flatten(1).sum(1, keepdim=True)
        return sums / max(1, self._param[0].numel())

    def length(self, square: Tensor | None, direction_square: Tensor) -> Tensor:
        """Finish that slot; the factor on the updates of matrices, in a shape that broadcasts over the rows.

        Args:
            square: the sum of what :meth:`square_partial` returned on all ranks.
            direction_square: the mean square of the direction of each matrix.
        """
        stored = self._length_format
        self._finish(stored, square)
        means = stored.by_matrix(self._held[stored.slot.name])
        return self._mechanism.length(direction_square.view(means.shape), {stored.slot.name: means}, self._scalars)

    @property
    def _length_format(self) -> MatrixMeanFormat:
        return next(each for each in self._job.layout.formats if isinstance(each, MatrixMeanFormat))

    def direction(self, rows: slice, grad: Tensor | None = None) -> Tensor:
        """Advance and store the other slots; the update before the step length."""
        clean = self._clean(self._grad(rows) if grad is None else grad)
        slots = self._advanced(rows, clean)
        direction = self._mechanism.direction(clean, slots, self._scalars)
        self._store(rows, clean, slots)
        return direction

    def _peek(self, rows: slice) -> Tensor:
        """The direction, of which nothing is stored."""
        clean = self._clean(self._grad(rows))
        return self._mechanism.direction(clean, self._advanced(rows, clean), self._scalars)

    def move(self, rows: slice, direction: Tensor, step: Scalar, grad: Tensor | None = None) -> None:
        """Move the parameter."""
        if self._job.layout.shares:
            # what was left out of the state still shows: a gradient that is no number makes its element none
            grad = self._grad(rows) if grad is None else grad
            direction = direction + (grad - grad)
        moved = self._weight(rows) * self._scalars["shrink"] - direction * step
        if self._low_bits is None:
            self._param[rows].copy_(moved)
            return
        rounding = Rounding(self._job.phases[WEIGHT.name], first_row=self._job.place.first_row)
        self._low_bits.encode(self._weight_parts, rows, moved, rounding)

    def _weight(self, rows: slice | tuple[slice, slice]) -> Tensor:
        """fp32 rows of the parameter, joined with its low bits if they are kept."""
        if self._low_bits is None:
            return self._param[rows].float()
        return self._low_bits.decode(self._weight_parts, rows)  # type: ignore[arg-type]

    @property
    def _weight_parts(self) -> dict[str, Tensor]:
        return {**self._held[WEIGHT.name], PARAM: self._param}

    def _grad(self, rows: slice | tuple[slice, slice]) -> Tensor:
        """fp32 gradient to descend on, with L2 decay if the mechanism's decay is coupled."""
        grad = self._job.grad.detach()[rows].float()
        grad = -grad if self._job.maximize else grad
        if self._mechanism.decoupled:
            return grad
        return grad + self._weight(rows) * self._scalars["coupled_decay"]

    def _clean(self, grad: Tensor) -> Tensor:
        """The gradient without spikes, where one element's would become its neighbours' trouble."""
        return torch.where(grad.abs() < SPIKE, grad, 0.0) if self._job.layout.shares else grad

    def _partial(self, stored: SummedFormat, tiles: Sequence[slice], seen: Callable[[slice], Tensor]) -> Tensor | None:
        keep, add, rounding = self._blending(stored)
        name, partial = stored.slot.name, None
        if self._job.place.ranks is not None:
            tiles = tiles or [slice(0, 0)]  # a shard without rows has a part in the sum all the same
        for rows in tiles:
            observed = self._mechanism.observe(name, seen(rows))
            partial = stored.absorb(self._held[name], rows, observed, keep, add, rounding, partial)
        return partial

    def _finish(self, stored: SummedFormat, total: Tensor | None) -> None:
        keep, add, rounding = self._blending(stored)
        stored.finish(self._held[stored.slot.name], keep, add, rounding, total)

    def _blending(self, stored: SummedFormat) -> tuple[Scalar, Scalar, Rounding]:
        name = stored.slot.name
        rounding = Rounding(self._job.phases[name], first_row=self._job.place.first_row)
        return self._scalars[f"{name}.keep"], self._scalars[f"{name}.add"], rounding

    def _advanced(self, rows: slice, grad: Tensor) -> dict[str, Tensor]:
        """Every slot's new value, before it is rounded into its format."""
        slots = {}
        for stored in self._formats:
            name = stored.slot.name
            if isinstance(stored, SummedFormat):  # has absorbed the gradient already
                slots[name] = self._expanded(stored, rows)
            else:
                value = stored.decode(self._held[name], rows)
                observed = self._mechanism.observe(name, grad)
                slots[name] = value * self._scalars[f"{name}.keep"] + observed * self._scalars[f"{name}.add"]
        return slots

    def _expanded(self, stored: SummedFormat, rows: slice) -> Tensor:
        name = stored.slot.name
        return stored.expand(self._held[name], rows, self._scalars[f"{name}.mean_floor"])

    def _store(self, rows: slice, grad: Tensor, slots: Mapping[str, Tensor]) -> None:
        """Store the slots that do not keep sums. See :class:`~baoc.core.rounding.Rounding` for idle elements."""
        stored = [each for each in self._formats if not isinstance(each, SummedFormat)]
        idle = grad == 0 if any(each.rounds for each in stored) else None
        for each in stored:
            name = each.slot.name
            resting = idle if each.slot.signed else None
            layout, first_row = self._job.layout, self._job.place.first_row
            rounding = Rounding(self._job.phases[name], resting, first_row, layout.idle_shift)
            each.encode(self._held[name], rows, slots[name], rounding)

    def _step_factor(self, tiles: Sequence[slice]) -> Tensor:
        """From the RMS of the whole direction and of the parameter, before either has changed."""
        squares = torch.zeros(2, dtype=torch.float32, device=self._param.device)
        for rows in tiles:
            direction = self._peek(rows)
            # an element that is lost already must not take the others with it
            param = self._weight(rows).nan_to_num(0.0, 0.0, 0.0)
            squares = squares + torch.stack((direction.square().sum(), param.square().sum()))
        place = self._job.place
        direction_rms, param_rms = (place.sum(squares) / place.numel(self._param)).sqrt()
        return self._mechanism.step_factor(direction_rms, param_rms, self._scalars)


class Balance:
    """One factor for each row and each column of the matrices that a parameter is, found in turns (Sinkhorn).

    Args:
        norms: "row" and "col", in the order of the turns.
        peek: the direction of some rows of the parameter.
    """

    def __init__(self, norms: Sequence[str], job: Job, peek: Callable[[slice], Tensor]) -> None:
        self._norms, self._peek, self._place = norms, peek, job.place
        self._matrix = matrix_shape(job.layout.shape)  # (rows, cols) or (stacks, rows, cols)
        lines = job.param.shape[0]
        ones = job.param.new_ones(1, dtype=torch.float32)
        self._is_stack = len(self._matrix) > 2
        self._row = ones.expand(lines, *self._matrix[1:-1], 1).clone()  # (rows, 1) or (stacks, rows, 1)
        cols = (lines, 1, self._matrix[-1]) if self._is_stack else (1, self._matrix[-1])
        self._col = ones.expand(cols).clone()

    def fit(self, tiles: Sequence[slice]) -> None:
        """Find the factors."""
        for norm in self._norms:
            if norm == "row":
                for rows in tiles:
                    self._row[rows] = _inverse_root(self._squares(rows, self._cols(rows)).mean(-1, keepdim=True))
            elif self._is_stack:
                for rows in tiles:
                    self._col[rows] = _inverse_root(self._squares(rows, self._row[rows]).mean(-2, keepdim=True))
            else:
                partial = torch.zeros_like(self._col)
                for rows in tiles:
                    partial += self._squares(rows, self._row[rows]).sum(0, keepdim=True) / self._matrix[0]
                self._col = _inverse_root(self._place.sum(partial))

    def scaled(self, rows: slice, direction: Tensor) -> Tensor:
        """Rows of the direction with their factors."""
        flat = direction.reshape(-1, *self._matrix[1:])
        return (flat * self._row[rows] * self._cols(rows)).view(direction.shape)

    def _squares(self, rows: slice, factor: Tensor) -> Tensor:
        return (self._peek(rows).reshape(-1, *self._matrix[1:]) * factor).square()

    def _cols(self, rows: slice) -> Tensor:
        return self._col[rows] if self._is_stack else self._col


def _inverse_root(mean_square: Tensor) -> Tensor:
    return mean_square.clamp(min=FP32_TINY).rsqrt()


def row_tiles(shape: torch.Size | Sequence[int], tile_numel: int) -> list[slice]:
    """Cut dim 0 into slices of at most ``tile_numel`` elements, or one row.

    >>> row_tiles((5, 10), 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = shape[0]
    row_numel = max(1, torch.Size(shape[1:]).numel())
    height = max(1, tile_numel // row_numel)
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]

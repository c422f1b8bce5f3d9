"""Splits: parameters that are several matrices side by side, such as queries, keys and values in one weight.

Update rules that work on whole matrices treat each matrix by itself. The state does not change: it is that of the whole
parameter. Rules that work on elements, rows or columns do not see splits.

Example:
    >>> fused = Split((64, 16, 16))  # grouped-query attention: queries, then fewer keys and values
    >>> fused.pieces(96, 32)
    ((64, 32), (16, 32), (16, 32))
    >>> describe(fused, (96, 32)), describe(Split((64, 64, 64), dim=1), (64, 192))
    ('(64, 32) + 2 x (16, 32)', '3 x (64, 64)')
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Union

from torch import Tensor

from baoc.core.mechanisms import Mechanism
from baoc.core.mechanisms.newton_schulz import aligned
from baoc.core.roles import as_matrices
from baoc.core.spec import Scalars, Shape

_MOST_PIECES = 4096


@dataclass(frozen=True)
class Split:
    """How each matrix of a parameter is cut into matrices.

    Args:
        sizes: rows of each piece, in order; columns if ``dim`` is 1.
        dim: 0 cuts the rows of a matrix, 1 its columns. Of a stack of matrices, each matrix is cut alike.
        repeat: how often the sequence of sizes repeats. Piece ``i`` is what all repetitions have in place ``i``: with
            ``Split((d, d, d), repeat=heads)``, rows are ordered by head, and the three pieces are queries, keys and
            values of all heads.

    Raises:
        ValueError: if a number is not a positive whole number, or ``dim`` is neither 0 nor 1.

    Example:
        >>> Split((64, 64, 64), dim=1).pieces(64, 192)
        ((64, 64), (64, 64), (64, 64))
    """

    sizes: tuple[int, ...]
    dim: int = 0
    repeat: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if not 0 < len(self.sizes) <= _MOST_PIECES or not all(map(_is_count, (*self.sizes, self.repeat))):
            raise ValueError(
                f"a split needs 1 to {_MOST_PIECES} sizes and a repeat, all of them whole numbers of at least 1; got "
                f"sizes={self.sizes!r} and repeat={self.repeat!r}."
            )
        if type(self.dim) is not int or self.dim not in (0, 1):
            raise ValueError(f"dim of a split must be 0 (rows) or 1 (columns), got {self.dim!r}.")

    def problem(self, shape: Shape) -> str | None:
        """Return why a parameter of some shape cannot be split so, or ``None``.

        Args:
            shape: the parameter's global shape.
        """
        if len(shape) < 2:
            return f"it has shape {tuple(shape)}, which is no matrix"
        side, total = as_matrices(shape)[1:][self.dim], sum(self.sizes) * self.repeat
        if total == side:
            return None
        times = f"{self.repeat} x " if self.repeat > 1 else ""
        kind = "columns" if self.dim else "rows"
        return f"its matrices have {side} {kind}, but {times}{self.sizes} make {total}"

    def pieces(self, rows: int, cols: int) -> tuple[tuple[int, int], ...]:
        """Return the shapes that a matrix is cut into.

        Args:
            rows: rows of the matrix.
            cols: its columns.
        """
        sides = (size * self.repeat for size in self.sizes)
        return tuple((rows, side) if self.dim else (side, cols) for side in sides)

    def views(self, stacked: Tensor) -> list[list[Tensor]]:
        """Return the pieces of a batch of matrices as views, those of one shape together.

        Args:
            stacked: the matrices, shape ``(batch, rows, cols)``.

        Returns:
            For each shape, views whose first dim is ``batch``.
        """
        along = 1 + self.dim
        before, after = stacked.shape[:along], stacked.shape[along + 1 :]
        parts = stacked.view(*before, self.repeat, sum(self.sizes), *after).split_with_sizes(self.sizes, dim=along + 1)
        groups: dict[int, list[Tensor]] = {}
        for size, part in zip(self.sizes, parts):
            groups.setdefault(size, []).append(part)
        return list(groups.values())

    def plain(self) -> dict[str, Any]:
        """Return what a plan file holds."""
        more = {"dim": self.dim, "repeat": self.repeat}
        return {"sizes": list(self.sizes)} | {key: value for key, value in more.items() if value != int(key != "dim")}

    @classmethod
    def from_plain(cls, content: Any) -> Split:
        """Read what :meth:`plain` wrote.

        Args:
            content: the JSON value.

        Returns:
            The split.

        Raises:
            ValueError: it is damaged.
        """
        is_split = isinstance(content, Mapping) and {"sizes"} <= content.keys() <= {"sizes", "dim", "repeat"}
        if not is_split or not isinstance(content["sizes"], list):
            raise ValueError(f"a split must be an object with 'sizes' and perhaps 'dim' and 'repeat', got {content!r}.")
        return cls(tuple(content["sizes"]), content.get("dim", 0), content.get("repeat", 1))


Splits = Mapping[str, Split]
"""Split by name of a parameter, or by a pattern on names."""
Request = Union[bool, str, Mapping[str, Union[Split, Sequence[int]]], None]
"""What a user may ask for: see :func:`read_request`."""

HEADS = "heads"


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def describe(split: Split, shape: Shape) -> str:
    """Return the matrices that a parameter is split into, as text.

    Args:
        split: the split.
        shape: global shape of the parameter.

    Example:
        >>> describe(Split((96, 96)), (8, 192, 64))
        '8 x 2 x (96, 64)'
    """
    matrices, rows, cols = as_matrices(shape)
    runs = [(piece, len(list(same))) for piece, same in groupby(split.pieces(rows, cols))]
    parts = [f"{count} x {piece}" if count > 1 else str(piece) for piece, count in runs]
    text = " + ".join(parts)
    if matrices == 1:
        return text
    return f"{matrices} x ({text})" if len(parts) > 1 else f"{matrices} x {text}"


# ---- what is asked for ----


def read_request(request: Request) -> Splits | None:
    """Read the argument ``split=`` of an optimizer, but for what must be detected.

    Args:
        request: sizes or a :class:`Split` by parameter name or pattern, in which ``*`` stands for any characters;
            ``False`` for no splits; ``None``, ``True`` or ``"heads"`` to detect them.

    Returns:
        Splits by pattern; ``None`` if they are to be detected.

    Raises:
        ValueError: it is something else.

    Example:
        >>> read_request({"*.qkv.weight": (64, 16, 16)})
        {'*.qkv.weight': Split(sizes=(64, 16, 16), dim=0, repeat=1)}
    """
    if request is None or request is True or request == HEADS:
        return None
    if request is False:
        return {}
    if not isinstance(request, Mapping):
        raise ValueError(
            "split must be True (detect fused matrices), 'heads' (detect them, one matrix for each head), False (none) "
            f"or a mapping such as {{'*.qkv.weight': (768, 768, 768)}}; got {request!r}."
        )
    return {_pattern(pattern): _read_split(pattern, value) for pattern, value in request.items()}


def _pattern(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise ValueError(f"split has the key {pattern!r}. Keys must be names of parameters, or patterns with '*'.")
    return pattern


def _read_split(pattern: str, value: object) -> Split:
    if isinstance(value, Split):
        return value
    if not isinstance(value, (tuple, list)):
        raise ValueError(
            f"split[{pattern!r}] must be sizes of rows such as (768, 768, 768), or baoc.Split(sizes, dim=1) for "
            f"columns; got {value!r}."
        )
    try:
        return Split(tuple(value))
    except ValueError as error:
        raise ValueError(f"split[{pattern!r}]: {error}") from None


def matched(splits: Splits, shapes: Mapping[str, Shape], *, all_used: bool = False) -> dict[str, Split]:
    """Return which parameters are split, and how. Of several patterns that match a name, the first counts.

    Args:
        splits: split by name or pattern.
        shapes: global shape by parameter name.
        all_used: raise if a pattern matches no name.

    Raises:
        ValueError: if sizes do not fit a parameter, or a pattern matches nothing.

    Example:
        >>> matched({"h.*.qkv": Split((4, 4, 4))}, {"h.0.qkv": (12, 4), "h.0.out": (4, 4)})
        {'h.0.qkv': Split(sizes=(4, 4, 4), dim=0, repeat=1)}
    """
    globs = {pattern: re.compile(".*".join(map(re.escape, pattern.split("*")))) for pattern in splits if "*" in pattern}
    found: dict[str, Split] = {}
    used: set[str] = set()
    for name, shape in shapes.items():
        patterns = [name] if name in splits else [each for each, glob in globs.items() if glob.fullmatch(name)]
        used.update(patterns)
        for pattern in patterns[:1]:
            if problem := splits[pattern].problem(shape):
                raise ValueError(f"split[{pattern!r}] does not fit parameter {name!r}: {problem}. Change the sizes.")
            found[name] = splits[pattern]
    idle = [pattern for pattern in splits if pattern not in used]
    if all_used and idle:
        known = ", ".join(repr(name) for name, shape in shapes.items() if len(shape) > 1)
        raise ValueError(f"split has {idle[0]!r}, which matches no parameter. Matrices: {known[:200] or 'none'}.")
    return found


# ---- what update rules make of splits ----


def finish(mechanism: Mechanism, split: Split | None, stacked: Tensor, scratch: Tensor, scalars: Scalars) -> Tensor:
    """Finish a batch of directions, each matrix of a split by itself: see ``Mechanism.finish_in``.

    Args:
        mechanism: an update rule of reach ``MATRIX``.
        split: how each matrix is split, if it is.
        stacked: directions, shape ``(batch, rows, cols)``. They may be overwritten.
        scratch: :func:`scratch_numel` elements.
        scalars: the numbers of this step.

    Returns:
        The updates, possibly as a view of ``stacked`` or ``scratch``.
    """
    if split is None:
        return mechanism.finish_in(stacked, scratch, scalars)
    _, rows, cols = stacked.shape
    shapes = dict.fromkeys(split.pieces(rows, cols))
    for shape, views in zip(shapes, split.views(stacked)):
        numel = len(stacked) * len(views) * shape[0] * shape[1]
        pieces = scratch[:numel].view(len(stacked), len(views), *views[0].shape[1:])
        for index, view in enumerate(views):
            pieces[:, index].copy_(view)
        finished = mechanism.finish_in(pieces.view(-1, *shape), scratch[aligned(numel) :], scalars)
        for view, each in zip(views, finished.reshape(pieces.shape).unbind(1)):
            view.copy_(each)
    return stacked


def scratch_numel(mechanism: Mechanism, split: Split | None, matrices: int, rows: int, cols: int) -> int:
    """Return how many elements of scratch :func:`finish` uses for a batch of matrices."""
    if split is None:
        return matrices * mechanism.scratch(rows, cols)
    each = ((matrices * count, piece) for piece, count in _counts(split.pieces(rows, cols)))
    return max(aligned(count * r * c) + count * mechanism.scratch(r, c) for count, (r, c) in each)


def workspace(mechanism: Mechanism, split: Split | None, rows: int, cols: int) -> int:
    """Return how many elements :func:`finish` needs for one matrix, the matrix included."""
    if split is None:
        return mechanism.workspace(rows, cols)
    pieces = _counts(split.pieces(rows, cols))
    most = max(count * (mechanism.workspace(r, c) + aligned(r * c) - r * c) for (r, c), count in pieces)
    return aligned(rows * cols) + most


def operations(mechanism: Mechanism, split: Split | None, rows: int, cols: int, device: str = "cpu") -> int:
    """Return the floating-point operations of the matrix products of one matrix: see ``Mechanism.operations``."""
    pieces = ((rows, cols),) if split is None else split.pieces(rows, cols)
    return sum(mechanism.operations(*piece, device) for piece in pieces)


def _counts(pieces: Iterable[tuple[int, int]]) -> list[tuple[tuple[int, int], int]]:
    counts: dict[tuple[int, int], int] = {}
    for piece in pieces:
        counts[piece] = counts.get(piece, 0) + 1
    return list(counts.items())

"""Matrices whose columns, or rows and columns in turn, are brought to one size. No matrix products, and no state.

Rows and columns are those of the parameter as it lies in memory: an embedding's rows are its tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from baoc.core.mechanisms.normalised import MOMENTUM, Normalised
from baoc.core.roles import Role
from baoc.core.spec import Reach, Shape


class ColNorm(Normalised):
    """Every column has an RMS of one."""

    name = "colnorm"
    slots = (replace(MOMENTUM, optional=True),)
    reach = Reach.SUMS
    norms: ClassVar[tuple[Literal["row", "col"], ...]] = ("col",)

    def suits(self, shape: Shape, role: Role) -> bool:
        return role is not Role.VECTOR


class RowNorm(ColNorm):
    """Every row has an RMS of one: a token that was seen moves as far as any other."""

    name = "rownorm"
    norms = ("row",)


class Sinkhorn(ColNorm):
    """Rows and columns in turn, which brings both close to an RMS of one (https://arxiv.org/abs/2502.06742)."""

    name = "sinkhorn"
    norms = (*("row", "col"),) * 5

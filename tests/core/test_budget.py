"""Budgets as people write them: what each means, and what is refused with what to write instead."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from baoc import PlanError
from baoc.core.budget import is_per_rank, memory_budget

REFERENCE_BYTES = 1_000_000


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (0.5, 500_000),
        (0.0, 0),
        (1.0, 1_000_000),
        (2.0, 2_000_000),
        (0, 0),  # no bytes and no share are the same
        (4096, 4096),
        ("50%", 500_000),
        ("1.5GiB", 1_610_612_736),
        (" 1.5 KiB ", 1536),
        ("2MB", 2_000_000),
        ("3TB", 3_000_000_000_000),
        ("7B", 7),
        ("1500%", 15_000_000),
        ("2GiB / rank", 2 << 30),
        (np.float32(0.5), 500_000),
        (np.float64(0.5), 500_000),
        (np.int64(5000), 5000),
    ],
    ids=repr,
)
def test_budgets_are_bytes(memory, expected):
    found = memory_budget(memory, REFERENCE_BYTES)
    assert found == expected and type(found) is int


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (1, r"memory=1 is one byte\. Write memory=1\.0 for AdamW16's whole state.*'1MiB' or at least 4096 bytes"),
        (np.int32(1), r"memory=1 is one byte"),
        (2, r"memory=2 is 2 bytes\. Write memory=2\.0 for 2 times AdamW16's state"),
        (50, r"memory=50 is 50 bytes\. Write memory=0\.5 or '50%' for 50% of AdamW16's state.*'50MiB'"),
        (100, r"memory=100 is 100 bytes\. Write memory=1\.0 or '100%'"),
        (4095, r"memory=4095 is 4095 bytes\. Write memory=0\.5 for half"),
        (50.0, r"memory=50\.0 is 50 times AdamW16's state.*Write memory=0\.5 or '50%'"),
        (100.0, r"Write memory=1\.0 or '100%'"),
        (-0.5, r"memory must be non-negative, got -0\.5"),
        (-1, "memory must be non-negative, got -1"),
        (math.nan, "memory must be finite, got nan"),
        (math.inf, "memory must be finite, got inf"),
        (True, "memory must be a number or a string, got True"),
        (np.bool_(True), "memory must be a number or a string, got True"),
        (None, "memory must be a number or a string, got None"),
        (torch.tensor(0.5), "memory must be a number or a string, got a Tensor"),
        (Decimal("0.5"), "memory must be a number or a string, got a Decimal"),
        (Fraction(1, 2), "memory must be a number or a string, got a Fraction"),
        ([0.5], "memory must be a number or a string, got a list"),
        (10**400, "memory is too large.*at most 2.*62 bytes"),
        (10**5000, "memory is too large"),  # which Python would not print
        (-(10**5000), "memory must be non-negative"),
        (1e308, r"memory is too large, got 1e\+308"),
        (f"1{'0' * 400}GiB", "memory is too large"),
        (f"1{'0' * 400}%", "memory is too large"),
        *((text, "cannot read the budget") for text in ("", "50", "half", "1.5GiBs", "-1GiB", "1..5GiB", "GiB", "%")),
        *((text, "cannot read the budget") for text in ("-5%", ".GiB", "5iB", "\u0665%", "1GiB/node")),
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) or abs(value) < 10**9 else "huge",
)
def test_what_is_not_a_budget_is_refused_in_one_line(memory, message):
    with pytest.raises(PlanError, match=message) as caught:
        memory_budget(memory, REFERENCE_BYTES)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_errors_name_the_argument():
    with pytest.raises(PlanError, match=r"host_memory=50 is 50 bytes\. Write host_memory=0\.5"):
        memory_budget(50, REFERENCE_BYTES, "host_memory")


def test_a_budget_of_a_rank():
    assert is_per_rank("50%/rank") and is_per_rank("2GiB /rank ")
    assert not any(is_per_rank(memory) for memory in ("2GiB", 0.5, 5000, None))

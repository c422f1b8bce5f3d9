"""The benchmarks of orthogonalisation and of whole training steps."""

from __future__ import annotations

import time

import pytest
import torch

import baoc
from baoc.core.mechanisms.newton_schulz import YOU_JIACHENG
from benchmarks import newton_schulz, training_step
from benchmarks.timing import timed


def test_the_plain_iteration_is_the_textbooks() -> None:
    x = torch.randn(2, 9, 5, dtype=torch.float64)
    expected = (x / x.norm(dim=(1, 2), keepdim=True)).mT
    for a, b, c in YOU_JIACHENG:
        gram = expected @ expected.mT
        expected = a * expected + b * gram @ expected + c * gram @ gram @ expected
    torch.testing.assert_close(newton_schulz.plain(x), expected.mT)


def test_a_model_takes_as_long_as_its_matrices() -> None:
    measured = {(4, 8): ([1.0, 2.0, 9.0], [0.5, 1.0]), (8, 8): ([3.0, 4.0], [2.0, 3.0])}
    assert newton_schulz.total(measured, {(4, 8): 2, (8, 8): 1}) == ([5.0, 8.0], [3.0, 5.0])


def test_queries_keys_and_values_apart_are_as_many_elements() -> None:
    whole, apart = (
        sum(rows * cols * count for (rows, cols), count in counts.items())
        for counts in (newton_schulz.GPT2, newton_schulz.GPT2_SPLIT)
    )
    assert whole == apart == 12 * 12 * 768**2


def test_the_page_keeps_its_reading(tmp_path, capsys) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Old\n\n## Reading\n\nA person wrote this.\n")
    newton_schulz.main(["--quick", "--repeats", "2", "--output", str(path)])
    text = path.read_text()
    assert text.startswith("# Newton-Schulz iterations") and "Old" not in text
    assert text.endswith("## Reading\n\nA person wrote this.\n")
    assert capsys.readouterr().out in text
    assert "| 64 x 192 |" in text and "192 x 768 | i^-2 |" in text


def test_processor_time_does_not_pass_while_a_process_waits() -> None:
    assert timed(lambda: time.sleep(0.05), "process") < 0.05 <= timed(lambda: time.sleep(0.05))


def test_training_steps_are_measured_beside_torchs(capsys) -> None:
    pytest.importorskip("transformers")
    options = ["--tokens", "1x8", "--layers", "1", "--repeats", "1", "--time", "1.1", "inf"]
    training_step.main(["--model", "gpt2-small", *options])
    lines = capsys.readouterr().out.splitlines()
    short, free = (next(line for line in lines if f" | {limit} |" in line) for limit in ("1.1", "inf"))
    assert "muon" not in short and "4 `muon" in free
    assert any(line.startswith("| gpt2-small | 1x8 | - |") and line.endswith("| torch Adafactor |") for line in lines)


def test_the_prediction_is_that_of_the_planners_model() -> None:
    shapes = {"h.weight": (256, 256), "h.bias": (256,)}
    assert training_step.predicted(baoc.Plan.uniform("adamw-32", shapes), 512) == pytest.approx(1.0)
    assert training_step.predicted(baoc.Plan.uniform("muon-8 else adamw-32", shapes), 512) > 1.2

"""``baoc fit --states``: the paper's numbers, sharding, options, and the command itself."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baoc import CATALOG, EXTENDED, BlockOptimizer, __version__, state_bytes
from baoc.core.configuration import BUDGET_REFERENCE, parse
from baoc.tools.cli import main
from baoc.tools.estimate import EstimateError, estimate, split_excluded, trainable_shapes
from baoc.tools.models import MODELS, ViT

MIB = 2**20

# What the paper leaves out of its StateMem column, and that column: AdamW16, AdamW32 (the rows of GaLore-AW32 and SPAM)
# and Adafactor (GaLore-AF), in MB of 2^20 bytes.
PAPER: dict[str, tuple[list[str], dict[str, float]]] = {
    "gpt2-small": (
        ["transformer.ln_f.*"],
        {"adamw-16": 475.1514, "adamw-32": 949.3887, "adafactor-32": 1.2216},
    ),
    "t5-base": (
        ["shared.weight", "*coder.final_layer_norm.weight"],
        {"adamw-16": 756.3574, "adamw-32": 1512.3574, "adafactor-32": 1.7240},
    ),
    "llama-3.2-1b": (
        ["model.norm.weight"],
        {"adamw-16": 4714.5000, "adamw-32": 9428.5000, "adafactor-32": 3.4351},
    ),
    "llama-3.2-3b": (
        ["model.norm.weight"],
        {"adamw-16": 12256.3125, "adamw-32": 24511.3125, "adafactor-32": 6.9551},
    ),
    "sd15-unet": (
        ["conv_norm_out.*"],
        {"adamw-16": 3280.1685, "adamw-32": 6557.6197, "adafactor-32": 1745.5663},
    ),
    "vit": (
        ["cls_token", "pos_embed", "norm.*"],
        {"adamw-16": 41.8858, "adamw-32": 83.5108, "adafactor-32": 0.3988},
    ),
}


def run_json(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["fit", "--states", *arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(out.getvalue())
    return content


def run_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake ends with."""
    try:
        code: object = main(list(arguments))
    except SystemExit as stop:  # argparse's own errors
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


@functools.cache
def paper_estimate(model: str) -> dict[str, Any]:
    excluded, _ = PAPER[model]
    return run_json(model, *(argument for pattern in excluded for argument in ("--exclude", pattern)))


# The paper


@pytest.mark.parametrize("model, alias", [(model, alias) for model, (_, figures) in PAPER.items() for alias in figures])
def test_gives_the_papers_figure_to_the_last_digit(model: str, alias: str) -> None:
    [row] = [row for row in paper_estimate(model)["configurations"] if row["alias"] == alias]
    assert f"{row['state_bytes'] / MIB:.4f}" == f"{PAPER[model][1][alias]:.4f}"


def test_the_papers_models_are_all_there() -> None:
    assert set(PAPER) <= set(MODELS)


@pytest.mark.parametrize("model, tied", [("gpt2-small", 124_439_808), ("llama-3.2-1b", 1_235_814_400)])
def test_tied_weights_count_once(model: str, tied: int) -> None:
    assert run_json(model)["parameters"] == tied


# The numbers


def test_json_has_what_a_program_needs() -> None:
    content = run_json("gpt2-small", "--exclude", "transformer.ln_f.*")
    rows = content.pop("configurations")
    assert content == {
        "model": "gpt2-small",
        "parameters": 124_438_272,
        "tensors": 146,
        "excluded": ["transformer.ln_f.weight", "transformer.ln_f.bias"],
        "world_size": 1,
        "fsdp": False,
        "reference": "adamw[m=bf16,v=bf16]",
        "reference_bytes": 498_232_320,
    }
    assert [row["configuration"] for row in rows] == [str(configuration) for configuration in (*CATALOG, *EXTENDED)]
    assert rows[CATALOG.index(BUDGET_REFERENCE)] == {
        "configuration": "adamw[m=bf16,v=bf16]",
        "alias": "adamw-16",
        "state_bytes": 498_232_320,
        "share_of_reference": 1.0,
        "bytes_per_parameter": 498_232_320 / 124_438_272,
        "state_bytes_per_rank": 498_232_320,
    }


def test_promises_what_the_optimizer_holds() -> None:
    model = ViT(patch=8, dim=48, depth=1, heads=3)
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    for row in estimate(trainable_shapes(model)):
        optimizer = BlockOptimizer(model, plan=row.configuration, lr=1e-3)
        optimizer.step()
        assert state_bytes(optimizer) == row.state_bytes, str(row.configuration)


def test_only_trainable_parameters_count() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100).requires_grad_(False))
    assert trainable_shapes(model) == {"0.weight": (100, 100), "0.bias": (100,)}
    with pytest.raises(EstimateError, match="no trainable parameters"):
        trainable_shapes(model.requires_grad_(False))


def test_lazy_modules_have_nothing_to_estimate() -> None:
    with pytest.raises(EstimateError, match="'weight' has no shape yet"):
        trainable_shapes(nn.LazyLinear(3))


def test_names_and_shapes_are_those_the_optimizer_uses() -> None:
    model = nn.Module()
    model._orig_mod = nn.ParameterDict({"weight": torch.zeros(6, 5, dtype=torch.complex64), "scale": torch.zeros(())})
    assert trainable_shapes(model) == {"weight": (6, 5, 2), "scale": ()}


# Sharding

SHARDED = {
    "matrix": (1000, 512),
    "uneven": (13, 700),
    "conv": (64, 32, 3, 3),
    "bias": (8192,),
    "norm": (64,),
    "scale": (),
}


def test_a_world_of_one_holds_everything() -> None:
    for row in estimate(SHARDED):
        assert row.state_bytes_per_rank == row.state_bytes


@pytest.mark.parametrize("world_size", [2, 3, 8, 20])
def test_ranks_share_the_state(world_size: int) -> None:
    for row in estimate(SHARDED, world_size=world_size):
        ranks = [bytes_on_rank(row.configuration, rank, world_size) for rank in range(world_size)]
        assert row.state_bytes_per_rank == max(ranks)
        assert sum(ranks) >= row.state_bytes
        if not row.configuration.switches.factored and row.configuration.mechanism_name != "adafactor":
            replicated = sum(row.configuration.state_bytes(()) for _ in range(world_size - 1))  # 0-d: not sharded
            assert sum(ranks) == row.state_bytes + replicated


def bytes_on_rank(configuration: Any, rank: int, world_size: int) -> int:
    """By torch.chunk, which is what FSDP2 cuts with."""
    total = 0
    for shape in SHARDED.values():
        chunks = torch.empty(shape[0], device="meta").chunk(world_size) if shape else []
        rows = (len(chunks[rank]) if rank < len(chunks) else 0) if shape else None
        total += configuration.state_bytes(shape, rows=rows)
    return total


def test_a_shard_is_as_small_as_its_whole_tensor() -> None:
    # 8 x 1024 elements: bf16 as a whole, and so on each rank, though a rank's 1024 elements alone would be fp32
    [row] = estimate({"weight": (8, 1024)}, ["adamw-16"], world_size=8)
    assert row.state_bytes_per_rank == 2 * 2 * 1024


def test_world_size_adds_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "vit", "--world-size", "4", "--fsdp", "--configuration", "adamw-16"]) == 0
    out = capsys.readouterr().out
    assert "over 4 ranks" in out
    assert "per rank" in out
    assert "10.5 MiB" in out


@pytest.mark.parametrize("size", ["0", "-2", "many", "1.5"])
def test_world_size_is_a_positive_number(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(size) in run_error(capsys, "fit", "--states", "vit", f"--world-size={size}")


# Choosing tensors and configurations


def test_excluding_nothing_is_an_error_that_shows_close_names(capsys: pytest.CaptureFixture[str]) -> None:
    message = run_error(capsys, "fit", "--states", "vit", "--exclude", "norm.*", "--exclude", "pos_embedding")
    assert "'pos_embedding'" in message
    assert "pos_embed," in message


def test_excluding_everything_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no parameters" in run_error(capsys, "fit", "--states", "vit", "--exclude", "*")


def test_excluded_tensors_keep_their_order() -> None:
    shapes = {"a.bias": (1,), "a.weight": (2,), "b.bias": (3,)}
    assert split_excluded(shapes, ["b.*", "*.bias"]) == ({"a.weight": (2,)}, {"a.bias": (1,), "b.bias": (3,)})
    assert split_excluded(shapes, []) == (shapes, {})


def test_configurations_outside_the_catalog() -> None:
    given = ["adamw[m=bf16,v=int8]", "adamw-8", "adamw[m=int8,v=int8]"]
    content = run_json("vit", *(argument for spelling in given for argument in ("--configuration", spelling)))
    assert [row["configuration"] for row in content["configurations"]] == [given[0], given[2]]
    assert parse(given[0]) not in CATALOG


def test_a_wrong_configuration_is_an_error_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'adamw'?" in run_error(capsys, "fit", "--states", "vit", "--configuration", "adanw-8")


def test_sorting_by_state() -> None:
    sizes = [row["state_bytes"] for row in run_json("vit", "--sort", "state")["configurations"]]
    assert sizes == sorted(sizes, reverse=True)


def test_the_table_says_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "frozen.py"
    source.write_text(
        "from baoc.tools.models import ViT\n"
        "def build():\n"
        "    model = ViT()\n"
        "    model.patch_embed.requires_grad_(False)\n"
        "    return model\n"
    )
    assert main(["fit", "--states", f"{source}:build", "--exclude", "*.bias"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines[3:])
    assert lines[0] == f"{source}:build (ViT): 10,627,968 parameters in 40 tensors"
    assert lines[1].startswith("excluded: 25,738 parameters in 38 tensors, blocks.0.norm1.bias, ")
    assert lines[1].endswith(" and 34 more")
    assert lines[2] == "frozen, without state: 295,296 parameters in 2 tensors"
    assert lines[4].split() == ["configuration", "state", "of", "AdamW16", "bytes", "each"]
    assert len(lines) == 6 + len(CATALOG) + len(EXTENDED)


# The command itself


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["--version"]])
def test_help_is_there(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "baoc" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["fitt"], ["fit"], ["fit", "vit", "--jsn"]])
def test_a_mistyped_command_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help" in run_error(capsys, *arguments)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "memory of training" in capsys.readouterr().err


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "baoc", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout == f"baoc {__version__}\n"


def test_output_survives_a_reader_that_leaves() -> None:
    code = "import sys, baoc.tools.cli; sys.exit(baoc.tools.cli.main(['fit', '--states', 'vit']))"
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == ""
    assert command.wait() == 0

"""The paper's experiments end to end, at both scales: small stand-ins, and tiny models in the place of the paper's."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import workloads
from experiments.commands import main
from experiments.runs import Request, RunOptions, Store, runner, train_cell
from experiments.runs.catalog import FULL, PAPER
from experiments.workloads import Options, WorkloadError
from tests.experiments.tiny_workload import cell_for, class_of

pytestmark = pytest.mark.usefixtures("without_compiling")

FEW = ["--steps", "2", "--seeds", "1", "--no-tuning", "--eval-batches", "1", "--batch-size", "2", "--length", "16"]
SOME_METHODS = ["--method", "adamw16", "--method", "baoc-paper@0.8", "--method", "baoc@0.5"]
SOME_VARIANTS = {
    "diagnostics": ["--variant", "s=1%", "--variant", "no-SGD"],
    "anchors": ["--variant", "anchors +20%"],
}
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BAOC_DATA", raising=False)
    monkeypatch.setenv("BAOC_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", PAPER)
def test_every_experiment_runs_small_without_any_download(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "diffusers", "sklearn"):
        pytest.importorskip(package)
    argv = ["paper", name, *FEW, *SOME_METHODS, *SOME_VARIANTS.get(name, []), "--output", str(tmp_path / "p")]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "stands for" in captured.err and "no data folder" in captured.err
    assert "| BAOC (paper) 0.8 |" in captured.out and "| baoc default 0.5 |" in captured.out
    rows = Store(tmp_path / "p" / name).rows
    expected = {
        name.partition("/")[0] + ("/digits" if name.endswith("cifar10") else "/embedded")
        for name in PAPER[name].workloads["small"]
    }
    assert {row["workload"] for row in rows} == expected
    assert all(row["error"] is None for row in rows)
    assert PAPER[name].title in (tmp_path / "p.md").read_text()


def test_experiments_in_one_folder_share_runs(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--workload", tiny, "--no-tuning", "--seeds", "1", "--output", str(tmp_path / "p"), *SOME_METHODS]
    assert main(["paper", "exp1", *few]) == 0
    kind = class_of(tiny)
    kind.seen = 0
    assert main(["paper", "exp2", *few]) == 0
    assert kind.seen == 0 and len(Store(tmp_path / "p" / "exp2").rows) == 3
    capsys.readouterr()


def test_a_variant_with_the_plan_of_the_default_is_not_trained_again(tiny: str) -> None:
    default = train_cell(cell_for(tiny, "baoc-paper@0.8"), RunOptions())
    kind = class_of(tiny)
    cell = cell_for(tiny, "baoc-paper@0.8", "s=10%")
    kind.seen = 0
    row = train_cell(cell, RunOptions(), default=default)
    assert kind.seen == 3  # the warm-up
    assert row["same_plan"] and row["variant"] == "s=10%" and row["key"] == cell.key
    assert row["test_loss"] == default["test_loss"]
    undisturbed = train_cell(cell, RunOptions())
    assert undisturbed["plan"] == default["plan"] and undisturbed["test_loss"] == default["test_loss"]
    kind.seen = 0
    other = train_cell(cell, RunOptions(), default={**default, "plan": {**default["plan"], "digest": "another"}})
    assert kind.seen == cell.steps and "same_plan" not in other


# ---- the paper's scale ----


def test_what_is_missing_is_said_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])  # it runs in another folder
    command = [sys.executable, "-m", "experiments", "paper", "exp2", "--scale", "paper"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    *lines, last = found.stderr.splitlines()
    assert found.returncode == 2 and found.stdout == ""
    assert all(line.startswith("missing: ") for line in lines)
    expected = [
        "no GPU",
        "'cifar10'",
        "'imagenet'",
        "stable-diffusion-v1-5",
        "openai-community/gpt2",
        "'alpaca'",
        "'gsm8k'",
    ]
    assert len(lines) == len(expected)
    assert all(sum(word in line for line in lines) == 1 for word in expected)
    assert "7 things are missing" in last and "nothing was trained" in last
    assert not (tmp_path / "results").exists()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with a few examples of every dataset."""
    folder = tmp_path / "data"
    for name in ("alpaca", "gsm8k", "cifar10"):
        (folder / name).mkdir(parents=True)
    tasks = [{"instruction": f"Add {i} and 1.", "input": "", "output": str(i + 1)} for i in range(200)]
    (folder / "alpaca" / "alpaca_data.json").write_text(json.dumps(tasks))
    for split in ("train", "test"):
        rows = [json.dumps({"question": f"{split} {i} + 2?", "answer": f"#### {i + 2}"}) for i in range(200)]
        (folder / "gsm8k" / f"{split}.jsonl").write_text("\n".join(rows))
    generator = np.random.default_rng(0)
    pixels = {f"x_{split}": generator.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8) for split in ("train", "test")}
    labels = {f"y_{split}": np.arange(100) % 10 for split in ("train", "test")}
    np.savez(folder / "cifar10" / "cifar10.npz", **pixels, **labels)
    return folder


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with a tiny model for each of the paper's; their tokenizers are trained on the data."""
    transformers, diffusers = pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    folder = tmp_path / "models"
    gpt = transformers.GPT2Config(vocab_size=1024, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(gpt).save_pretrained(folder / "gpt2")
    t5 = transformers.T5Config(vocab_size=1024, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(folder / "t5-base")
    llama = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    for name in ("llama3.2-1b", "llama3.2-3b", "mine"):
        transformers.LlamaForCausalLM(llama).save_pretrained(folder / name)
    diffusers.UNet2DConditionModel(
        sample_size=16, cross_attention_dim=768, attention_head_dim=4, block_out_channels=(8, 16), layers_per_block=1,
        norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).save_pretrained(folder / "unet")  # fmt: skip
    return folder


def save_images(folder: Path) -> None:
    """Write ImageNet's layout: two classes, images of several shapes."""
    image = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("n01", "n02"):
            (folder / split / name).mkdir(parents=True)
            for number in range(40):
                shape = (24 + number, 40, 3)
                pixels = image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8))
                pixels.save(folder / split / name / f"{number}.png")


@pytest.mark.parametrize("name", PAPER)
def test_every_experiment_runs_at_the_papers_scale_with_tiny_models(
    name: str, data: Path, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "exp2":
        save_images(data / "imagenet")
    where = ["--pretrained", str(models), "--data", str(data), "--device", "cpu", "--output", str(tmp_path / "p")]
    one = ["--method", "baoc-paper@0.8", *SOME_VARIANTS.get(name, [])]
    assert main(["paper", name, "--scale", "paper", *FEW, *one, *where]) == 0
    capsys.readouterr()
    rows = Store(tmp_path / "p" / name).rows
    assert {row["workload"] for row in rows} == {*PAPER[name].workloads[FULL]}
    assert all(row["error"] is None and row["settings"]["bf16"] for row in rows)
    assert {row["settings"]["pretrained"] for row in rows} == {"models"}  # the place is no part of it


def test_epochs_are_steps(data: Path, models: Path) -> None:
    options = RunOptions(Options(data=data, pretrained=str(models), batch_size=8), device="cpu")
    asked = Request("exp3", scale=FULL, options=options, methods=("adamw16",))
    steps = {series.workload: series.steps for series in runner.all_series(asked, io.StringIO())}
    examples = {name: workloads.get(f"gpt2/{name}", options.workload).count("train") for name in ("alpaca", "gsm8k")}  # type: ignore[attr-defined]
    for dataset, count in examples.items():
        assert steps[f"gpt2/{dataset}"] == -(-200 * count // 8)
        assert steps[f"t5-base/{dataset}"] == -(-100 * count // 8)


def test_a_folder_of_images(data: Path) -> None:
    save_images(data / "imagenet")
    workload = workloads.get("vit-small/imagenet", Options(data=data, batch_size=4))
    batch = next(workload.train_batches(seed=0))
    assert batch["images"].shape == (4, 3, 32, 32) and -1 <= batch["images"].min() < batch["images"].max() <= 1
    model = workload.build(seed=0)
    assert model.head.out_features == 2  # type: ignore[union-attr]
    assert 0 <= workload.evaluate(model, "test", 2)["accuracy"] <= 1
    with pytest.raises(WorkloadError, match="imagenet/ with train/ and val/"):
        workloads.get("vit-small/imagenet").build(seed=0)


def test_any_pretrained_causal_model_is_a_workload(data: Path, models: Path, tmp_path: Path) -> None:
    for given in (models, models / "mine"):
        workload = workloads.get("mine/gsm8k", Options(data=data, pretrained=str(given), length=16))
        assert workload.build(seed=0).config.hidden_size == 32  # type: ignore[union-attr]
    where = ["--pretrained", str(models / "mine"), "--data", str(data), "--output", str(tmp_path / "p")]
    few = ["--steps", "1", "--seeds", "1", "--eval-batches", "1", "--batch-size", "2", "--length", "16"]
    assert main(["paper", "exp1", "--workload", "mine/gsm8k", "--method", "adafactor", *few, *where]) == 0
    rows = Store(tmp_path / "p" / "exp1").rows
    assert [row["lr"] for row in rows] == pytest.approx([2e-4, 5e-4, 1e-3, 3e-3])  # ten times AdamW's
    with pytest.raises(WorkloadError, match="there is no workload 'mine/gsm8k'"):
        workloads.get("mine/gsm8k", Options(data=data, pretrained=str(models / "gpt2")))


def test_several_processes_train_one_model(tmp_path: Path) -> None:
    """Two processes with half of each batch end where one with all of it does."""
    pytest.importorskip("sklearn")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    few = ["--workload", "vit-small/digits", "--method", "adamw16", "--steps", "4", "--seeds", "1", "--no-tuning"]
    few += ["--eval-batches", "2", "--batch-size", "4", "--checkpoint-every", "2"]
    losses = []
    for name, start in (("one", []), ("two", torchrun)):
        command = [sys.executable, *start, "-m", "experiments", "paper", "exp2", *few, "--output", str(tmp_path / name)]
        found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert found.returncode == 0, found.stderr
        (row,) = Store(tmp_path / name / "exp2").rows
        assert row["settings"].get("processes") == (2 if start else None)
        losses.append(row["test_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)

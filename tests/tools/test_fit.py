"""``baoc fit``: parameters as published, activations as measured, plans that fit, and exit codes for scripts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc.core.plan import Plan
from baoc.planners.effects import EffectPlanner
from baoc.tools.cli import main
from baoc.tools.fit import Fitter
from baoc.tools.fit.activations import layers_of, trace, training_step
from baoc.tools.fit.memory import Measured, Setup
from baoc.tools.models import ALIASES, MODELS
from baoc.tools.models.resolve import resolve

# As published with the weights. Gemma 3 from 4b on is published with a vision tower and a projector from it, which are
# not in ours.
SIGLIP = 416_866_032
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472 - SIGLIP - (1152 * 2560 + 1152),
    "gemma-3-12b": 12_187_325_040 - SIGLIP - (1152 * 3840 + 1152),
    "gemma-3-27b": 27_432_406_640 - SIGLIP - (1152 * 5376 + 1152),
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "vit": 10_949_002,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "vit-huge": 632_045_800,
    "sd15-unet": 859_520_964,
    "sd21-unet": 865_910_724,
    "sdxl-unet": 2_567_463_684,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_its_publisher_says(name: str) -> None:
    model = resolve(name)
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]
    assert {param.device.type for param in model.parameters()} == {"meta"}


def test_other_names_lead_to_a_model() -> None:
    assert set(ALIASES.values()) <= set(MODELS) and not set(ALIASES) & set(MODELS)


# ---- activations ----

VOCABULARY, BATCH, LENGTH = 512, 2, 64
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def small(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    configs: dict[str, Any] = {
        "llama": transformers.LlamaConfig(**LLAMA),
        "qwen3": transformers.Qwen3Config(**LLAMA),
        "gemma3": transformers.Gemma3TextConfig(**LLAMA),
    }
    return transformers.AutoModelForCausalLM.from_config(configs[kind])  # type: ignore[no-any-return]


def saved_bytes(model: nn.Module, forward: Any) -> int:
    """What autograd really holds on to, by storage."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, int] = {}
    tensors = []

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    return sum(held.values())


def traced(kind: str, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        model = small(kind).to(dtype).train()
    step = training_step(model, BATCH, LENGTH)
    assert step is not None and step.tokens == BATCH * LENGTH
    return trace(model, step.forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_activations_are_what_a_real_transformer_saves(kind: str, dtype: torch.dtype) -> None:
    model = small(kind).to(dtype).train()
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    measured = saved_bytes(model, lambda: model(input_ids=ids, labels=ids, use_cache=False))
    assert traced(kind, dtype).saved() == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_with_checkpointing_the_inputs_of_layers_are_saved(dtype: torch.dtype) -> None:
    model: Any = small("llama").to(dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})  # the kind that saves its inputs where hooks see it
    model.enable_input_require_grads()
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    measured = saved_bytes(model, lambda: model(input_ids=ids, labels=ids, use_cache=False))
    found = traced("llama", dtype)
    assert found.saved(checkpointing=True) == pytest.approx(measured, rel=0.01)
    assert found.saved(checkpointing=True) < 0.5 * found.saved()
    assert found.peak(checkpointing=True) >= found.saved(checkpointing=True) + max(found.layers) - found.outside


@pytest.mark.parametrize("width", [2, 4])
def test_the_formula_for_a_llama_is_what_is_counted(width: int) -> None:
    """As `docs/fit.md` states it, with d, a, k and f for the widths of model, queries, keys and MLP."""
    found = traced("llama", torch.bfloat16 if width == 2 else torch.float32)
    d, a, k, f, layers = 128, 4 * 32, 2 * 32, 384, 4
    norms = 2 * (4 + width) * d  # the input in fp32 and the normalised one, twice
    per_token = norms + width * (2 * d + 2 * a + 2 * k + 4 * f)
    head = (4 + width) * d + width * d + 4 * VOCABULARY
    assert found.saved() == pytest.approx(BATCH * LENGTH * (layers * per_token + head), rel=0.02)


def test_activations_grow_with_the_batch_and_not_with_the_square_of_the_length() -> None:
    model = resolve("gpt2-small")
    sizes = {}
    for batch, length in [(1, 512), (2, 512), (1, 1024)]:
        step = training_step(model, batch, length)
        assert step is not None
        sizes[batch, length] = trace(model, step.forward).saved()
    assert sizes[2, 512] == pytest.approx(2 * sizes[1, 512], rel=0.01)
    assert sizes[1, 1024] == pytest.approx(sizes[2, 512], rel=0.01)


@pytest.mark.parametrize("name", ["t5-small", "vit", "vit-base", "sd15-unet"])
def test_other_kinds_of_models_are_counted_too(name: str) -> None:
    memory = Measured(resolve(name)).memory(Setup(batch=2, length=32))
    assert memory.activations is not None and memory.activations > 1e5
    assert (
        Measured(resolve(name)).memory(Setup(batch=2, length=32, checkpointing=True)).activations < memory.activations
    )


def test_layers_are_the_members_of_the_outermost_lists() -> None:
    assert len(layers_of(resolve("llama-3.1-8b"))) == 32
    assert len(layers_of(resolve("t5-base"))) == 24


# ---- what a rank holds ----


def test_parts_of_a_rank() -> None:
    measured = Measured(resolve("llama-3.2-1b"))
    n = PUBLISHED["llama-3.2-1b"]
    alone = measured.memory(Setup(length=128))
    assert (alone.weights, alone.gradients, alone.gathered) == (2 * n, 2 * n, 0)
    assert measured.memory(Setup(length=128, world_size=8)) == alone  # a copy on each
    sharded = measured.memory(Setup(length=128, world_size=8, fsdp=True))
    assert sharded.weights == pytest.approx(alone.weights / 8, rel=1e-3)
    assert sharded.activations == alone.activations and sharded.gathered > 2 * 128256 * 2048
    fp32, mixed = (measured.memory(Setup(length=128, dtype=dtype)) for dtype in ("fp32", "mixed"))
    assert (fp32.weights, mixed.weights, mixed.gradients) == (4 * n, 6 * n, 4 * n)
    assert mixed.activations == alone.activations < fp32.activations
    assert alone.total == sum(alone.parts.values())


def test_frozen_weights_have_no_gradients() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100, 100, bias=False).requires_grad_(False), nn.Linear(100, 10, bias=False))
    memory = Measured(model).memory(Setup())
    assert (memory.weights, memory.gradients, memory.activations) == (22_000, 2_000, None)


# ---- plans ----


@pytest.fixture(scope="module")
def llama() -> Fitter:
    with torch.device("meta"):
        return Fitter(Measured(small("llama")))


SETUP = Setup(batch=8, length=256, reserve=0)
REFERENCE_BYTES = 3_679_232


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.7, 1.5, 3.0])
@pytest.mark.parametrize("world_size", [1, 6])
def test_the_best_plan_fits_and_more_room_makes_it_no_worse(llama: Fitter, share: float, world_size: int) -> None:
    setup = replace(SETUP, world_size=world_size, fsdp=world_size > 1)
    room = int(share * REFERENCE_BYTES / world_size)
    gpu = llama.ask(setup).memory.total + room
    answer = llama.ask(setup, gpu)
    assert answer.fits and answer.chosen.total <= gpu
    assert answer.chosen.state == answer.chosen.plan.sharded(world_size).state_bytes_per_rank
    better = llama.ask(setup, gpu + room)
    assert better.chosen.loss <= answer.chosen.loss + EffectPlanner().tolerance  # type: ignore[operator]


def test_where_nothing_fits_it_is_said_and_what_would(llama: Fitter) -> None:
    setup = replace(SETUP, world_size=4)
    answer = llama.ask(setup, int(20e6))
    assert not answer.fits
    changes = {change.what: change for change in answer.changes}
    assert list(changes) == ["--fsdp", "--gradients release", "--checkpointing", "--batch 1", "state in host memory"]
    assert changes["--batch 1"].fits and not changes["state in host memory"].fits
    again = llama.ask(replace(setup, batch=1), int(20e6))
    assert again.fits and again.chosen.total == changes["--batch 1"].total


def test_state_in_host_memory_leaves_room_for_the_best_plan(llama: Fitter) -> None:
    needed = llama.ask(SETUP).memory.total
    answer = llama.ask(SETUP, int(needed + 0.4e6))  # room for some plan, but not for the best there is
    offloaded = answer.changes[-1]
    best = llama.ask(SETUP).chosen
    assert offloaded.loss == best.loss < answer.chosen.loss  # type: ignore[operator]
    assert offloaded.total == needed and offloaded.fits


def test_uniform_plans_are_there_to_compare_with(llama: Fitter) -> None:
    choices = {choice.name: choice for choice in llama.ask(SETUP, int(80e9)).choices}
    assert choices["adamw-32"].loss == 0.0
    assert choices["adamw-16"].state == choices["adamw-16"].plan.state_bytes
    assert choices["adamw-32"].state > choices["adamw-16"].state > choices["adamw-8"].state
    assert choices['best plan, memory="auto"'].state < choices["adamw-8"].state
    assert choices["smallest plan"].state < 0.01 * choices["adamw-16"].state
    low_bits = sum(block.numel for block in choices["adamw-16"].plan.blocks)  # one byte each
    assert choices["adamw-16"].plan.state_bytes == REFERENCE_BYTES + low_bits


@pytest.mark.parametrize("memory", [None, "auto", 0.0, 0.02])
@pytest.mark.parametrize("room", [None, -1, 100_000, 10**12])
def test_no_plan_is_listed_twice(llama: Fitter, memory: Any, room: int | None) -> None:
    gpu = None if room is None else llama.ask(SETUP).memory.total + room
    answer = llama.ask(SETUP, gpu, memory)
    assert answer.chosen in answer.choices
    plans = [choice.plan.blocks for choice in answer.choices]
    assert all(plan != other for plan, other in combinations(plans, 2))
    names = {choice.name for choice in answer.choices}
    best = {None: 'best plan, memory="auto"', -1: "smallest plan", 10**12: 'best plan, memory="auto"'}
    assert answer.chosen.name == ("this budget" if memory is not None else best.get(room, "best plan that fits"))
    assert len(names) == len(plans)


def test_a_budget_per_rank_is_for_each_rank(llama: Fitter) -> None:
    setup = replace(SETUP, world_size=4, fsdp=True)
    each, all_of_them = (llama.ask(setup, memory=memory).chosen for memory in ("100KiB/rank", "100KiB"))
    assert all_of_them.plan.state_bytes <= 100 * 2**10 < each.plan.state_bytes and each.state <= 100 * 2**10


def test_a_large_gpu_does_not_make_a_plan_spend_bytes(llama: Fitter) -> None:
    small, large = (llama.ask(SETUP, gpu).chosen for gpu in (int(100e6), int(80e9)))
    assert small == large


# ---- the command ----


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["fit", *arguments])
    return code, capsys.readouterr().out


SMALL = ("vit", "--batch", "256")


@pytest.mark.parametrize("gpu, code", [("24GB", 0), ("1.1GB", 1)])
def test_the_exit_code_says_whether_it_fits(gpu: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = ask(capsys, *SMALL, "--gpu", gpu)
    assert found == code
    answer = " ".join(text.split()).partition(". ")[0]
    assert answer.startswith(
        "Training vit fits: it takes" if code == 0 else "Training vit does not fit: with the least"
    )
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert sum(set(line) == {"-", " "} for line in text.splitlines()) == 1, "one table"
    assert "\x1b[" not in text  # not a terminal: plain text


def test_the_plan_takes_the_place_of_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    _, short = ask(capsys, *SMALL)
    _, whole = ask(capsys, *SMALL, "--plan")
    assert "\n  adamw-32: " in short and "x step time expected" in " ".join(short.split()) and "tensors  " not in short
    assert "tensors" in whole and "\n  adamw-16: " not in whole and "step time: about" in whole


@pytest.mark.parametrize(
    ("options", "regime"),
    [
        (("vit",), "scratch"),
        (("qwen3-0.6b",), "finetune"),
        (("qwen3-0.6b", "--from-scratch"), "scratch"),
        (("vit", "--regime", "finetune"), "finetune"),
    ],
)
def test_models_that_people_fine_tune_are_planned_for_that(
    options: tuple[str, ...], regime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    _, text = ask(capsys, *options, "--activations", "1GiB", "--steps", "1000", "--json")
    found = json.loads(text)
    assert found["plan"]["settings"]["regime"] == regime
    assert found["plan"]["settings"]["planned_tokens"] == 1000 * found["plan"]["settings"]["tokens"]
    for choice in found["choices"]:
        if choice["expected_loss"] is not None:
            low, high = choice["expected_interval"]
            assert low <= choice["expected_loss"] <= high


def test_the_bar_is_as_long_as_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = ask(capsys, *SMALL, "--gpu", "200MB", "--reserve", "0B")
    [bar] = [line for line in text.splitlines() if line.startswith("[")]
    weights = 2 * PUBLISHED["vit"] / 200e6
    assert len(bar) == 78 and bar.count("w") / 76 == pytest.approx(weights, abs=0.02)


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in ask(capsys, *SMALL)[1]
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in ask(capsys, *SMALL)[1]


def test_the_workspace_of_an_update_is_counted_where_activations_leave_no_room() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    for activations in (0, 2**20, 2**30):
        planner = EffectPlanner(candidates=["muon-8"], time=math.inf)  # at so few tokens it is slow
        chosen = Fitter(Measured(model, activations=activations), planner).ask(SETUP).chosen
        assert chosen.plan.workspace_bytes == 48 * 2**20  # three matrices, with what is made of them
        assert chosen.workspace == max(0, 48 * 2**20 - activations)
        needed = Measured(model, activations=activations).memory(SETUP).total
        assert chosen.total == needed + chosen.workspace + chosen.state


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ask(capsys, *SMALL, "--gpu", "2GB", "--memory", "25%", "--json", "--world-size", "2", "--fsdp")
    content = json.loads(text)
    assert code == 0 and content["fits"] is True and content["gpu_bytes"] == 2_000_000_000
    assert content["total_bytes"] == sum(content["bytes"].values())
    plan = Plan.from_json(json.dumps(content["plan"]))
    assert plan.state_bytes <= 0.25 * plan.reference_bytes
    assert content["bytes"]["optimizer state"] == plan.sharded(2).state_bytes_per_rank


def test_a_model_that_nobody_knows_how_to_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 8))\n"
    )
    code, text = ask(capsys, f"{source}:build")
    text = " ".join(text.split())
    assert code == 0 and "pass --activations" in text and "the inputs of Sequential are not known" in text
    _, text = ask(capsys, f"{source}:build", "--activations", "3GiB", "--json")
    content = json.loads(text)
    assert content["bytes"]["activations"] == 3 * 2**30
    # nobody knows of those that change activations
    assert [change["what"] for change in content["changes"]] == ["--gradients release", "state in host memory"]


def test_a_model_that_needs_data_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "own.py"
    source.write_text(
        "from torch import nn\n"
        "class Own(nn.Linear):\n"
        "    def forward(self, input_ids): return self.weight[: int(input_ids.max())]\n"
        "def build(): return Own(512, 512)\n"
    )
    code, text = ask(capsys, f"{source}:build")
    assert code == 0 and "its forward pass failed on the meta device (RuntimeError: " in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    assert json.loads(ask(capsys, f"{source}:build", "--json")[1])["activations_unknown"].startswith("its forward pass")


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["vit", "--gpu", "24"], "'24' is not a size: write 24GB or 1.5GiB"),
        (["vit", "--gpu", "50%"], "'50%' is not a size"),
        (["vit", "--batch", "0"], "'0' is not a whole number of at least 1"),
        (["vit", "--memory", "lots"], "cannot read the budget 'lots'"),
    ],
)
def test_a_wrong_question_is_one_line(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["fit", *arguments])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and part in error and error.count("\n") == 1

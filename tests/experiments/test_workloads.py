"""The workloads: their interface, their data, and that the small ones learn. None needs a download."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import math
import pkgutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import experiments.workloads
from experiments.commands import main
from experiments.workloads import Options, WorkloadError, describe, fine_tuning, get, images, load, names, text, tokens
from experiments.workloads.language import IGNORED
from experiments.workloads.registry import FAMILIES

for package in ("transformers", "diffusers", "tokenizers", "sklearn"):
    pytest.importorskip(package)

SIZES = {size: settings for _, sizes in FAMILIES for size, settings in sizes.items()}
FINE_TUNED = ["gpt-small/alpaca-gsm8k", "vit-small/cifar10-classes", "vit-small/digits-classes"]
IMAGES = "vit-small/imagenet"  # test_paper.py makes its folder
SMALL = [name for name in names() if "-small/" in name and name not in (*FINE_TUNED, IMAGES)]
PAPER = [
    "vit/cifar10", "gpt2/alpaca", "gpt2/gsm8k", "t5-base/alpaca", "t5-base/gsm8k", "unet/cifar10", "llama3.2-1b/alpaca",
    "llama3.2-1b/gsm8k", "llama3.2-3b/alpaca", "llama3.2-3b/gsm8k",
]  # fmt: skip
ONE_PER_FAMILY = [
    "vit-small/digits",
    "gpt-small/embedded",
    "t5-small/embedded",
    "llama-small/embedded",
    "unet-small/digits",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny datasets in the published formats."""
    data = tmp_path_factory.mktemp("data")
    for name in ("alpaca", "gsm8k", "cifar10"):
        (data / name).mkdir()
    rows = [
        {"instruction": f"Add {i} and {i % 7}.", "input": "now" if i % 2 else "", "output": f"It is {i + i % 7}."}
        for i in range(120)
    ]
    (data / "alpaca" / "alpaca_data.json").write_text(json.dumps(rows))
    for split, count in (("train", 100), ("test", 12)):
        rows = [{"question": f"{split} {i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(count)]
        (data / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 100), ("test", 12)):
        labels = np.arange(count) % 10
        noise = random.integers(0, 40, (count, 32, 32, 3))
        arrays |= {f"x_{split}": (noise + 20 * labels[:, None, None, None]).astype(np.uint8), f"y_{split}": labels}
    np.savez(data / "cifar10" / "some.npz", **arrays)
    return data


@pytest.fixture(scope="module")
def options(folder):
    """Small batches of those."""
    return Options(data=folder, cache=folder / "cache", batch_size=4, length=48)


def first(workload, seed=0, start=0):
    return next(workload.train_batches(seed=seed, start=start))


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


# -- names


def test_the_papers_workloads_are_there_and_each_family_has_a_small_one_without_download():
    assert set(PAPER) <= set(names())
    assert set(ONE_PER_FAMILY) <= set(SMALL)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_they_declare(size):
    model = get(next(name for name in names() if name.startswith(f"{size}/"))).build(seed=0, device="meta")
    assert sum(param.numel() for param in model.parameters()) == SIZES[size].parameters
    assert all(param.is_meta for param in model.parameters())


def test_the_table_says_whether_data_is_there(folder, monkeypatch):
    monkeypatch.delenv("BAOC_DATA", raising=False)
    rows = {line.split()[0]: line for line in describe(Options(data=folder / "alpaca")).splitlines()}
    assert set(names()) <= set(rows)
    assert "(missing)" in rows["gpt2/gsm8k"] and "124.4M" in rows["gpt2/gsm8k"] and "perplexity" in rows["gpt2/gsm8k"]
    assert "(built in)" in rows["gpt2/embedded"]
    monkeypatch.setenv("BAOC_DATA", str(folder))
    assert "(found)" in describe()


def test_unknown_names_are_answered_with_close_ones():
    with pytest.raises(WorkloadError, match=r"no workload 'gpt-smal/alpaca'.*gpt-small/alpaca"):
        get("gpt-smal/alpaca")


def test_importing_the_workloads_loads_no_optional_package():
    code = "import sys, experiments.workloads as w; w.describe(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"transformers", "diffusers", "datasets", "sklearn", "tokenizers"} & set(loaded)


# -- training


@pytest.mark.parametrize("name", SMALL)
def test_small_ones_learn(name, options):
    # A ViT stands still for its first steps, the longer the larger they are; elsewhere a warm-up sees to that.
    steps, batch_size, share = (100, 16, 0.5) if name.startswith("vit") else (10, 4, 1.0)
    workload = get(name, replace(options, batch_size=batch_size))
    model = workload.build(seed=0)
    before = workload.evaluate(model, "validation", max_batches=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=share * workload.lr)
    for batch in itertools.islice(workload.train_batches(seed=0), steps):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
    after = workload.evaluate(model, "validation", max_batches=8)
    assert after["loss"] < 0.97 * before["loss"]
    assert set(after) == {"loss", workload.metric.name}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tunings_begin_where_a_training_that_is_kept_ended(name, options, monkeypatch, tmp_path):
    options = replace(options, cache=tmp_path)
    monkeypatch.setattr(type(get(name)), "steps_before", 2)
    workload = get(name, options)
    one, other = (workload.build(seed=seed).state_dict() for seed in (0, 1))
    trained = fine_tuning.trained_weights(workload.before, 2, tmp_path)
    assert {key for key in one if not torch.equal(one[key], trained[key])} == {*workload.fresh}
    assert {key for key in one if not torch.equal(one[key], other[key])} <= {*workload.fresh}
    assert [path.suffix for path in tmp_path.glob("weights-*")] == [".pt"]
    monkeypatch.setattr("experiments.train.train", None)
    assert same(one, get(name, options).build(seed=0).state_dict())  # found, and not trained again
    assert get(name, options).build(seed=0, device="meta") is not None


def test_a_fine_tuning_has_the_tokens_of_the_training_before(options):
    workload = get("gpt-small/alpaca-gsm8k", options)
    assert workload.tokenizer is workload.before.tokenizer
    assert workload.examples["test"] == get("gpt-small/gsm8k", options).examples["test"]


def test_no_class_is_in_both_parts_of_a_fine_tuning():
    workload = get("vit-small/digits-classes")
    labels = {
        part: {*each.images["train"].labels.tolist()} for part, each in (("new", workload), ("old", workload.before))
    }
    assert labels == {"new": {5, 6, 7, 8, 9}, "old": {0, 1, 2, 3, 4}}


@pytest.mark.parametrize("name", SMALL)
def test_batches_follow_the_seed_and_resume(name, options):
    workload = get(name, options)
    batches = list(itertools.islice(workload.train_batches(seed=1), 4))
    assert same(first(workload, seed=1, start=3), batches[3])
    assert same(first(get(name, options), seed=1), batches[0])
    assert not same(first(workload, seed=2), batches[0])
    assert all(len(value) == 4 for value in batches[0].values())


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_evaluation_repeats_itself_and_leaves_the_model_as_it_was(name, options):
    workload = get(name, options)
    model = workload.build(seed=0)
    scores = workload.evaluate(model, "test", max_batches=2)
    assert model.training
    first(workload, seed=5)
    torch.rand(3)
    assert workload.evaluate(model.eval(), "test", max_batches=2) == scores
    assert not model.training
    if "perplexity" in scores:
        assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_models_follow_the_seed_and_spare_the_global_generator(name, options):
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    one, two, other = (get(name, options).build(seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.rand(2), expected)
    assert same(one, two) and not same(one, other)


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_checkpointing_changes_nothing_and_bf16_little(name, options):
    def loss_and_grads(**settings):
        workload = get(name, replace(options, **settings))
        model = workload.build(seed=0)
        loss = workload.loss(model, first(workload))
        loss.backward()
        return loss.item(), {key: param.grad for key, param in model.named_parameters()}

    loss, grads = loss_and_grads()
    checkpointed, recomputed = loss_and_grads(checkpointing=True)
    assert checkpointed == pytest.approx(loss)
    for key, grad in grads.items():
        torch.testing.assert_close(recomputed[key], grad)
    low, _ = loss_and_grads(bf16=True)
    assert low == pytest.approx(loss, rel=0.02) and low != loss


def test_the_loss_is_the_mean_that_evaluation_reports(options):
    workload = get("gpt-small/embedded", options)
    model = workload.build(seed=0)
    order = torch.randperm(
        len(workload.examples["test"]), generator=experiments.workloads.dataset.generator("order", "test")
    )
    batch = workload.collate("test", order[:4].tolist(), torch.Generator())
    assert workload.evaluate(model, "test", 1)["loss"] == pytest.approx(workload.loss(model, batch).item())


# -- data


@pytest.mark.parametrize("dataset", text.DATASETS)
def test_text_splits_are_disjoint(dataset, options):
    splits = text.load(dataset, options)
    prompts = [{example.prompt for example in examples} for examples in splits.values()]
    assert list(splits) == ["train", "validation", "test"] and all(prompts)
    assert not any(a & b for a, b in itertools.combinations(prompts, 2))


def test_held_out_text_is_nowhere_in_the_embedded_training_text(options):
    splits = text.load("embedded", options)
    train, *held_out = (
        {part.strip() for example in examples for part in (example.prompt, example.response)}
        for examples in splits.values()
    )
    assert not any(train & parts for parts in held_out)


@pytest.mark.parametrize("dataset", images.DATASETS)
def test_image_splits_are_disjoint(dataset, options):
    splits = images.load(dataset, options)
    pixels = [{image.numpy().tobytes() for image in split.pixels} for split in splits.values()]
    assert all(pixels) and not any(a & b for a, b in itertools.combinations(pixels, 2))
    assert all(split.pixels.shape[1:] == (3, 32, 32) and split.labels.max() <= 9 for split in splits.values())


def test_published_test_sets_are_the_test_splits(options):
    assert len(text.load("gsm8k", options)["test"]) == len(images.load("cifar10", options)["test"]) == 12


def test_cifar10_is_read_from_its_published_binary_files(folder, options, tmp_path):
    (tmp_path / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    with np.load(folder / "cifar10" / "some.npz") as arrays:
        for file, split in (("data_batch_1.bin", "train"), ("test_batch.bin", "test")):
            pixels, labels = arrays[f"x_{split}"].transpose(0, 3, 1, 2), arrays[f"y_{split}"].astype(np.uint8)
            rows = np.concatenate([labels[:, None], pixels.reshape(len(labels), -1)], axis=1)
            rows.tofile(tmp_path / "cifar10" / "cifar-10-batches-bin" / file)
    binary, npz = images.load("cifar10", Options(data=tmp_path)), images.load("cifar10", options)
    for split in npz:
        assert torch.equal(binary[split].pixels, npz[split].pixels)
        assert torch.equal(binary[split].labels, npz[split].labels)


def test_without_a_data_folder_the_hub_is_asked(monkeypatch):
    monkeypatch.delenv("BAOC_DATA", raising=False)
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(60)]
    hub = SimpleNamespace(load_dataset=lambda *name: {"train": rows, "test": rows[:5]}, __spec__=object())
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert len(text.gsm8k(Options())["test"]) == 5

    def unreachable(*name):
        raise ConnectionError("no route")

    hub.load_dataset = unreachable
    with pytest.raises(ValueError, match=r"'alpaca' was not found.*hub.*no route.*BAOC_DATA.*embedded"):
        text.alpaca(Options())


def test_missing_data_is_an_error_that_says_where_and_what(tmp_path):
    for name, where in (("gpt2/alpaca", "alpaca"), ("t5-small/gsm8k", "gsm8k"), ("vit/cifar10", "cifar10")):
        with pytest.raises(WorkloadError, match=rf"{tmp_path}/{where}.*--data or BAOC_DATA.*embedded and digits"):
            first(get(name, Options(data=tmp_path)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("alpaca/alpaca_data.json", "[{", "not JSON"),
        ("alpaca/alpaca_data.json", "{}", "holds a dict"),
        ("alpaca/alpaca_data.json", '[{"instruction": "x"}]', r"example 0 of .*KeyError\('input'\)"),
        ("alpaca/readme.md", "", r"should hold one \*.json and holds none"),
        ("gsm8k/train.jsonl", "\n{", "line 2 is not JSON"),
        ("gsm8k/train.jsonl", '{"question": "1?", "answer": "1"}', "no file .*test.jsonl"),
        ("cifar10/readme.md", "", "holds none"),
        ("cifar10/data_batch_1.bin", "abc", "not whole images"),
    ],
)
def test_bad_files_are_errors_that_name_them(file, content, message, tmp_path):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(content)
    dataset = file.partition("/")[0]
    with pytest.raises(WorkloadError, match=message):
        (text if dataset in text.DATASETS else images).load(dataset, Options(data=tmp_path))


def test_bad_arrays_are_errors_that_name_them(tmp_path):
    (tmp_path / "cifar10").mkdir()
    pixels, labels = np.zeros((2, 32, 32, 3), np.uint8), np.zeros(2)
    for arrays, message in (
        ({"x_train": pixels}, "lacks y_train, x_test, y_test"),
        ({"x_train": pixels[0], "y_train": labels, "x_test": pixels, "y_test": labels}, "expected uint8 of"),
        ({"x_train": pixels, "y_train": labels + 10, "x_test": pixels, "y_test": labels}, "expected 0 to 9"),
    ):
        np.savez(tmp_path / "cifar10" / "some.npz", **arrays)
        with pytest.raises(WorkloadError, match=message):
            images.load("cifar10", Options(data=tmp_path))


def test_bad_numbers_are_refused(options):
    workload = get("vit-small/digits", options)
    model = workload.build(seed=0)
    with pytest.raises(WorkloadError, match="max_batches is 0"):
        workload.evaluate(model, "test", 0)
    with pytest.raises(WorkloadError, match="start is -1"):
        first(workload, start=-1)
    with pytest.raises(WorkloadError, match="length is 4"):
        Options(length=4)
    with pytest.raises(WorkloadError, match="length is 2000; the model has 1024 positions"):
        get("gpt2/alpaca", Options(length=2000))


def test_a_split_without_examples_is_an_error(tmp_path):
    (tmp_path / "alpaca").mkdir()
    (tmp_path / "alpaca" / "one.json").write_text("[]")
    with pytest.raises(WorkloadError, match="train split has no examples"):
        first(get("gpt-small/alpaca", Options(data=tmp_path)))


# -- language


@pytest.mark.parametrize(("name", "learns_prompts"), [("gpt2/gsm8k", False), ("gpt-small/gsm8k", True)])
def test_the_response_is_learned_and_by_small_models_the_prompt(name, learns_prompts, options):
    workload = get(name, options)
    example = workload.examples["train"][0]
    batch = workload.collate("train", [0], torch.Generator())
    (prompt,), (response,) = (workload.tokenizer.encode([part]) for part in (example.prompt, example.response))
    inputs, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    whole = [*prompt, *response, workload.tokenizer.end]
    assert inputs[: len(whole) - 1] == whole[:-1] and set(inputs[len(whole) - 1 :]) == {workload.tokenizer.pad}
    assert [label for label in labels if label != IGNORED] == whole[1 if learns_prompts else len(prompt) :]
    assert all(label in (IGNORED, token) for label, token in zip(labels, whole[1:]))


def test_the_decoder_sees_the_response_one_step_late(options):
    workload = get("t5-small/gsm8k", options)
    batch = workload.collate("train", [0, 1], torch.Generator())
    learned = batch["labels"][:, :-1] != IGNORED
    assert (batch["decoder_input_ids"][:, 0] == workload.tokenizer.pad).all()
    assert torch.equal(batch["decoder_input_ids"][:, 1:][learned], batch["labels"][:, :-1][learned])
    assert ((batch["input_ids"] != workload.tokenizer.pad) == batch["attention_mask"].bool()).all()


def test_long_prompts_lose_their_beginning_and_long_responses_their_end(options):
    workload = get("gpt2/gsm8k", options)
    batch = workload.arrange([list(range(100, 200))], [list(range(200, 300))])
    inputs, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert inputs == [*range(176, 200), *range(200, 224)]
    assert labels == [IGNORED] * 23 + list(range(200, 225))
    assert workload.arrange([[]], [[5]])["labels"][0, 0] == 5


def test_padding_does_not_change_the_loss(options):
    for name in ("gpt-small/gsm8k", "t5-small/gsm8k", "llama-small/gsm8k"):
        short, long = (get(name, replace(options, length=length)) for length in (64, 128))
        model = short.build(seed=0).eval()
        assert short.loss(model, first(short)).item() == pytest.approx(long.loss(model, first(long)).item(), rel=1e-5)


def test_the_tokenizer_is_trained_once_and_on_the_training_split_only(options, tmp_path, monkeypatch):
    seen = []
    train = tokens._train
    monkeypatch.setattr(tokens, "_train", lambda package, texts: seen.append(texts) or train(package, texts))
    options = Options(data=options.data, cache=tmp_path)
    ids = [get("gpt-small/gsm8k", options).tokenizer.encode(["Question: é?"]) for _ in range(2)]
    examples = text.load("gsm8k", options)
    assert len(seen) == 1 and ids[0] == ids[1]
    assert set(seen[0]) == {part for example in examples["train"] for part in (example.prompt, example.response)}
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_pretrained_folder_gives_weights_and_tokenizer(options, tmp_path):
    import tokenizers
    import transformers

    workload = get("gpt-small/embedded", options)
    model = workload.build(seed=3)
    model.save_pretrained(tmp_path)
    pretrained = get("gpt-small/embedded", replace(options, pretrained=str(tmp_path)))
    assert same(pretrained.build(seed=0).state_dict(), model.state_dict())
    assert same(first(pretrained), first(workload))  # a folder without a tokenizer: ours

    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "the": 1, "?": 2}, unk_token="?"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(tmp_path)
    pretrained = get("gpt-small/embedded", replace(options, pretrained=str(tmp_path)))
    assert pretrained.tokenizer.encode(["the of the"]) == [[1, 2, 1]]
    assert first(pretrained)["input_ids"].max() <= 2


def test_weights_without_their_tokenizer_are_refused(options, tmp_path):
    with pytest.raises(WorkloadError, match="need their own tokenizer"):
        get("gpt2/alpaca", options).build(seed=0, pretrained="gpt2")
    with pytest.raises(ValueError, match="cannot be loaded"):
        get("gpt-small/embedded", Options(pretrained=str(tmp_path))).build(seed=0)


def test_pretrained_vision_and_diffusion_weights(options, tmp_path):
    workload = get("vit-small/digits", options)
    model = workload.build(seed=3)
    torch.save(model.state_dict(), tmp_path / "vit.pt")
    assert same(workload.build(seed=0, pretrained=str(tmp_path / "vit.pt")).state_dict(), model.state_dict())
    with pytest.raises(ValueError, match="not a saved state dict of vit/digits's model"):
        get("vit/digits").build(seed=0, pretrained=str(tmp_path / "vit.pt"))
    workload = get("unet-small/digits", options)
    model = workload.build(seed=3)
    model.save_pretrained(tmp_path / "pipeline" / "unet")
    assert same(workload.build(seed=0, pretrained=str(tmp_path / "pipeline")).state_dict(), model.state_dict())


# -- a person's own

MINE = """
from experiments.workloads import LOSS, Workload
class Mine(Workload):
    name, description, metric, steps, batch_size, lr = "mine", "", LOSS, 1, 1, 0.1
    def build(self, *, seed, device="cpu", pretrained=None): ...
    def train_batches(self, *, seed, start=0): ...
    def loss(self, model, batch): ...
    def evaluate(self, model, split, max_batches=None): ...
"""


def test_a_file_gives_its_class_or_its_instance(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert load(file, Options(batch_size=9)).batch_size == 9
    assert get(str(file)).name == "mine"
    file.write_text(MINE + "class Other(Mine): name = 'other'\nchosen = also = Other()\n")
    assert load(file).name == "other"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no workload"),
        ("from experiments.workloads import Workload", "has no workload"),
        (MINE.replace("def loss", "def lost"), "Mine lacks loss"),
        (MINE + "class Other(Mine): ...", "several workloads: Mine, Other"),
        (MINE + "a, b = Mine(), Mine()", "several workloads: a, b"),
        ("import no_such_module", r"cannot be imported \(line 1\)"),
        (MINE + "    def __init__(self, options): 1 / 0", r"cannot be made \(line 9\): ZeroDivisionError"),
    ],
)
def test_other_files_are_errors_that_say_why(content, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(file)


def test_what_is_no_file_is_an_error(tmp_path):
    with pytest.raises(WorkloadError, match="is not a Python file"):
        load(tmp_path / "none.py")


# -- documentation and command


def test_the_command_trains(capsys, tmp_path):
    assert main(["train", "vit-small/digits", "--steps", "2", "--batch-size", "4", "--eval-batches", "1"]) == 0
    assert "in 2 steps" in capsys.readouterr().out
    assert main(["train", "vit/cifar10", "--data", str(tmp_path)]) == 2
    assert "'cifar10' was not found" in capsys.readouterr().err


@pytest.mark.parametrize("module", [name for _, name, _ in pkgutil.iter_modules(experiments.workloads.__path__)])
def test_examples_in_docstrings_run(module):
    imported = importlib.import_module(f"experiments.workloads.{module}")
    assert doctest.testmod(imported).failed == 0


def test_the_packages_own_example_runs():
    assert doctest.testmod(experiments.workloads).failed == 0

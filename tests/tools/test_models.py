"""Models by name, from a function, from a config file, and the ViT."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baoc.tools.models import MODELS, ModelError, ViT
from baoc.tools.models.resolve import resolve
from tests.tools.test_estimate import run_error, run_json

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
TINY_UNET = {
    "_class_name": "UNet2DModel",
    "_diffusers_version": "0.32.0",
    "sample_size": 8,
    "block_out_channels": [32, 64],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
}


def write_config(folder: Path, content: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


# Naming a model

FUNCTIONS = """
from dataclasses import dataclass
from torch import nn
import neighbour

@dataclass
class Setup:
    model: nn.Module

def module():
    print("building")
    return neighbour.linear()

def holder():
    return Setup(model=module())

def several():
    return module(), "tokenizer"

def nothing():
    pass

def broken():
    raise RuntimeError("no data here\\nand a second line")

def needs(size):
    return nn.Linear(size, size)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    (tmp_path / "neighbour.py").write_text("from torch import nn\ndef linear(): return nn.Linear(10, 20)\n")
    return path


@pytest.mark.parametrize("name", ["module", "holder", "several"])
def test_a_function_of_a_file(functions: Path, name: str) -> None:
    before = list(sys.path)
    assert run_json(f"{functions}:{name}")["parameters"] == 220
    assert sys.path == before


def test_a_function_is_called_on_the_meta_device(functions: Path) -> None:
    assert {param.device.type for param in resolve(f"{functions}:module").parameters()} == {"meta"}


@pytest.mark.parametrize(
    "name, parts",
    [
        (":missing", ["has no function 'missing'", "It has Setup, module, holder, several"]),
        (":", ["which function", "functions.py:function"]),
        ("", ["which function", "functions.py:function"]),
        (":nothing", ["returned None", "nn.Module"]),
        (":broken", ["failed on the meta device (line 24): RuntimeError: no data here"]),
        (":needs", ["TypeError", "missing 1 required positional argument: 'size'"]),
    ],
)
def test_a_function_that_is_not_right(
    functions: Path, name: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = run_error(capsys, "fit", "--states", f"{functions}{name}")
    for part in parts:
        assert part in message


def test_a_file_that_does_not_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import no_such_package\n")
    message = run_error(capsys, "fit", "--states", f"{path}:build")
    assert "cannot be imported (line 1): ModuleNotFoundError: No module named 'no_such_package'" in message


@pytest.mark.parametrize("path", ["missing.py:build", "./missing.json", "/no/such/folder"])
def test_a_file_that_is_not_there(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file" in run_error(capsys, "fit", "--states", path)


@pytest.mark.parametrize(
    "name, close", [("gpt2-smal", "gpt2-small"), ("t5-bse", "t5-base"), ("meta-llama/Llama-3.2-1B", "llama-3.2-1b")]
)
def test_an_unknown_name_suggests_close_ones(name: str, close: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = run_error(capsys, "fit", "--states", name)
    assert repr(name) in message
    assert f"Did you mean {close}" in message
    assert all(known in message for known in MODELS)


# Config files


@pytest.mark.parametrize("architectures, model_class", [(["LlamaModel"], "LlamaModel"), (None, "LlamaForCausalLM")])
def test_a_transformers_config(tmp_path: Path, architectures: list[str] | None, model_class: str) -> None:
    path = write_config(tmp_path, TINY_LLAMA | ({"architectures": architectures} if architectures else {}))
    for place in (path, tmp_path):
        model = resolve(str(place))
        assert type(model).__name__ == model_class
        assert {param.device.type for param in model.parameters()} == {"meta"}
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32
    assert run_json(str(tmp_path))["parameters"] == 100 * 32 + 2 * layer + 32  # tied, or without a head


@pytest.mark.parametrize(
    "model_type, model_class", [("t5", "T5ForConditionalGeneration"), ("vit", "ViTModel"), ("gpt2", "GPT2LMHeadModel")]
)
def test_a_transformers_config_without_architectures(tmp_path: Path, model_type: str, model_class: str) -> None:
    assert type(resolve(str(write_config(tmp_path, {"model_type": model_type})))).__name__ == model_class


def test_a_diffusers_config(tmp_path: Path) -> None:
    write_config(tmp_path, TINY_UNET)
    model = resolve(str(tmp_path))
    assert type(model).__name__ == "UNet2DModel"
    content = run_json(str(tmp_path / "config.json"))
    assert content["parameters"] == sum(param.numel() for param in model.parameters()) > 100_000


@pytest.mark.parametrize(
    "content, part",
    [
        ({"hidden_size": 3}, "neither"),
        ([1, 2], "neither"),
        ({"model_type": "lama"}, "Did you mean llama"),
        (TINY_LLAMA | {"architectures": ["LlamaForEverything"]}, "'LlamaForEverything'"),
        (TINY_LLAMA | {"hidden_size": "wide"}, "cannot be built"),
        ({"_class_name": "NoSuchModel"}, "'NoSuchModel'"),
        ({"_class_name": "DDPMScheduler"}, "is not a model"),
    ],
)
def test_a_config_that_is_not_right(
    tmp_path: Path, content: object, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in run_error(capsys, "fit", "--states", str(write_config(tmp_path, content)))


def test_a_config_that_is_not_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    assert "is not JSON" in run_error(capsys, "fit", "--states", str(path))


def test_a_folder_without_a_config_points_to_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unet").mkdir()
    write_config(tmp_path / "unet", TINY_UNET)
    message = run_error(capsys, "fit", "--states", str(tmp_path))
    assert "has no config.json" in message
    assert str(tmp_path / "unet") in message


@pytest.mark.parametrize("package, model", [("transformers", "gpt2-small"), ("diffusers", "sd15-unet")])
def test_a_missing_package_says_how_to_get_it(
    package: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    message = run_error(capsys, "fit", "--states", model)
    assert package in message
    assert "pip install 'baoc[models]'" in message


HUB_KEYS = {
    "auto_map": {"AutoModelForCausalLM": "someone/model--modeling.Model"},
    "_attn_implementation": "someone/kernels",
    "attn_implementation": "someone/kernels",
    "_experts_implementation": "someone/kernels",
    "use_pretrained_backbone": True,
    "model_args": {"pretrained": True, "checkpoint_path": "model.bin"},
}


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every host that the process tries to reach; none is reached."""
    tried: list[Any] = []

    def refuse(*args: Any, **_: Any) -> None:
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tried


def test_keys_that_load_from_a_hub_are_ignored(tmp_path: Path, connections: list[Any]) -> None:
    plain = resolve(str(write_config(tmp_path, TINY_LLAMA)))
    model = resolve(str(write_config(tmp_path, TINY_LLAMA | HUB_KEYS)))
    assert model.config._attn_implementation == plain.config._attn_implementation
    assert not hasattr(model.config, "auto_map") and connections == []


HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "timm backbone": {"model_type": "detr", "backbone": "resnet50", "use_timm_backbone": True},
    "timm by default": {"model_type": "detr"},
    "timm from a hub": {"model_type": "timm_backbone", "backbone": "hf-hub:someone/backbone"},
    "timm model": {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/model"},
    "backbone": {"model_type": "dpt", "backbone": "someone/backbone"},
    "backbone of a list": {"model_type": "upernet", "backbone": "someone/backbone"},
    "code": {"model_type": "someone"},
    "name": TINY_LLAMA | {"_name_or_path": "someone/model"},
    "nested": {"model_type": "llava", "text_config": TINY_LLAMA | HUB_KEYS},
    "diffusers": {"_class_name": "AutoencoderKL", "_name_or_path": "someone/model"},
}


@pytest.mark.parametrize("case", HUB_CONFIGS)
def test_no_config_makes_a_connection(case: str, tmp_path: Path, connections: list[Any]) -> None:
    with contextlib.suppress(ModelError):
        resolve(str(write_config(tmp_path, HUB_CONFIGS[case] | HUB_KEYS)))
    assert connections == []


def test_connections_are_noticed(connections: list[Any]) -> None:
    """The tests here can fail."""
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 80))
    assert connections


@pytest.mark.parametrize("nested", [False, True])
def test_a_backbone_is_not_looked_up_in_a_hub(
    tmp_path: Path, connections: list[Any], nested: bool, capsys: Any
) -> None:
    """Transformers asks the hub about a backbone that is given by name. That fails here instead."""
    constants = pytest.importorskip("huggingface_hub").constants
    before = constants.HF_HUB_OFFLINE
    content: dict[str, Any] = {"model_type": "maskformer", "backbone": "someone/backbone", "use_timm_backbone": False}
    content |= HUB_KEYS
    if nested:
        content = {"model_type": "encoder-decoder", "encoder": content, "decoder": TINY_LLAMA}
    assert "cannot be built" in run_error(capsys, "fit", "--states", str(write_config(tmp_path, content)))
    assert connections == [] and before == constants.HF_HUB_OFFLINE


# The ViT


def test_vit_learns() -> None:
    torch.manual_seed(0)
    model = ViT(image=16, patch=4, channels=1, classes=3, dim=24, depth=2, heads=4)
    images, labels = torch.randn(12, 1, 16, 16), torch.arange(12) % 3
    assert model(images).shape == (12, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        assert all(param.grad is not None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.0986, abs=0.2)  # log 3
    assert losses[-1] < 0.2


def test_vit_tells_an_image_by_where_its_patches_are() -> None:
    torch.manual_seed(0)
    model = ViT(image=32, patch=8, dim=48, depth=2, heads=3)
    image = torch.randn(1, 3, 32, 32)
    swapped = image.roll(8, dims=-1)
    assert not torch.allclose(model(image), model(swapped), atol=1e-6)
    nn.init.zeros_(model.pos_embed)
    torch.testing.assert_close(model(image), model(swapped))


@pytest.mark.parametrize(
    "sizes, part", [({"image": 30}, "divisible by patch, got 30"), ({"dim": 100}, "divisible by heads, got 100")]
)
def test_vit_refuses_sizes_that_do_not_divide(sizes: dict[str, int], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        ViT(**sizes)

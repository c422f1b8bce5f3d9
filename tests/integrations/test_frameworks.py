"""Frameworks: each example trains, names are the model's own, checkpoints go on, and adapters fit the real packages.

A framework that is not installed is skipped, and says so.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import baoc
from baoc import BAOC, BlockOptimizer, ConfigurationError, EffectPlanner, PaperPlanner
from baoc.integrations import spare_vectors, unwrap, unwrap_accelerate

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = 66  # lines


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAOC_QUIET", "1")


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")


def example(name: str, *packages: str) -> ModuleType:
    needs(*packages)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_parameter(optimizer: BlockOptimizer) -> dict[str, object]:
    """What the plan says of each parameter. A checkpoint keeps blocks in the order of param groups."""
    found = {name: (block.name, block.configuration, block.lr_scale) for name, block in optimizer.plan.by_parameter}
    return {"settings": dict(optimizer.plan.settings), **found}


def test_an_example_is_at_most_a_page():
    for path in EXAMPLES.glob("*.py"):
        if path.stem != "fsdp2":  # has a model and checkpoints of its own
            assert len(path.read_text().splitlines()) <= PAGE, path.name


# ---- plain PyTorch ----


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_plain_pytorch(precision, capsys):
    losses = example("plain").main(["--steps", "20", "--precision", precision])
    assert losses[-1] < 0.5 * losses[0]
    assert "0 steps skipped" in capsys.readouterr().out


def test_a_compiled_model(monkeypatch):
    """By a backend that takes no time: what matters here is the module that wraps the model."""
    compile_eagerly = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_eagerly(model, backend="eager"))
    losses = example("plain").main(["--steps", "15", "--compile"])
    assert losses[-1] < losses[0]


def test_names_of_a_compiled_model_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    compiled = torch.compile(model, backend="eager")
    blocks = BAOC(compiled, memory=0.5).plan.blocks
    assert {name for block in blocks for name in block.parameters} == {name for name, _ in model.named_parameters()}


def test_gradient_release():
    losses = example("gradient_release").main(["--steps", "30"])
    assert losses[-1] < 0.5 * losses[0]


# ---- param groups and wrappers ----


def test_vectors_are_spared_decay_and_everything_else_stays():
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = BAOC(model, memory=0.8, weight_decay=0.1)
    plan = optimizer.plan
    spare_vectors(optimizer)
    assert optimizer.plan == plan and len(optimizer.param_groups) == 2
    spared = dict(zip(optimizer.param_groups[1]["param_names"], optimizer.param_groups[1]["params"]))
    assert sorted(spared) == ["1.bias", "2.bias", "2.weight"] and optimizer.param_groups[1]["weight_decay"] == 0
    for _ in range(4):
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    again = spare_vectors(BAOC(copy.deepcopy(model), memory=0.8, weight_decay=0.1))
    again.load_state_dict(optimizer.state_dict())
    assert by_parameter(again) == by_parameter(optimizer)


def test_a_wrapper_without_an_optimizer_of_ours_says_so():
    with pytest.raises(TypeError, match="SimpleNamespace does not contain a baoc optimizer"):
        unwrap(SimpleNamespace(optimizer=torch.optim.SGD([torch.ones(1)], lr=1.0)))


# ---- Hugging Face ----


def test_the_trainer_by_factory(tmp_path):
    """Names, decay, metrics in the history, and a resumed run that ends where an unbroken one does."""
    module = example("trainer", "transformers", "accelerate")
    torch.manual_seed(0)
    broken = module.main(["--output", str(tmp_path / "a"), "--steps", "40"])
    optimizer = unwrap(broken.optimizer)
    assert "transformer.h.0.attn.c_attn.weight" in optimizer.plan
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    history = [entry for entry in broken.state.log_history if "loss" in entry]
    assert all(entry["baoc/warmup"] == 0 for entry in history)
    assert all(entry["baoc/state_bytes"] <= entry["baoc/budget_bytes"] for entry in history)
    assert history[-1]["baoc/update_rms/vectors"] > 0
    last = {name: param.clone() for name, param in broken.model.named_parameters()}
    (tmp_path / "a" / "checkpoint-40").rename(tmp_path / "later")  # so that it goes on from step 20
    resumed = module.main(["--output", str(tmp_path / "a"), "--steps", "40"])
    assert by_parameter(unwrap(resumed.optimizer)) == by_parameter(optimizer)
    for name, param in resumed.model.named_parameters():
        torch.testing.assert_close(param, last[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_trainer_by_optimizers(tmp_path):
    needs("transformers", "accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    module = example("trainer", "transformers")
    sizes = {"vocab_size": 200, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = BAOC(model, lr=3e-3, memory=0.5)
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", **settings)
    trainer = Trainer(model, arguments, train_dataset=module.Counting(), optimizers=(optimizer, None))
    trainer.train()
    assert unwrap(trainer.optimizer) is optimizer and optimizer.metrics()["steps"] == 4


def test_accelerate():
    losses, optimizer = example("accelerate_loop", "accelerate").main(["--steps", "20"])
    assert losses[-1] < losses[0]
    inner = unwrap(optimizer)
    assert inner is not optimizer and inner.metrics()["steps"] == 20 and "1.weight" in inner.plan


def test_unwrap_accelerate_adds_the_attributes_of_the_optimizer(tmp_path):
    """Attributes, printing and copies work; the object is still Accelerate's: it accumulates, saves and loads."""
    needs("accelerate")
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import GradientState

    GradientState._reset_state()  # it is shared, and cannot be pickled while it knows of a loader of another test
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))
    model, wrapper = accelerator.prepare(model, BAOC(model, memory=0.5))
    with pytest.raises(AttributeError):
        _ = wrapper.plan
    optimizer = unwrap_accelerate(unwrap_accelerate(wrapper))
    inner = unwrap(optimizer)
    assert optimizer is wrapper and isinstance(optimizer, AcceleratedOptimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.metrics()["steps"] == 2, "Accelerate's step leaves out every other one"
    assert optimizer.plan is inner.plan and optimizer.kernel == inner.kernel
    optimizer.replan(memory=0.25)
    assert optimizer.plan.state_bytes <= 0.25 * optimizer.plan.reference_bytes
    assert repr(optimizer) == repr(inner) and len(str(optimizer).splitlines()) == 3
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again.plan.to_json() == optimizer.plan.to_json() and type(again) is type(optimizer)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = optimizer.plam


def test_unwrap_accelerate_needs_a_baoc_optimizer():
    with pytest.raises(TypeError, match="SGD does not contain a baoc optimizer"):
        unwrap_accelerate(torch.optim.SGD([torch.ones(1)], lr=1.0))


def test_lora():
    losses, optimizer = example("lora", "transformers", "peft").main(["--steps", "20"])
    assert losses[-1] < losses[0]
    names = [name for block in optimizer.plan.blocks for name in block.parameters]
    assert names and all("lora_" in name for name in names), "frozen weights have no state"
    assert baoc.state_bytes(optimizer) <= optimizer.metrics()["budget_bytes"]


# ---- Lightning ----


def test_lightning(tmp_path):
    module = example("lightning_module", "lightning")
    trainer = module.main(["--output", str(tmp_path), "--steps", "20"])
    shown = trainer.logged_metrics
    assert shown["baoc/steps"] == 20 and shown["baoc/warmup"] == 0 and shown["baoc/update_rms/vectors"] > 0
    plan = unwrap(trainer.optimizers[0]).plan
    again = module.main(["--output", str(tmp_path), "--steps", "20"])  # goes on: its one epoch is over
    assert unwrap(again.optimizers[0]).plan.to_json() == plan.to_json()


# ---- torchtitan ----


def test_torchtitan():
    """Its own container builds, rehearses, flattens and restores the optimizer."""
    needs("torchtitan")
    from torchtitan.components.optimizer import ParamGroupConfig

    from baoc.integrations import torchtitan_container

    config = torchtitan_container().Config(
        param_groups=[
            ParamGroupConfig(pattern="bias", optimizer_name="BAOC", optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.0}),
            ParamGroupConfig(pattern=".*", optimizer_name="BAOC", optimizer_kwargs={"lr": 1e-3}),
        ],
        implementation="for-loop",
        optimizer_factory_kwargs_by_name={"BAOC": {"memory": 0.8, "planner": PaperPlanner(warmup=2, time=50.0)}},
    )

    def run(model: nn.Module, optimizers: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, 64)).square().sum().backward()
            optimizers.step()
            optimizers.zero_grad()

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizers = config.build(model_parts=[model])
    run(model, optimizers, 1)
    saved, other = copy.deepcopy(optimizers.state_dict()), copy.deepcopy(model)
    restored = config.build(model_parts=[other])
    restored.state_dict()
    assert unwrap(restored.optimizers[0]).metrics()["steps"] == 0, "its rehearsal is no step"
    restored.load_state_dict(saved)
    run(model, optimizers, 4)
    run(other, restored, 4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(other.parameters(), model.parameters()))


# ---- Axolotl ----


def test_axolotl():
    """Loaded as its YAML would: by name. A trainer stands in for Axolotl's own, which has the attributes used here."""
    needs("axolotl", "peft", "transformers")
    from axolotl.integrations.base import BasePlugin, load_plugin

    plugin = load_plugin("baoc.integrations.BAOCPlugin")
    assert isinstance(plugin, BasePlugin)
    arguments = SimpleNamespace(
        learning_rate=2e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8
    )
    trainer = SimpleNamespace(model=nn.Linear(64, 64), args=arguments, optimizer_cls_and_kwargs=None)
    section = {"baoc": {"memory": 0.6}}
    optimizer = plugin.create_optimizer(section, trainer)
    plugin.post_trainer_create(section, trainer)
    factory, settings = trainer.optimizer_cls_and_kwargs
    for made in (optimizer, factory()(trainer.model, trainer.args, **settings)):
        assert (made.defaults["lr"], made.defaults["betas"]) == (2e-4, (0.9, 0.95))
        assert made.plan.state_bytes <= 0.6 * made.plan.reference_bytes


def test_what_axolotl_asks_for_without_axolotl():
    """Its factories are called with its training arguments in second place."""
    from baoc.integrations import ForTrainer
    from baoc.integrations.trainers import axolotl_settings

    arguments = SimpleNamespace(learning_rate=2e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=0.0)
    made = ForTrainer()(nn.Linear(64, 64), arguments, **axolotl_settings({"baoc": {"memory": 0.6, "lr": 1e-3}}))
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (1e-3, 0.1), "its own section wins"


PLANNERS = {
    "name": ("effects", EffectPlanner()),
    "settings": ({"name": "paper", "warmup": 7}, PaperPlanner(warmup=7)),
    "object": (EffectPlanner(time=1.5), EffectPlanner(time=1.5)),
}


@pytest.mark.parametrize(("given", "planner"), PLANNERS.values(), ids=list(PLANNERS))
def test_a_planner_and_other_keywords_are_passed_through(given, planner):
    from baoc.integrations import ForTrainer
    from baoc.integrations.trainers import axolotl_settings

    settings = axolotl_settings({"baoc": {"planner": given, "memory": 0.6, "on_nonfinite": "skip"}})
    made = ForTrainer()(nn.Linear(64, 64), **settings)
    expected = BAOC(nn.Linear(64, 64), planner=planner, memory=0.6, on_nonfinite="skip")
    assert settings["planner"] == planner and made.plan == expected.plan
    assert made.is_warming_up == planner.reads_gradients


@pytest.mark.parametrize("given", ["papers", {"warmup": 7}, {"name": None}])
def test_a_planner_without_a_known_name_is_refused(given):
    from baoc.integrations.trainers import axolotl_settings

    with pytest.raises(ValueError, match="planner must have a name: effects or paper; got"):
        axolotl_settings({"baoc": {"planner": given}})


def test_an_unknown_keyword_is_refused_by_name():
    from baoc.integrations import ForTrainer

    with pytest.raises(TypeError, match=r"no argument 'warmup': it is now planner=baoc\.PaperPlanner\(warmup=\.\.\.\)"):
        ForTrainer()(nn.Linear(64, 64), memory=0.6, warmup=10)


# ---- DeepSpeed ----


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        ("muon-16", "whole matrices"),
        ("spectral", "whole matrices"),
        ("colnorm", "sums over rows and columns"),
        ("adafactor", "sums over rows and columns"),
        ("adamw[m=bf16,v=factored]", "sums over rows and columns"),
        ("adamw-8", "rows that share quantization scales"),
        ("lion-4", "rows that share quantization scales"),
    ],
)
def test_zero_refuses_what_needs_rows(configuration, reason):
    from baoc.integrations import for_zero

    with pytest.raises(ConfigurationError, match=reason):
        for_zero(nn.Linear(64, 64), configuration)


@pytest.mark.parametrize("configuration", ["adamw-32", "adamw-16", "lion-16", "sgdwm-16", "sgd"])
def test_a_flat_partition_makes_the_steps_of_its_parts(configuration):
    """What ZeRO relies on: elements of a flat tensor are updated as they would be in their own."""
    from baoc.integrations import for_zero

    parts = [nn.Parameter(torch.randn(80, 80)), nn.Parameter(torch.randn(70))]
    flat = nn.Parameter(torch.cat([part.detach().flatten() for part in parts]))
    optimizers = [for_zero(parts, configuration, lr=1e-2), for_zero([flat], configuration, lr=1e-2)]
    for _ in range(3):
        for part in parts:
            part.grad = torch.randn(part.shape)
        flat.grad = torch.cat([part.grad.flatten() for part in parts])
        for optimizer in optimizers:
            optimizer.step()
    together = torch.cat([part.detach().flatten() for part in parts])
    torch.testing.assert_close(flat.detach(), together, rtol=1e-2, atol=1e-3)  # small tensors have fp32 state


def test_deepspeed():
    """In a process of its own: it changes what it finds. Its first start on a CPU compiles a part of DeepSpeed."""
    needs("deepspeed")
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "zero.py", "--steps", "8"],
        env={**os.environ, **alone, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^all +1 +\S+ +adamw-16 ", ran.stdout, re.MULTILINE), "one flat partition of all parameters"

"""Facts about models: whether they were trained before, and how many tokens a step has."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

from baoc import BAOC, BlockOptimizer, EffectPlanner, ModelFacts, PaperPlanner
from baoc.planners.model_facts import TokenCounter


class Net(nn.Module):
    def __init__(self, width: int = 64, words: int = 200) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        words = torch.randint(200, (8, 16), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(words).flatten(0, 1), (words * 7 % 200).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- the regime ----


def test_trained_weights_are_told_from_fresh_ones() -> None:
    model = Net()
    assert ModelFacts.of(model).regime == "scratch"
    train(model, BlockOptimizer(model, lr=1e-2), 30)
    assert ModelFacts.of(model).regime == "finetune"
    plan = BAOC(model, verbose=False).plan
    assert plan.settings["regime"] == "finetune" and "in fine-tuning" in str(plan)
    forced = BAOC(model, planner=EffectPlanner(regime="scratch"), verbose=False).plan
    assert forced.settings["regime"] == "scratch"


def test_a_model_without_normalization_layers_is_a_regime_of_its_own() -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    bare = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 64))
    weight_norm = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    assert [ModelFacts.of(each).regime for each in (plain, bare, weight_norm)] == ["general", "scratch", "general"]
    for model, regime in ((plain, "general"), (Net(), "scratch")):  # also by name, and without names
        assert ModelFacts.of(dict(model.named_parameters())).regime == regime
        assert ModelFacts.of({f"0.{i}": param for i, param in enumerate(model.parameters())}).regime == regime
    plan = BAOC(plain, verbose=False).plan
    assert {block.configuration.alias for block in plan.blocks} == {"adamw-32"} and "no norm layers" in str(plan)


def test_weights_on_the_meta_device_are_new() -> None:
    with torch.device("meta"):
        facts = ModelFacts.of(Net())
    assert facts.regime == "scratch" and facts.shapes == ModelFacts.of(Net()).shapes


@pytest.mark.parametrize("planner", [EffectPlanner(), PaperPlanner(warmup=30, time=100.0)], ids=["effects", "paper"])
def test_a_resumed_run_stays_what_it_was(planner: EffectPlanner | PaperPlanner) -> None:
    model = Net()
    optimizer = BAOC(model, lr=1e-2, planner=planner, verbose=False)
    train(model, optimizer, 20)
    assert ModelFacts.of(model).regime == "finetune", "the test proves nothing"
    resumed = BAOC(model, lr=1e-2, planner=planner, verbose=False)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.replan().settings["regime"] == "scratch"


# ---- tokens ----


def test_tokens_are_counted_once_and_the_hooks_are_gone() -> None:
    model = Net()
    optimizer = BAOC(model, memory=0.5, verbose=False)
    assert optimizer.plan.settings["tokens"] == 4096
    with torch.no_grad():
        model(torch.zeros(7, 7, dtype=torch.long))  # an evaluation does not count
    for _ in range(2):  # but both halves of an accumulated step do
        model(torch.zeros(4, 16, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert optimizer.replan().settings["tokens"] == 128
    assert not any(module._forward_hooks for module in model.modules())


def test_a_convolution_counts_its_pixels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.Flatten(), nn.Linear(96 * 16, 10))
    counter = TokenCounter(model)
    model(torch.zeros(2, 3, 8, 8))
    sizes = [64 * 27, 96 * 64 * 9]
    assert counter.stop() == round((2 * 36 * sizes[0] + 2 * 16 * sizes[1]) / sum(sizes))


def test_without_a_forward_pass_no_tokens_are_known() -> None:
    assert TokenCounter(Net()).stop() is None
    facts = ModelFacts.of(Net())
    assert facts.with_tokens(None).tokens is None and facts.with_tokens(7).with_tokens(None).tokens == 7


# ---- the file ----


def test_facts_survive_a_file() -> None:
    facts = dataclasses.replace(ModelFacts.of(Net()), tokens=77, regime="finetune")
    read = ModelFacts.from_plain(json.loads(json.dumps(facts.plain())), facts.shapes)
    assert read == facts


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 0},
        {"tokens": 1.5},
        {"operations_per_byte": 0},
        {"operations_per_byte": math.inf},
        {"regime": "pretrained"},
        {"device": None},
        {"roles": {"w": "nothing"}},
    ],
    ids=str,
)
def test_damaged_facts_are_refused(change: dict[str, object]) -> None:
    facts = ModelFacts.of(Net())
    with pytest.raises(ValueError):
        ModelFacts.from_plain(facts.plain() | change, facts.shapes)


def test_counting_tokens_leaves_no_trace_on_the_model():
    """So scripted models and copies, such as an EMA, have no hook of ours, and their passes do not count."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
    hooks = torch.nn.modules.module._global_forward_hooks
    before = len(hooks)
    counter = TokenCounter(model)
    scripted, ema = torch.jit.script(model), copy.deepcopy(model)
    assert not any(module._forward_hooks for each in (model, ema) for module in each.modules())
    for each, tokens in ((model, 5), (scripted, 7), (ema, 11)):
        each(torch.zeros(tokens, 8))
    assert counter.stop() == 5 and len(hooks) == before
    del counter
    TokenCounter(model)  # and is dropped at once
    gc.collect()
    assert len(hooks) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_inherits_counts_and_counts_its_own_model(copied, is_first):
    """In either order, and where two modules share a weight."""
    shared, own = nn.Linear(8, 8), nn.Linear(8, 8)
    own.weight = shared.weight
    model = nn.Sequential(shared, nn.ReLU(), own, nn.Linear(8, 8), nn.Linear(8, 4))
    counter = TokenCounter(model)
    model(torch.zeros(5, 8))
    pair = copied((counter, model) if is_first else (model, counter))
    other, twin = pair if is_first else pair[::-1]
    model(torch.zeros(7, 8))
    twin(torch.zeros(11, 8))
    with torch.no_grad():
        twin(torch.zeros(13, 8))
    again = copied(other)
    twin(torch.zeros(1, 8))
    assert counter.stop() == 12 and other.stop() == 17 and again.stop() == 16
    twin(torch.zeros(1, 8))
    assert other.stop() == copied(other).stop() == 17


def test_a_compiled_model_gives_no_warning_about_the_hook():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counter = TokenCounter(model)
        torch.compile(model, backend="eager")(torch.zeros(5, 8))
    counter.stop()

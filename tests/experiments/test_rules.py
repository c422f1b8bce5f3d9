"""Prototypes of update rules, and the design of their experiment."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from baoc.core.mechanisms import MECHANISMS
from experiments.rules import cells
from experiments.rules.page import main_effects
from experiments.rules.prototype import SOAPS, Prototype
from experiments.rules.recipes import Recipe
from experiments.rules.soap import Soap

LR = 1e-2


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))


def moved(recipe: Recipe, steps: int = 3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after some steps."""
    model = model_of()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    prototype = Prototype(model, recipe, LR, steps, mean_lr=1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        prototype.look(LR)
        model.zero_grad()
        model(torch.randint(128, (32,), generator=generator)).square().mean().backward()
        prototype.step(LR)
    return before, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("recipe", [Recipe(), *cells.MEMORY, *cells.SINGLE], ids=lambda recipe: recipe.key)
def test_every_recipe_moves_all_matrices_at_the_first_step(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MECHANISMS, "heavymuon", MECHANISMS["muon"])  # restored afterwards: it is no rule of ours
    monkeypatch.delitem(MECHANISMS, "heavymuon")
    before, after = moved(recipe, steps=1)
    for name in ("0.weight", "1.weight", "3.weight"):
        assert after[name].isfinite().all() and not torch.equal(before[name], after[name])


def test_cautious_decay_shrinks_only_weights_that_the_update_shrinks() -> None:
    without, plain, cautious = (
        moved(recipe, steps=1)[1]["1.weight"]
        for recipe in (Recipe(weight_decay=0.0), Recipe(), Recipe(cautious_decay=True))
    )
    before = moved(Recipe(), steps=1)[0]["1.weight"]
    shrinks = (before - without) * before >= 0
    torch.testing.assert_close(cautious, torch.where(shrinks, plain, without))
    assert 0 < shrinks.float().mean() < 1


def test_the_ball_keeps_norms() -> None:
    before, after = moved(Recipe(ball=4.0))
    torch.testing.assert_close(after["1.weight"].norm(), before["1.weight"].norm())


@pytest.mark.parametrize("name", SOAPS)
def test_soap_is_adam_in_a_basis_that_stays_orthogonal(name: str) -> None:
    sides, kl = SOAPS[name]
    weight = torch.zeros(24, 40)
    soap, generator = Soap(weight, sides, kl, every=2), torch.Generator().manual_seed(0)
    for _ in range(7):
        update = soap.update(torch.randn(24, 40, generator=generator))
    for basis in soap.bases:
        if basis is not None:
            torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis)), atol=1e-5, rtol=0)
    assert 0.05 < float(update.square().mean().sqrt()) < 1.0
    squares = (24**2 + 40**2) if sides == "both" else 24**2
    assert soap.elements == 2 * weight.numel() + 2 * squares


def test_no_pair_of_factors_is_mixed_with_a_main_effect() -> None:
    columns = list(zip(*cells.design()))
    for first, second in combinations(columns, 2):
        assert sum(a * b for a, b in zip(first, second)) == 0
        assert all(sum(a * b * c for a, b, c in zip(first, second, third)) == 0 for third in columns)


def test_main_effects_have_the_error_of_what_they_leave() -> None:
    design = cells.design()
    exact = [1.0 + 0.5 * cell[0] - 0.25 * cell[7] for cell in design]
    effects = main_effects(exact)
    assert effects[0] == pytest.approx((1.0, 0.0)) and effects[7] == pytest.approx((-0.5, 0.0))
    mixed = [value + 0.1 * cell[0] * cell[1] for value, cell in zip(exact, design)]
    assert main_effects(mixed)[0][0] == pytest.approx(1.0) and main_effects(mixed)[0][1] > 0.01

"""The update of a recipe: the library's optimizer, and what a prototype changes around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import baoc
from baoc.core.mechanisms import Muon, known_settings, register_mechanism
from baoc.core.mechanisms.muon import UPDATE_RMS, momentum_at
from baoc.core.mechanisms.newton_schulz import MUON, POLAR_EXPRESS, YOU_JIACHENG
from baoc.core.roles import HIDDEN, canonical_name, roles_of
from baoc.core.spec import FP32_TINY, Hyper
from experiments.methods.by_role import parse, plan_of
from experiments.rules.recipes import Recipe
from experiments.rules.soap import Soap

BETA1 = 0.9
SOAPS = {"soap": ("both", False), "soap-short": ("short", False), "soap-kl": ("both", True)}
MAX_RMS = 0.45
COEFFICIENTS = {"you-jiacheng": YOU_JIACHENG, "polar-express": POLAR_EXPRESS, "muon": MUON}


class Heavy(Muon):
    """Muon without Nesterov's look ahead: the direction is the momentum itself."""

    name = "heavymuon"

    def scalars(self, hyper: Hyper, ages):  # type: ignore[no-untyped-def]
        numbers = super().scalars(hyper, ages)
        keep = momentum_at(ages["m"], hyper)
        noise = ((1 - keep) / (1 + keep) * (1 - 0.95) / (1 + 0.95)) ** 0.25  # as Muon's, without the look ahead
        mass = max(self.mass("m", ages["m"], hyper), FP32_TINY)
        s_mass = max(self.mass("s", ages["s"], hyper), FP32_TINY)
        length = UPDATE_RMS.of(hyper) / noise * s_mass**0.5 / mass
        return numbers | {"of_m": 1.0, "of_grad": 0.0, "length": length}


class Prototype:
    """Updates a model as a recipe says.

    Args:
        model: the model.
        recipe: the recipe.
        lr: the largest learning rate of the run.
        steps: the number of steps.
        mean_lr: the mean of the schedule relative to its maximum, which constant decay needs.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, lr: float, steps: int, mean_lr: float) -> None:
        self.recipe, self.max_lr, self.steps, self.mean_lr = recipe, lr, steps, mean_lr
        self.params = {canonical_name(name): param for name, param in model.named_parameters()}
        roles = roles_of(model)
        hidden = [self.params[name] for name, role in roles.items() if role in HIDDEN]
        self.hidden = {id(param) for param in hidden}
        self.soaps: dict[int, Soap] = {}
        spelling = recipe.hidden
        if not recipe.nesterov:
            spelling = spelling.replace("muon", register_mechanism(Heavy()).name)
        if recipe.hidden in SOAPS:
            sides, kl = SOAPS[recipe.hidden]
            self.soaps = {id(param): Soap(param, sides, kl) for param in hidden}
            spelling = "sgdw"
        edges = f"embedding={recipe.edges} x{recipe.embedding_lr:g}; head={recipe.edges} x{recipe.head_lr:g}"
        text = f"hidden={spelling}; {edges}; vector=adamw-32 x{recipe.vector_lr:g}"
        wanted = {
            "update_rms": 0.4 * recipe.rms, "max_update_rms": MAX_RMS * recipe.rms,
            "nesterov_momentum": recipe.momentum, "newton_schulz": COEFFICIENTS[recipe.coefficients],
        }  # fmt: skip
        known = known_settings(baoc.parse(spelling).mechanism)
        self.optimizer = baoc.BlockOptimizer(
            model, lr=lr, betas=(BETA1, recipe.beta2), weight_decay=0.0, plan=plan_of(model, parse(text)),
            split=recipe.split,
            **{name: value for name, value in wanted.items() if name in known},
        )  # fmt: skip
        self.radii = {id(param): float(param.detach().norm()) for param in hidden}
        self.squares: dict[int, Tensor] = {}
        self.means = {id(param): param.detach().clone() for param in self.params.values()} if recipe.look_ahead else {}
        self.shifts: list[Tensor] = []
        self.age = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of state, with prototypes in fp32."""
        kept = sum(soap.elements for soap in self.soaps.values())
        kept += sum(each.numel() for each in (*self.squares.values(), *self.means.values()))
        return baoc.state_bytes(self.optimizer) + 4 * kept

    @torch.no_grad()
    def look(self, lr: float) -> None:
        """Move to where the next gradient is taken."""
        factor = self.recipe.look_ahead * lr / self.max_lr
        if self.means:
            self.shifts = [(param - self.means[id(param)]) * factor for param in self.params.values()]
            for param, shift in zip(self.params.values(), self.shifts):
                param.add_(shift)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update all parameters with their gradients."""
        for param, shift in zip(self.params.values(), self.shifts):
            param.sub_(shift)
        self.age += 1
        before = [param.clone() for param in self.params.values()]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if "nesterov_momentum" in group:
                group["nesterov_momentum"] = self._momentum()
        self.optimizer.step()
        for param, old in zip(self.params.values(), before):
            param.copy_(self._moved(param, old, lr))
            if self.means:
                self.means[id(param)].lerp_(param, 1 - self.recipe.look_memory)

    def _momentum(self) -> float:
        if self.recipe.final_momentum is None:
            return self.recipe.momentum
        late = max(0.0, self.age / self.steps - 0.6) / 0.4
        return self.recipe.momentum + late * (self.recipe.final_momentum - self.recipe.momentum)

    def _moved(self, param: Tensor, old: Tensor, lr: float) -> Tensor:
        recipe, key = self.recipe, id(param)
        update = old - param
        if soap := self.soaps.get(key):
            update = soap.update(param.grad)  # type: ignore[arg-type]
            update *= lr * (1.0 if recipe.raw else 0.4 / _rms(update))
            update *= recipe.rms
        if recipe.variance and key in self.hidden:
            update = self._equalised(key, update)
        if recipe.ball and key in self.hidden:
            radius = self.radii[key]
            new = old - update * (recipe.ball * lr * radius / update.norm().clamp(min=FP32_TINY))
            return new * (radius / new.norm())
        decay = recipe.weight_decay * (self.max_lr * self.mean_lr if recipe.constant_decay else lr)
        shrinking = old * decay
        if recipe.cautious_decay:
            shrinking *= update * old >= 0
        return old - shrinking - update

    def _equalised(self, key: int, update: Tensor) -> Tensor:
        length = _rms(update)
        square = self.squares.setdefault(key, torch.zeros_like(update))
        square.lerp_((update / length).square(), 1 - self.recipe.variance)
        update = update / (square / (1 - self.recipe.variance**self.age)).sqrt().clamp(min=1e-8)
        return update * (length / _rms(update))


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt().clamp(min=FP32_TINY)

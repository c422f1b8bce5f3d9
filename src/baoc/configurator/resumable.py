"""An optimizer that carries what it knows along: into its state, its checkpoints and its copies, and out of them."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from typing import Any

from torch import Tensor, nn

from baoc.configurator import agreement, resume
from baoc.configurator.resume import Progress
from baoc.configurator.wishes import Wishes
from baoc.core.configuration import Configuration
from baoc.core.plan import Plan
from baoc.optim import checkpoint, groups
from baoc.optim.groups import Member
from baoc.optim.optimizer import BlockOptimizer
from baoc.planning.risk import REGIMES
from baoc.profiling.facts import Facts, TokenCounter
from baoc.profiling.profile import Profile, ProfileError
from baoc.profiling.sampling import Sampler

logger = logging.getLogger("baoc")

_NO_PLANNING = {"warmup", "settle", "replan_every"}  # wishes that no plan depends on


class Resumable(BlockOptimizer):
    """All that goes on in a resumed run, and how it is kept; what is done with it is up to ``BAOC``."""

    _asked: Wishes  # by this script
    _wishes: Wishes  # that hold now
    _progress: Progress
    _facts: Facts
    _names: list[str]  # of the parameters that plans are made for
    _sampler: Sampler | None
    _tokens: TokenCounter | None
    _module: weakref.ref[nn.Module] | None  # whose tokens are counted
    _group: agreement.Group
    _agreed: bool  # with the other ranks
    _is_told: bool  # of the warm-up
    _quiet: bool
    _promotes: bool
    _promotions: int

    @property
    def profile(self) -> Profile:
        """What the gradients of the warm-up were like, beside the weights as they are now; an error before the first
        step: see :attr:`has_profile`. It saves to one file and answers any budget. What it is made from counts in the
        budget: if that is more than 1% of it, nothing needs it and the plan leaves no room, it is given up when the
        warm-up ends. Of sharded parameters, all ranks must ask for it.
        """
        profile = self._profile()
        if profile is not None:
            return profile
        if self._sampler is not None:
            raise ProfileError("there is no profile yet: it is of gradients, and no step with finite ones was made.")
        raise ProfileError(
            "there is no profile: the budget has no room for samples, or they were given up for it when the warm-up "
            "ended. Save it before that, set replan_every so that sampling goes on, give more memory, or use "
            "baoc.profile(...), which samples apart from training."
        )

    @property
    def has_profile(self) -> bool:
        """Whether there is a :attr:`profile`."""
        return self._sampler is not None and self._sampler.steps > 0

    def _profile(self) -> Profile | None:
        if self._sampler is None or not self.has_profile:
            return None
        return Profile.from_sampler(self._sampler, self._params(), self._facts)

    def set_plan(self, plan: Plan | Configuration | str, *, inherit: bool = True) -> None:
        """As in :class:`BlockOptimizer`. The next plan that is made takes its place."""
        self._hide_samples()  # they are no state of the parameter they lie with
        try:
            super().set_plan(plan, inherit=inherit)
        finally:
            self._show_samples()

    def _params(self) -> dict[str, Tensor]:
        return {member.name: member.param for member in self.members()}

    # ---- samples in the state ----

    def _allocate(self) -> None:
        super()._allocate()
        self._show_samples()

    def _sample_keeper(self) -> Member | None:
        return next((member for member in self.members() if member.param.requires_grad), None)

    def _show_samples(self) -> None:
        """Put the samples into the state, so that they are counted and saved like everything else."""
        keeper = self._sample_keeper()
        if self._sampler is None or keeper is None:
            return
        held = self.state.get(keeper.param)
        if held and checkpoint.SAMPLES in held:
            return
        if held or not keeper.layout.formats:  # a parameter whose own state is not there yet must not seem to have some
            self.state[keeper.param][checkpoint.SAMPLES] = resume.tensors_of(self._sampler)

    def _hide_samples(self) -> None:
        keeper = self._sample_keeper()
        held = self.state.get(keeper.param, {}) if keeper is not None else {}
        if keeper is not None and held.pop(checkpoint.SAMPLES, None) and not held:
            del self.state[keeper.param]

    # ---- checkpoints and copies ----

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the plan and all that this optimizer knows."""
        packed = super().state_dict()
        positions = checkpoint.positions_by_name(self.param_groups)
        known = (self._asked, self._wishes, self._progress, self._facts, self._names, self._sampler)
        checkpoint.write(packed["param_groups"], checkpoint.PLANNER, resume.write(*known, positions))
        return packed

    def _read_own(self, loaded: checkpoint.Prepared) -> dict[str, Any]:
        params = dict(groups.named_params(loaded.param_groups))
        if not loaded.planner:
            return self._read_foreign(loaded, params)
        positions = checkpoint.positions_by_name(loaded.param_groups)
        has_state = any(loaded.state.values())
        run = resume.read(loaded.planner, loaded.samples, self._asked, params, positions, has_state=has_state)
        if run.overruled:
            told = ", ".join(f"{key}={new!r} (it had {old!r})" for key, (old, new) in run.overruled.items())
            logger.info("resumed as this script asks: %s", told)
        is_stale = not run.overruled.keys() <= _NO_PLANNING
        return {
            "_wishes": run.wishes,
            "_progress": dataclasses.replace(run.progress, stale=run.progress.stale or is_stale),
            "_facts": run.facts,
            "_names": run.planned,
            "_sampler": run.sampler,
            "_has_stepped": run.progress.steps > 0,
        }

    def _read_foreign(self, loaded: checkpoint.Prepared, params: dict[str, Tensor]) -> dict[str, Any]:
        """From a checkpoint of an optimizer that does not plan: a warm-up goes on with its plan, under its names."""
        names = dict(zip(self._params(), params))
        roles = {names[name]: role for name, role in self._facts.roles.items() if name in names}
        regime = loaded.plan.settings.get("regime")  # the weights of a run that goes on do not tell how it began
        facts = dataclasses.replace(
            self._facts, roles=roles, regime=regime if regime in REGIMES else self._facts.regime
        )
        sampler = None if self._sampler is None else resume.renamed(self._sampler, names, params)
        return {"_names": [names[name] for name in self._names], "_facts": facts, "_sampler": sampler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._agreed = self._is_told = False
        if "_tokens" in state:  # a copy
            return
        self._show_samples()
        self._follow_tokens()

    def _follow_tokens(self) -> None:
        """Tokens are counted in a run's first step, and only there."""
        is_first = self._facts.tokens is None and not self._progress.steps
        if self._tokens is not None and not is_first:
            self._tokens.stop()
            self._tokens = None
        module = self._module() if self._module is not None else None
        if self._tokens is None and is_first and module is not None:
            self._tokens = TokenCounter(module)

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_asked",
            "_wishes",
            "_progress",
            "_names",
            "_facts",
            "_tokens",
            "_sampler",
            "_quiet",
            "_promotes",
            "_promotions",
        )
        kept = super().__getstate__() | {name: self.__dict__[name] for name in own}
        return kept | {"_group": None, "_module": None}  # neither can be copied

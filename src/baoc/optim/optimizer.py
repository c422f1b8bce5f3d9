"""``BlockOptimizer``: a ``torch.optim.Optimizer`` that updates each block of parameters with its own configuration."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration, parse
from baoc.core.fused import requested
from baoc.core.mechanisms import known_settings
from baoc.core.plan import Plan
from baoc.core.roles import roles_of
from baoc.core.sharding import place_of
from baoc.core.spec import DEFAULT_BETAS, LOW_PRECISION, SMALLEST_WEIGHT, real_shape
from baoc.core.splits import Request, matched
from baoc.core.text import check_names, one_line
from baoc.optim import checkpoint, groups, kernels, low_bits, migrate
from baoc.optim.agreement import Peers
from baoc.optim.assignment import Assignment, weight_of_casts
from baoc.optim.engine import Engine, collect_jobs
from baoc.optim.groups import Group
from baoc.optim.guard import Guard, Watch
from baoc.optim.kernels import graphs
from baoc.optim.kernels.job import advance_ages
from baoc.optim.members import Member, Members, refuse_offloading, refuse_two_answers
from baoc.optim.staging import BUCKET_BYTES, bucket_bytes
from baoc.optim.state import held_bytes, state_bytes

if TYPE_CHECKING:
    from baoc.optim.release import ReleasedGradients

DEFAULT_CONFIGURATION = "adamw-32"


class BlockOptimizer(torch.optim.Optimizer):
    """Updates each block of parameters with its own update rule and state formats.

    State is allocated when a plan is set: at construction, in :meth:`set_plan`, :meth:`add_param_group` and
    :meth:`load_state_dict`. State that has seen no gradient follows a model that moves to another device or is sharded.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. A group may have its
            own ``configuration``. A parameter that is listed twice is updated once.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``. SGD's momentum is ``betas[0]``.
        plan: a :class:`~baoc.Plan`, or one configuration for all parameters, such as ``"adamw-8"``, or ``"muon-8 else
            adamw-8"`` if the first does not suit all. Without a plan every parameter gets ``adamw-32``, and
            ``load_state_dict`` takes over the plan of the checkpoint. With one, ``load_state_dict`` migrates a
            checkpoint of another plan.
        kernel: ``"auto"``, ``"native"``, ``"triton"``, ``"compiled"`` or ``"eager"``; see :attr:`kernel`.
        on_nonfinite: what to do with a step that has non-finite gradients. ``"step"`` makes it, as torch does;
            ``"skip"`` leaves weights, state and ages unchanged; ``"raise"`` raises before anything changes. Each is
            counted in :meth:`metrics` and logged once. See :class:`~baoc.optim.guard.Guard`.
        offload: whether state is in host memory while parameters are on a device: of all blocks (``True``), of none
            (``False``), or of those whose :attr:`~baoc.Block.host` the plan sets (``None``). The host then makes the
            update, and gradients and parameters are copied in buckets. On a CPU it changes nothing.
        split: parameters that are several matrices, such as queries, keys and values in one weight. Rules that work on
            whole matrices (Muon, NorMuon, Spectral) then treat each by itself. ``None``: those of ``plan`` if it is a
            :class:`~baoc.Plan`, else detected in the module. ``False``: none. ``"heads"``: detected, one matrix for
            each attention head. A mapping such as ``{"*.qkv.weight": (768, 768, 768)}``: these, with ``*`` for any
            characters, sizes of rows, and :class:`~baoc.Split` for columns.
        offload_bucket: the host memory of a bucket, such as ``"64MiB"``; there are three.
        settings: hyper-parameters of single update rules, such as ``update_rms``, ``nesterov_momentum``,
            ``momentum_rise`` and ``newton_schulz`` (``momentum`` and ``ns_coefficients`` of ``torch.optim.Muon``), or
            ``beta2_decay``, ``adafactor_eps`` and ``clip_threshold`` (``beta2_decay``, ``eps`` and ``d`` of
            ``torch.optim.Adafactor``).

    Example:
        >>> model = nn.Linear(256, 128)
        >>> optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-8")
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
        >>> print(optimizer.plan)
        block  tensors  params  configuration     state  lr
        -----  -------  ------  -------------  --------  --
        all          2   32.9K  adamw-8        65.2 KiB   -
        65.2 KiB of state, 50.6% of AdamW16's 129.0 KiB
    """

    _release: ReleasedGradients | None = None  # while gradients are released; not part of copies
    _saved_norms = ""  # of the last step, from a checkpoint
    _seen_weights: low_bits.Sight | None = None  # after the last step
    _expected_weights: tuple[int, ...] = ()  # fingerprints of the weights that loaded low bits belong to

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        plan: Plan | Configuration | str | None = None,
        maximize: bool = False,
        kernel: str = "auto",
        on_nonfinite: str = "step",
        offload: bool | None = None,
        offload_bucket: int | str = BUCKET_BYTES,
        split: Request = None,
        **settings: Any,
    ) -> None:
        self._setup(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize},
            settings,
            configuration=None if isinstance(plan, Plan) else plan,
            kernel=kernel,
            on_nonfinite=on_nonfinite,
            offload=offload,
            offload_bucket=offload_bucket,
            split=split,
        )
        assignment, members = self._assignment, self._current_members()
        assignment.is_given |= plan is not None
        if isinstance(plan, Plan):
            roles = assignment.roles_of(members.shapes)
            defaults = Plan.uniform(assignment.default, members.shapes, roles, members.dtypes)
            refuse_two_answers(members.all, defaults)
            plan.check(members.shapes)
            if split is None:
                assignment.splits = plan.splits
            chosen = plan.split(assignment.splits)
        else:
            Plan.refuse_unsuited(assignment.default, members.shapes, assignment.roles_of(members.shapes))
            chosen = assignment.plan
        if plan is not None:
            groups.refuse_idle(chosen, settings)
        chosen = chosen.with_low_bits(members.low_precision, SMALLEST_WEIGHT)
        weight = weight_of_casts(assignment.default if plan is None else plan)
        self._install_plan(chosen if offload is None else chosen.offloaded(host=offload), weight)

    def _setup(
        self,
        params: nn.Module | Iterable[Any],
        defaults: Mapping[str, Any],
        settings: Mapping[str, Any],
        *,
        configuration: Configuration | str | None = None,
        kernel: str = "auto",
        on_nonfinite: str = "step",
        offload: bool | None = None,
        offload_bucket: int | str = BUCKET_BYTES,
        split: Request = None,
        peers: Peers | None = None,
    ) -> None:
        """Do everything that a constructor does, except to choose a plan and install it. Allocates no state.

        ``defaults`` are lr, betas, eps, weight_decay and maximize of the param groups. ``configuration`` is that of
        groups that have none of their own, ``adamw-32`` by default. ``peers`` are ranks that train the same model. The
        others are as in the constructor.
        """
        own = {setting.name: setting.default for setting in known_settings().values()}
        arguments = [name for name in inspect.signature(type(self).__init__).parameters if name != "self"]
        check_names(settings, type(self).__name__, (*arguments, *own))
        if offload not in (None, True, False):
            raise ValueError(
                f"offload must be True (state of all blocks in host memory), False or None, got {offload!r}. To "
                "offload some blocks, pass a plan such as plan.offloaded('matrices')."
            )
        self._engine = Engine(kernel, bucket_bytes(offload_bucket))
        self._guard = Guard(on_nonfinite, peers)
        self._watch = Watch()
        roles = roles_of(params) if isinstance(params, nn.Module) else {}
        default = parse(DEFAULT_CONFIGURATION if configuration is None else configuration)
        self._assignment = Assignment(
            default, roles, requested(split, params), splits_given=split is not None, offload=offload
        )
        self._steps = 0  # made since construction or load
        defaults = groups.with_plain_numbers({**defaults, **own, **settings})
        groups.check_hyper(defaults, "the defaults")
        super().__init__(groups.named(params), defaults)
        if isinstance(split, Mapping):
            shapes = {name: real_shape(param) for name, param in groups.named_params(self.param_groups)}
            matched(self._assignment.splits, shapes, all_used=True)

    # ---- a step ----

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step. Everything is checked before anything changes.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, or ``None`` without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_step()
        return loss

    @torch.no_grad()
    def _make_step(self, *, must_know: bool = False) -> bool:
        """Make one step from the gradients that are there, and return whether it was made.

        It is not made if no parameter has a gradient, if non-finite gradients are skipped, or while a CUDA graph is
        captured, which only records the launches.

        Args:
            must_know: the return value must be final. Otherwise a GPU kernel may skip non-finite gradients by itself,
                and the host learns it in :meth:`synchronize`.
        """
        if self._release is not None:
            return self._release.finish()
        self.synchronize()
        members = self._current_members()
        self._check_low_bits()
        jobs = collect_jobs(members.all, self.param_groups, self.state)
        if not jobs:
            if members.all:  # other ranks may have gradients, and ask this one
                self._guard.admits({members.all[0].param.device: []}, members.ranks)
            return False
        kernel_of = {device: self._engine.kernel_for(device, mine) for device, mine in jobs.items()}
        if any(map(graphs.is_capturing, jobs)):
            self._guard.refuse_capture()
            for device, kernel in kernel_of.items():
                kernels.record(kernel, jobs[device])
            return False
        late = not must_know and kernels.reads_flag(kernel_of.values())
        if not self._guard.admits(jobs, members.ranks, late):
            return False
        self._watch.begin(members.all)
        self._seen_weights = None  # of a step that is interrupted, none were seen
        flag = self._guard.flag
        suspects = {
            device: jobs[device] for device, kernel in kernel_of.items() if kernels.run(kernel, jobs[device], flag)
        }
        for mine in jobs.values():
            advance_ages(mine)
        self._guard.note(suspects)
        self._watch.end()
        self._seen_weights = low_bits.sight(members.all)
        self._steps += 1
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. If gradients are released, it also forgets a step whose backward pass failed on the way.

        Args:
            set_to_none: free gradients instead of setting them to zero.
        """
        if self._release is not None:
            self._release.abandon()
        super().zero_grad(set_to_none)

    def _begin(self) -> None:
        """For subclasses: get ready for a step, before its first update."""

    @property
    def _obstacle_to_release(self) -> str | None:
        """For subclasses: why gradients must be kept until :meth:`step`, and what to do about it."""
        return None

    def synchronize(self) -> None:
        """Wait until it is known whether the last step was made, if a GPU decided that (``on_nonfinite="skip"``).

        Every method that reads or writes state does it first. Only code that reads ages from :attr:`state` directly may
        see one step too many. See ``docs/guard-rails.md``.
        """
        if self._guard.synchronize() is False:
            self._steps -= 1

    # ---- param groups and checkpoints, as in torch.optim.Optimizer ----

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group, as in torch.

        Args:
            param_group: as in torch. Its ``configuration``, if any, is what its parameters are updated with.
        """
        self._join_group(param_group)
        if self._assignment.is_installed:
            try:
                self._current_members()
            except BaseException:
                del self.param_groups[-1]
                raise

    def _join_group(self, param_group: Group) -> list[str]:
        """Register a param group, extend the plan, and return the names of the new parameters. Allocates no state.

        If it fails or is interrupted, the group is not registered.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        assignment = self._assignment
        assignment.finish_change()
        index, before = len(self.param_groups), assignment.plan
        group = groups.with_plain_numbers(param_group)
        groups.check_hyper({**self.defaults, **group}, f"param group {index}")
        configuration = parse(group.pop("configuration", assignment.default))
        try:
            super().add_param_group(group)
            groups.without_duplicates(self.param_groups[index])
            named = [(name, param) for name, param in groups.named_params(self.param_groups) if name not in before]
            plan = assignment.extended(before, index, configuration, named)
            new = (Member(name, param, group, plan.block_of(name), place_of(param, name)) for name, param in named)
            refuse_offloading(new, plan)
            checkpoint.reserve(self.param_groups, checkpoint.PLAN)
            if any(param.dtype in LOW_PRECISION for _, param in named):
                checkpoint.reserve(self.param_groups, checkpoint.WEIGHTS)
            assignment.plan = plan
        except BaseException:
            del self.param_groups[index:]
            assignment.plan = before
            raise
        assignment.is_given |= "configuration" in param_group
        return [name for name, _ in named]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, with the plan. Every parameter has an entry, if only an empty one.

        State of parameters that have left is not in it, but stays with the optimizer: they may come back.
        """
        self.synchronize()
        plan, everything = self.plan, self.state
        known = {id(member.param) for member in self.members()}
        try:
            self.state = defaultdict(
                dict, {key: held for key, held in everything.items() if not isinstance(key, Tensor) or id(key) in known}
            )
            packed = super().state_dict()
        finally:
            self.state = everything
        checkpoint.write_plan(packed["param_groups"], plan)
        weights = low_bits.text(self.members(), self._expected_weights)
        checkpoint.write(packed["param_groups"], checkpoint.WEIGHTS, weights)
        if self._release is not None:
            checkpoint.write(packed["param_groups"], checkpoint.NORMS, self._release.text())
        for key in (key for group in packed["param_groups"] for key in group["params"]):
            packed["state"].setdefault(key, {})
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of ``torch.optim``'s AdamW, Adam, SGD or Adafactor.

        The checkpoint is checked as a whole before anything changes. torch's own loader would cast codes and scales to
        the dtype of the parameter, so this method replaces it, hooks included. torch's state dicts do not say which
        optimizer wrote them: their state is migrated into the current plan.

        Args:
            state_dict: the result of :meth:`state_dict`.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit the optimizer.
        """
        self.synchronize()
        state_dict = checkpoint.copied(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        members, assignment = self.members(), self._assignment
        own_plan = self.plan if assignment.is_given else None
        loaded = checkpoint.prepare(state_dict, members, self.param_groups, own_plan, assignment.offload, self.state)
        extra = self._read_extra(loaded)
        splits = assignment.splits
        if not assignment.splits_given:  # a run goes on with the matrices that it has
            splits = {name: split for name, split in {**splits, **loaded.splits}.items() if split is not None}
        assignment = assignment.changed(plan=loaded.plan.split(splits), splits=splits, is_installed=True)
        content = {"state": loaded.state, "param_groups": loaded.param_groups, "_assignment": assignment}
        own = {"_saved_norms": loaded.norms, "_expected_weights": loaded.weights, "_seen_weights": None}
        self.__setstate__({**content, "_steps": 0, **own, **extra})
        if self._release is not None:
            self._release.load(loaded.norms)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def prepare_for_load(self, state_dict: dict[str, Any]) -> None:
        """Take over the plan of a state dict that has no state yet, and allocate state in its layout.

        See :func:`baoc.prepare_for_load`.

        Args:
            state_dict: a state dict with a plan; its tensors are not read.
        """
        self._assignment.is_given = False
        self.load_state_dict(state_dict)

    def _read_extra(self, loaded: checkpoint.Prepared) -> dict[str, Any]:
        """For subclasses: return attributes that a checkpoint sets. An error refuses the checkpoint as a whole."""
        return {}

    def clear_low_bits(self) -> None:
        """Set the low bits of all weights to zero, so that the 16-bit parameters as they are now are the weights.

        Call it after weights were loaded that the low bits in slot ``w`` do not belong to.
        """
        low_bits.clear(self)

    def _check_low_bits(self) -> None:
        """Refuse to train weights with the low bits of others, before a step."""
        if self._expected_weights:
            low_bits.check(self.members(), self._expected_weights)
            self._expected_weights = ()
        low_bits.check_written(self.members(), self._seen_weights)

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        self._assignment.finish_change()
        own = {name: self.__dict__[name] for name in ("_engine", "_guard", "_watch", "_steps")}
        return super().__getstate__() | own | {"_assignment": self._assignment.changed()}

    # ---- plans ----

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        rows, plan = self._current_members().rows, self._assignment.plan
        return plan if plan.rows == rows else dataclasses.replace(plan, rows=rows)

    def _install_plan(self, plan: Plan, weight: str = SMALLEST_WEIGHT) -> None:
        """Set the first plan and allocate the state of every trainable parameter."""
        self._assignment.install(plan, self._current_members(), weight)
        low_bits.warn_of_lost_updates(self.members())

    def set_plan(self, plan: Plan | Configuration | str, *, inherit: bool = True) -> None:
        """Change configurations in the middle of training.

        State is converted one parameter or slot at a time, within the memory of the larger plan and 16 MiB: where old
        and new state do not fit side by side, the old one waits in host memory, or in a temporary file if it is there
        already. If this is interrupted, every parameter is either in its old block or in its new one, and training can
        go on.

        Args:
            plan: a plan for all parameters, or one configuration. A block without ``lr_scale`` gets the one under which
                its next update is as long as its last. A plan also says which state is offloaded.
            inherit: convert the old state. Otherwise the new state starts from zeros.

        Example:
            >>> model = nn.Linear(64, 64)
            >>> optimizer = BlockOptimizer(model, plan="adamw-32")
            >>> optimizer.set_plan("sgdm-8")
            >>> optimizer.plan.state_bytes
            4416
        """
        weight = weight_of_casts(plan)
        if not isinstance(plan, Plan):
            plan = self._assignment.uniform(plan, self._current_members())
        self._change_plan(plan, weight, inherit=inherit)

    @torch.no_grad()
    def _change_plan(
        self, plan: Plan, weight: str = SMALLEST_WEIGHT, *, inherit: bool, attempt: migrate.Attempt = migrate.alone
    ) -> None:
        """Convert all state to a plan. ``attempt`` calls what may fail for lack of memory and asks no other rank."""
        self.synchronize()
        members, has_stepped = self._current_members(), self._steps > 0
        self._assignment.change(
            plan, members, self.state, weight, has_stepped=has_stepped, inherit=inherit, attempt=attempt
        )
        low_bits.take_over(self.members(), self.state)
        low_bits.warn_of_lost_updates(self.members())

    # ---- parameters and their state ----

    def members(self) -> tuple[Member, ...]:
        """Return every parameter with its name, group and block, in order."""
        return self._current_members().all

    def _current_members(self) -> Members:
        """Return all members, cached until groups, parameters, shapes or the plan change."""
        members = self._assignment.current(self.param_groups)
        if members is None:
            if names := self._assignment.renamed(self.param_groups):
                self._rename(names)
            members = self._assignment.follow(self.param_groups, self.state)
        return members

    def _rename(self, names: Mapping[str, str]) -> None:
        """For subclasses: parameters have new names, here by old ones. Those that are not there have left."""

    # ---- what a logger shows ----

    @property
    def kernel(self) -> str:
        """Which kernel runs on which device, and why; and what it leaves to torch operations, which are slower."""
        return self._engine.describe(self.members(), self.state)

    def metrics(self) -> dict[str, float]:
        """Return numbers of the run so far, flat, for TensorBoard, W&B and the like.

        - ``state_bytes``: bytes of state on this rank. With offloaded blocks also ``host_bytes``, those in host memory,
          and ``staging_bytes``, those of the buffers through which they are updated.
        - ``nonfinite_steps``, ``skipped_steps``, ``clipped_steps``.
        - ``update_rms/<block>``: the RMS of the last update (absolute, decay included), from the second call on.
        - ``underflow/<block>``: the fraction of the block's int8 and int4 groups that underflow. From 0.5 on it is
          logged as a warning, once per block.

        The last two are estimated from small samples when they are asked for. On a GPU this waits for the device.

        Example:
            >>> model = nn.Linear(64, 64)
            >>> optimizer = BlockOptimizer(model, plan="adamw-8")
            >>> model(torch.ones(1, 64)).sum().backward()
            >>> optimizer.step()
            >>> numbers = optimizer.metrics()
            >>> numbers["state_bytes"], numbers["skipped_steps"], numbers["underflow/all"]
            (8832.0, 0.0, 0.0)
        """
        self.synchronize()
        counts, members = self._guard.counts, self.members()
        numbers = {
            "state_bytes": state_bytes(self),
            "nonfinite_steps": counts.nonfinite,
            "skipped_steps": counts.skipped,
            "clipped_steps": counts.clipped,
        }
        on_host = [member for member in members if member.block.host]
        if on_host:
            held = [self.state.get(member.param, {}).get(key) for member in on_host for key in member.layout.buffers]
            numbers |= {"host_bytes": held_bytes(held), "staging_bytes": self._engine.staging_bytes}
        return {key: float(number) for key, number in {**numbers, **self._watch.numbers(members, self.state)}.items()}

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ({one_line(self.plan)}"]
        hidden = ("params", "param_names", *checkpoint.CARRIED)
        usual = {"maximize": False} | {setting.name: setting.default for setting in known_settings().values()}
        for index, group in enumerate(self.param_groups):
            shown = {key: group[key] for key in group if key not in hidden}
            numbers = [f"{key}: {value}" for key, value in shown.items() if usual.get(key, self) != value]
            lines.append(f"Parameter Group {index}: {len(group['params'])} tensors, {', '.join(numbers)}")
        return "\n".join([*lines, ")"])

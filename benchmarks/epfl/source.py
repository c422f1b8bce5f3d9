"""Run their ``src/main.py`` as it is, but for one branch where it makes the optimizer."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import baoc

Entry = Callable[[list[dict[str, Any]], Mapping[str, nn.Parameter], Any], torch.optim.Optimizer]
"""Makes an optimizer of their param groups, the parameters by name, and their arguments."""

ANCHOR = '    if args.opt == "adamw":\n'
BRANCH = "    if args.opt in ENTRIES:\n        opt = ENTRIES[args.opt](group_specs, param_name_mapping, args)\n    el"
STUBS = {"wandb": {}, "tiktoken": {"get_encoding": lambda name: None}}
"""Packages that they import but that characters on one machine do not need, with what must be there."""


class SourceError(ValueError):
    """Their code is not there, or is not what this was written for."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: loss and accuracy on all validation batches at the end, and what the optimizer held."""

    loss: float
    accuracy: float
    state_bytes: int
    parameters: int


def patched(text: str) -> str:
    r"""Return their main module with a branch for our entries.

    Example:
        >>> print(patched(ANCHOR + "        opt = theirs\n"))
            if args.opt in ENTRIES:
                opt = ENTRIES[args.opt](group_specs, param_name_mapping, args)
            elif args.opt == "adamw":
                opt = theirs
        <BLANKLINE>
    """
    if text.count(ANCHOR) != 1:
        raise SourceError(
            f"src/main.py should have the line {ANCHOR.strip()!r} once, and has it {text.count(ANCHOR)}x."
        )
    return text.replace(ANCHOR, BRANCH + ANCHOR.lstrip())


def named_groups(groups: Sequence[Mapping[str, Any]], named: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return param groups with the names of their parameters, by which BAOC knows embeddings and norms."""
    names = {id(param): name for name, param in named.items()}
    return [{**group, "params": [(names[id(param)], param) for param in group["params"]]} for group in groups]


def budgeted(memory: str | float) -> Entry:
    """Return the entry of BAOC: their lr, betas and weight decay, all else at our defaults."""

    def make(groups: list[dict[str, Any]], named: Mapping[str, nn.Parameter], args: Any) -> torch.optim.Optimizer:
        settings = {"lr": args.lr, "betas": (args.beta1, args.beta2), "weight_decay": args.weight_decay}
        return baoc.BAOC(named_groups(groups, named), **settings, memory=memory, verbose=False)

    return make


def load(source: Path, entries: Mapping[str, Entry]) -> types.ModuleType:
    """Import their main module with our entries. Their packages become importable in this process."""
    path = source / "src" / "main.py"
    if not path.is_file():
        raise SourceError(f"there is no {str(path)!r}. Give the folder of epfml/llm-optimizer-benchmark.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = types.ModuleType("epfl_main")
    vars(module).update(ENTRIES=entries, __file__=str(path))
    with _stubs():
        exec(compile(patched(path.read_text(encoding="utf-8")), str(path), "exec"), vars(module))
    return module


@contextlib.contextmanager
def _stubs() -> Iterator[None]:
    """Make absent packages importable. Others must not find them later: transformers looks for ``wandb``."""
    absent = [name for name in STUBS if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in absent:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(STUBS[name])
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def run(module: types.ModuleType, text: Path, opt: str, arguments: Sequence[str]) -> Outcome:
    """Train once.

    Args:
        module: of :func:`load`.
        text: what they would download: the raw text of ``shakespeare-char``.
        opt: the value of their ``--opt``, or one of our entries.
        arguments: the others, as for their command line.
    """
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, _recorded(module, found), contextlib.redirect_stdout(io.StringIO()):
        (Path(folder) / "shakespeare").mkdir()
        shutil.copy(text, Path(folder) / "shakespeare" / "raw.txt")
        given = [*arguments, "--datasets_dir", folder, "--results_base_folder", folder]
        is_ours = opt in module.ENTRIES
        with mock.patch.object(sys, "argv", ["main.py", *given, *([] if is_ours else ["--opt", opt])]):
            args, parser = module.get_args()
        if is_ours:
            args.opt = opt
        module.main(args, parser)
    return found[-1]


@contextlib.contextmanager
def _recorded(module: types.ModuleType, found: list[Outcome]) -> Iterator[None]:
    """Note the scores of each evaluation in full precision; they print three digits."""
    base = sys.modules[module.train.__module__]
    evaluate, train, optimizers = base.eval, module.train, []

    def training(model: nn.Module, opt: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizers.append(opt)
        return train(model, opt, *args, **kwargs)

    def evaluating(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scores = evaluate(model, *args, **kwargs)
        parameters = sum(param.numel() for param in model.parameters())
        found.append(Outcome(scores[1], scores[0], baoc.state_bytes(optimizers[-1]), parameters))
        return scores

    no_gpu = mock.patch("torch.cuda.current_device", return_value="cpu")  # their d-muon asks, and does not use it here
    with mock.patch.object(base, "eval", evaluating), mock.patch.object(module, "train", training), no_gpu:
        yield

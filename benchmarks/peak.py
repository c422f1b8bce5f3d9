"""Memory of whole training runs, each in a fresh process: weights, low bits, gradients and state, and checkpoints.

    python -m benchmarks.peak [--method METHOD ...] [--model MODEL ...] [--rows FILE] [--limit SECONDS]

A process builds a model with random weights, trains it for a few steps on sequences that are so short that activations
do not matter, and reports three things:

- what tensors hold: every storage of weights and state once, and the most bytes of gradients that exist at once;
- what is resident (``VmRSS``) beyond what the process had before the model: with gradients after a backward pass where
  they are kept, after a step where they are released;
- the peak (``VmHWM``) of a step, with activations, scratch memory and copies of weights.

Predictions are those of ``baoc fit``. A method that does not run here, or not within the limit, is in the table with
its reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import baoc
from baoc.core.roles import roles_of
from baoc.optim.state import held_bytes
from baoc.planners.total import parts_of
from baoc.tools.fit.memory import Measured, Setup
from experiments.process import forget_peak, peak_bytes, resident_bytes, return_freed

PLAN = "muon[m=int8,w=8] else adamw[m=int8,v=factored,w=8]"
TOKENS, STEPS, LR = 8, 2, 1e-4
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors go back to the system at once
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "TORCHDYNAMO_DISABLE": "1",  # torchao compiles its update, and a compiler takes more memory than the models here
    "OMP_NUM_THREADS": "1",
}


def gpt2_small() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))  # type: ignore[no-any-return]


def smollm2_135m() -> nn.Module:
    """Return a model of SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2-small": gpt2_small, "smollm2-135m": smollm2_135m}


# ---- methods ----


class Run:
    """A model with its optimizer. ``step`` trains; ``release`` says that gradients are released."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, release: bool = False, autocast: bool = False
    ):
        self.model, self.optimizer, self.release, self.autocast = model, optimizer, release, autocast

    def backward(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 1000, (1, TOKENS), generator=generator)
        context = torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with context:
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def torch_fp32(model: nn.Module) -> Run:
    return Run(model, torch.optim.AdamW(model.parameters(), lr=LR))


def torch_autocast(model: nn.Module) -> Run:
    return Run(model, torch.optim.AdamW(model.parameters(), lr=LR), autocast=True)


def torchao_8bit(model: nn.Module) -> Run:
    from torchao.optim import AdamW8bit

    model = model.bfloat16()
    return Run(model, AdamW8bit(model.parameters(), lr=LR, bf16_stochastic_round=True))


def bitsandbytes_8bit(model: nn.Module) -> Run:
    import bitsandbytes

    model = model.bfloat16()
    return Run(model, bitsandbytes.optim.AdamW8bit(model.parameters(), lr=LR))


def flashoptim(model: nn.Module) -> Run:
    from flashoptim import FlashAdamW, cast_model  # type: ignore[import-not-found]

    cast_model(model, torch.bfloat16)
    return Run(model, FlashAdamW(model.parameters(), lr=LR, master_weight_bits=24))


def ours(model: nn.Module) -> Run:
    baoc.to_low_precision(model, torch.bfloat16)
    return Run(model, baoc.BlockOptimizer(model, lr=LR, plan=PLAN))


def ours_released(model: nn.Module) -> Run:
    run = ours(model)
    baoc.release_gradients(run.optimizer, max_norm=1.0)  # type: ignore[arg-type]
    run.release = True
    return run


METHODS: dict[str, tuple[str, Callable[[nn.Module], Run]]] = {
    "torch-fp32": ("torch AdamW, fp32", torch_fp32),
    "torch-autocast": ("torch AdamW, fp32 weights, bf16 autocast", torch_autocast),
    "torchao": ("torchao AdamW8bit, bf16 weights, stochastic rounding", torchao_8bit),
    "bitsandbytes": ("bitsandbytes AdamW8bit, bf16 weights", bitsandbytes_8bit),
    "flashoptim": ("FlashAdamW, bf16 weights and 8-bit remainders", flashoptim),
    "ours": (f"baoc `{PLAN}`, bf16 weights", ours),
    "ours-released": ("the same, gradients released", ours_released),
}


# ---- one run, in a process of its own ----


def measure(model_name: str, method: str) -> dict[str, Any]:
    """Train and return bytes per parameter."""
    _, make = METHODS[method]
    warm = make(nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64)))  # imports, threads and kernels
    warm.model(torch.zeros(1, dtype=torch.long)).square().mean().backward()
    warm.step()
    del warm
    with torch.device("meta"):
        MODELS[model_name]()  # imports the model's code
    return_freed()
    before = resident_bytes()
    torch.manual_seed(0)
    run = make(MODELS[model_name]())
    params = list(run.model.parameters())
    numel = sum(param.numel() for param in params)
    largest = _watch_gradients(params)
    resident = peak = 0
    for step in range(STEPS):
        return_freed()
        forget_peak()
        run.backward(step)
        if not run.release:
            return_freed()
            resident = resident_bytes()
        run.step()
        peak = peak_bytes()
    if run.release:
        return_freed()
        resident = resident_bytes()
    weights, state = held_bytes([*params, *run.model.buffers()]), baoc.state_bytes(run.optimizer)
    gradients = max(largest)
    low_bits = _low_bits(run)
    found = {
        "weights": weights, "low bits": low_bits, "gradients": gradients, "state": state - low_bits,
        "resident": resident - before, "peak": peak - before, "checkpoint": _checkpoint_bytes(run),
    }  # fmt: skip
    return {name: nbytes / numel for name, nbytes in found.items()} | {"parameters": numel}


def _watch_gradients(params: Sequence[nn.Parameter]) -> list[int]:
    """Return a list that receives the bytes of all gradients whenever one is complete."""
    seen = [0]

    def look(_: Tensor) -> None:
        seen[0] = max(seen[0], held_bytes(param.grad for param in params))

    for param in params:
        param.register_post_accumulate_grad_hook(look)
    # hooks run in the order in which they were registered, and released gradients are gone in this one
    hooks = [hook for param in params for hook in [param._post_accumulate_grad_hooks] if hook]
    for each in hooks:
        *before, last = each.items()
        each.clear()
        each.update([last, *before])
    return seen


def _low_bits(run: Run) -> int:
    total = 0
    for member in run.optimizer.members() if isinstance(run.optimizer, baoc.BlockOptimizer) else ():
        formats = [stored for stored in member.layout.formats if stored.slot.of_weight]
        total += sum(buffer.nbytes for stored in formats for buffer in stored.buffers)
    return total


def _checkpoint_bytes(run: Run) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, path)
        return path.stat().st_size


# ---- all of them ----


def predicted(model_name: str, method: str) -> dict[str, float] | None:
    """Return what ``baoc fit`` predicts, in bytes per parameter; ``None`` for methods of others."""
    if not method.startswith("ours"):
        return None
    with torch.device("meta"):
        model = MODELS[model_name]()
    setup = Setup(dtype="bf16", length=TOKENS, release=method == "ours-released")
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    plan = baoc.Plan.uniform(PLAN, shapes, roles_of(model))
    memory, numel = Measured(model, activations=0).memory(setup), sum(map(math.prod, shapes.values()))
    return {name: each / numel for name, each in parts_of(plan, memory.weights, memory.gradients, 0).items()}


def runs(models: Sequence[str], methods: Sequence[str], limit: float | None = None) -> Iterator[dict[str, Any]]:
    """Yield what each process reports within ``limit`` seconds."""
    for model in models:
        for method in methods:
            command = [sys.executable, "-m", "benchmarks.peak", "--one", model, method]
            environment = {**os.environ, **ENVIRONMENT}
            try:
                result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            except subprocess.TimeoutExpired:
                yield {"model": model, "method": method, "failed": f"not finished after {limit:g} seconds"}
                continue
            lines = result.stdout.splitlines()
            if result.returncode == 0 and lines:
                yield {"model": model, "method": method, **json.loads(lines[-1])}
            else:
                reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
                yield {"model": model, "method": method, "failed": reason[:120]}


def page(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables, as Markdown."""
    parts = ("weights", "low bits", "gradients", "state")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        numel = next((row["parameters"] for row in mine if "parameters" in row), 0)
        lines += [f"## {model}, {numel / 1e6:.1f}M parameters", ""]
        lines += [
            "| Method | weights | low bits | gradients | state | all | predicted | resident | peak | checkpoint |",
            "| --- |" + " ---: |" * 9,
        ]
        for row in mine:
            name = METHODS[row["method"]][0]
            if "failed" in row:
                lines.append(f"| {name} | did not run: {row['failed']} |" + " |" * 8)
                continue
            total = sum(row[part] for part in parts)
            told = predicted(model, row["method"])
            foreseen = "-" if told is None else f"{sum(told.values()):.2f}"
            cells = [*(f"{row[part]:.2f}" for part in parts), f"**{total:.2f}**", foreseen]
            cells += [f"{row[name]:.2f}" for name in ("resident", "peak", "checkpoint")]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--method", choices=tuple(METHODS), action="append")
    parser.add_argument("--rows", type=Path, help="keep what processes report here, and do not repeat it")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of a process")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(*arguments.one)))
        return
    models, methods = arguments.model or tuple(MODELS), arguments.method or tuple(METHODS)
    rows = _read(arguments.rows)
    for model in models:
        for method in methods:
            if any((row["model"], row["method"]) == (model, method) for row in rows):
                continue
            for row in runs([model], [method], arguments.limit):
                rows.append(row)
                print(row, file=sys.stderr)
                if arguments.rows:
                    with arguments.rows.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print("\n".join(page(rows)))


def _read(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


if __name__ == "__main__":
    main()

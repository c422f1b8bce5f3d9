"""A small language model, sharded by FSDP2 and trained by BAOC, with checkpoints for any number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2.py                # on GPUs where there are some, else on the CPU
    torchrun --nproc-per-node 3 examples/fsdp2.py --steps 300    # later: resumes from the last checkpoint

The text is the help of Python itself. Every step has one batch, which the ranks share, so that the same steps are made
on any number of them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import baoc

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 128, 4, 64, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, WIDTH)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, letters: Tensor) -> Tensor:
        """Return the mean loss of each letter given those before it: (batch, LENGTH + 1) -> ()."""
        x = self.embed(letters[:, :-1]) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), letters[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of the whole run (default: %(default)s)")
    parser.add_argument("--memory", default="30%", help='such as "30%%", or "300KiB/rank" (default: %(default)s)')
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(letter) for letter in text])

    torch.manual_seed(0)  # all ranks begin with the same weights
    model = LanguageModel(len(alphabet)).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = baoc.BAOC(model, lr=3e-3, memory=args.memory)  # after fully_shard

    # a checkpoint is complete once it has its metadata
    complete = [path.parent for path in args.checkpoints.glob("*/.metadata")]
    first = 0
    if complete:
        first = load(model, optimizer, max(complete, key=lambda path: int(path.name)))
        say(f"resuming from step {first} on {ranks} ranks")

    for step in range(first, args.steps):
        letters = batch(data, step).chunk(ranks)[rank].to(device)  # (BATCH / ranks, LENGTH + 1)
        loss = model(letters)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            say(f"step {step + 1}: loss {mean.item():.3f}")
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(model, optimizer, args.checkpoints / str(step + 1))
    say(str(optimizer.plan))
    dist.destroy_process_group()


def batch(data: Tensor, step: int) -> Tensor:
    """Return the letters of a step, which depend on its number alone: (BATCH, LENGTH + 1)."""
    starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return data[starts + torch.arange(LENGTH + 1)]


def save(model: nn.Module, optimizer: baoc.BAOC, path: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load(model: nn.Module, optimizer: baoc.BAOC, path: Path) -> int:
    """Resume from a checkpoint. Return the step after which it was saved."""
    baoc.prepare_for_load(optimizer, path)  # the plan says which tensors there are to read
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(path.name)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()

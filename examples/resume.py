"""Train, save every few steps, and go on where it stopped: kill it whenever you like.

    torchrun --nproc-per-node 2 examples/resume.py --folder checkpoints --steps 200

Every checkpoint has a folder of its own, and is complete once its ``.metadata`` is there, which is
written last: a run that is killed while it saves leaves the one before untouched. It may go on with
another number of ranks or another ``--memory-limit``: other ranks hold other rows then.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPTConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

KEPT = 2  # checkpoints


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT that goes on where it stopped.")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--memory-limit", help="for one rank, such as 8MiB (default: none)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    return parser.parse_args()


def complete(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints that were saved to their end, with their steps, the oldest first."""
    found = (path.parent for path in folder.glob("step-*/.metadata"))
    return sorted((int(path.name.removeprefix("step-")), path) for path in found)


def save(model, optimizer, step: int, folder: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        for _, old in complete(folder)[:-KEPT]:
            shutil.rmtree(old)


def load(model, optimizer, folder: Path) -> int:
    """Load the last checkpoint; returns how many steps it has behind it."""
    step, path = max(complete(folder), default=(0, None))
    if path is not None:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    return step


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's batch of a step: the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 64, (4, 33), generator=generator).sort().values  # to be learnt
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build(memory_limit: str | None, device: torch.device | str = "cpu"):
    """The model, its optimizer, and what runs it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=64, layers=2, width=64, context=32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"memory_limit": memory_limit}
    return model, optimizer, torch.compile(model, backend="osdp", options=options)


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    model, optimizer, compiled = build(args.memory_limit)
    begun = load(model, optimizer, args.folder)
    for step in range(begun, args.steps):
        loss = compiled(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item()!r}", flush=True)
        if (step + 1) % args.every == 0:
            save(model, optimizer, step + 1, args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

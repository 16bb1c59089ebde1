"""Train on the hosts that are there: where one disappears or comes back, the others go on.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torch 2.13: else a host cannot join later
    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d \\
      --rdzv-endpoint FIRST_HOST:29400 examples/elastic.py --folder /shared/checkpoints

Start it on every host. torchrun restarts the ranks when their number changes. Each start plans for
the ranks that are there and goes on from the last checkpoint (``resume.py``): other ranks hold
other rows. A step has the same rows for any number of ranks, so the losses stay the same.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

import torch
import torch.distributed as dist
from resume import build, load, save

ROWS = 24  # of one step, on all ranks together: 1, 2, 3, 4, 6 or 8 ranks have equal shares


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the hosts that are there.")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="for all hosts")
    parser.add_argument("--memory-limit", help="for one rank, such as 8MiB (default: none)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="seconds until a collective gives up: after so long a cut cable is a lost host",
    )
    return parser.parse_args()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (ROWS, 33), generator=generator).sort().values  # to be learnt
    own = tokens[dist.get_rank() :: dist.get_world_size()]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def main() -> None:
    args, started = arguments(), time.perf_counter()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ROWS % ranks:
        raise SystemExit(f"{ROWS} rows cannot be shared equally by {ranks} ranks")
    model, optimizer, compiled = build(args.memory_limit)
    begun = load(model, optimizer, args.folder)
    for step in range(begun, args.steps):
        tokens, targets = batch(step)
        loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            if step == begun:
                seconds = time.perf_counter() - started
                print(f"{ranks} ranks go on after step {begun}, {seconds:.1f} s after their start")
            print(f"step {step + 1}  loss {mean.item() / ranks:.6f}  ranks {ranks}", flush=True)
        if (step + 1) % args.every == 0:
            save(model, optimizer, step + 1, args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

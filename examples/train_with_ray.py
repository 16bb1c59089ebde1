"""Train with Ray Train: its workers are the ranks, and restart from the last checkpoint.

    pip install "ray[train]"
    python examples/train_with_ray.py --workers 2 --folder /shared/checkpoints

Ray starts the workers and their process group. A worker that dies leads to a restart of all, which
goes on from the last checkpoint (``resume.py``). With ``--gpus`` every worker has a GPU, and the
process group is NCCL's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, get_device


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on Ray's workers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for every worker")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="for all hosts")
    parser.add_argument("--memory-limit", help="for one rank, such as 8MiB (default: none)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--max-failures", type=int, default=3)
    return parser.parse_args()


def train(config: dict[str, Any]) -> None:
    """The training of one worker. Its process group is there."""
    from elastic import batch  # of the working directory that Ray gives the workers
    from resume import build, load, save

    device, folder = get_device(), Path(config["folder"])
    model, optimizer, compiled = build(config["memory_limit"], device)
    for step in range(load(model, optimizer, folder), config["steps"]):
        loss = compiled(*(one.to(device) for one in batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % config["every"] == 0:
            save(model, optimizer, step + 1, folder)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean_loss = mean.item() / dist.get_world_size()
        ray.train.report({"step": step + 1, "loss": mean_loss})
        if dist.get_rank() == 0:  # Ray shows it on the driver
            print(f"step {step + 1}  loss {mean_loss:.6f}  ranks {dist.get_world_size()}")


def main() -> None:
    args = arguments()
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "folder": str(args.folder.absolute()),
            "memory_limit": args.memory_limit,
            "steps": args.steps,
            "every": args.every,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        torch_config=TorchConfig(backend="nccl" if args.gpus else "gloo"),
        run_config=ray.train.RunConfig(
            storage_path=str(args.folder.absolute() / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=args.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

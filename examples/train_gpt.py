"""Train a byte-level GPT on the source code of Python's standard library.

    torchrun --nproc-per-node 2 examples/train_gpt.py --memory-limit 112MiB
    python examples/train_gpt.py --memory-limit 208MiB --batch 16   # one process

One line is special, marked below. The rest is a plain training script.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

import osdp_compile
from passes.types.units import format_bytes

CONTEXT = 128
MEASURED_STEPS = 3  # peak memory is measured over these; measuring slows them down
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own library.")
    parser.add_argument("--memory-limit", help="for one rank, such as 112MiB (default: none)")
    parser.add_argument("--plan", help="a saved plan, to use instead of searching for one")
    parser.add_argument("--save-plan", help="where to save the plan")
    parser.add_argument("--html", type=Path, help="where to write the report as a page")
    parser.add_argument("--seconds", type=float, default=120, help="how long to train")
    parser.add_argument("--steps", type=int, help="how many steps to train, instead of --seconds")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help=f"rows of {CONTEXT} bytes a rank")
    parser.add_argument("--sample", type=int, default=300, help="bytes to write at the end")
    return parser.parse_args()


def standard_library() -> tuple[Tensor, Tensor]:
    """The library's text as bytes: to train on, and every 20th file held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not SKIPPED & set(p.relative_to(root).parts))
    held_out = files[::20]
    train = [path for i, path in enumerate(files) if i % 20]
    texts = [b"".join(path.read_bytes() for path in paths) for paths in (train, held_out)]
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)


def random_batch(text: Tensor, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of the text [rows, CONTEXT], and the same windows one byte later."""
    starts = torch.randint(len(text) - CONTEXT - 1, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def mean_over_ranks(*values: float) -> list[float]:
    """The mean of each value over all ranks, the same on every rank."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.tolist()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, rows: int) -> float:
    """Mean loss of 8 batches, other ones on every rank."""
    model.eval()
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    batches = [random_batch(text, rows, generator) for _ in range(8)]
    losses = [model(tokens, targets).item() for tokens, targets in batches]
    return mean_over_ranks(sum(losses) / len(losses))[0]


@torch.no_grad()
def generate(model: nn.Module, prompt: str, length: int, temperature: float = 0.6) -> str:
    """Continue a prompt. Every rank must call it: a sharded weight is gathered from all of them.

    The window has one size, so that the model is compiled once and not for every length.
    What lies right of the last byte is not seen: attention is causal.
    """
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(prompt.encode()))
    for _ in range(length):
        seen = text[-CONTEXT:]
        logits = model(F.pad(seen, (0, CONTEXT - len(seen)))[None])[0, len(seen) - 1]
        chances = (logits / temperature).softmax(0)
        text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)])
    return bytes(text.tolist()).decode(errors="replace")


def join_ranks() -> tuple[int, int]:
    """Join the ranks that torchrun started. Returns this rank and the number of ranks."""
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def show_report(model: nn.Module, peak_bytes: int, console: Console, html: Path | None) -> None:
    """Print step time and peak memory, predicted and measured; on rank 0 write the page too."""
    if osdp_compile.plan_of(model) is None:
        console.print(f"measured peak memory: {format_bytes(peak_bytes)}")
        if html:
            console.print("no page: one rank without a limit has no plan")
        return
    report = osdp_compile.report(model, peak_bytes=peak_bytes)
    console.print(report)
    if html and not console.quiet:
        html.parent.mkdir(parents=True, exist_ok=True)
        report.save_html(html)
        console.print(f"the plan, the step and its memory as a page: open {html}")


def main() -> None:
    args = arguments()
    rank, world_size = join_ranks()
    console = Console(quiet=rank != 0)
    train_text, held_out_text = standard_library()
    console.print(f"{len(train_text):,} bytes of text, {len(held_out_text):,} held out")

    def train_step(step: int, done: float) -> float:
        """One step on this rank's next batch; ``done``: the share of the training behind us."""
        tokens, targets = random_batch(train_text, args.batch, batches)
        loss = compiled(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20) * max(0.05, 1 - done)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    batches = torch.Generator().manual_seed(rank)
    with console.status("tracing, planning, compiling"), osdp_compile.PeakMemory() as memory:
        torch.manual_seed(0)
        model = GPT(GPTConfig(256, args.layers, args.width, context=CONTEXT))
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        options = {"memory_limit": args.memory_limit, "plan": args.plan}
        compiled = torch.compile(model, backend="osdp", options=options)  # the one line
        for step in range(MEASURED_STEPS):
            train_step(step, done=0)

    plan = osdp_compile.plan_of(model)  # None with one rank and no limit
    if plan is not None and args.save_plan and rank == 0:
        plan.save(args.save_plan)

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
    )
    started, done = time.perf_counter(), 0.0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=1.0)
        for step in itertools.count(1):
            loss = train_step(MEASURED_STEPS + step, done)
            loss, elapsed = mean_over_ranks(loss, time.perf_counter() - started)
            done = step / args.steps if args.steps else elapsed / args.seconds
            speed = step * args.batch * CONTEXT * world_size / elapsed
            said = f"step {step}  loss {loss:.3f}  {speed:,.0f} tokens/s"
            progress.update(task, completed=done, description=said)
            if done >= 1:
                break

    console.print(f"held-out loss {held_out_loss(compiled, held_out_text, args.batch):.3f}")
    if args.sample:
        console.print("a sample:", style="bold")
        sample = generate(compiled, "def read(self", args.sample)
        console.print(sample, markup=False, highlight=False)

    show_report(model, memory.peak_bytes, console, args.html)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

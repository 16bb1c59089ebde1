"""How long planning takes for models that fit no GPU: Llamas of 8 and 405 billion parameters.

    python -m benchmarks.planning_times
    python -m benchmarks.planning_times --models "Llama 8B"

Traced on the meta device for the H100 preset, 4,096 tokens a rank, in bf16; no process group, one
thread. Planned without a limit, for the GPU's 80 GiB and a tenth above the least limit, several
times each from the traced graphs on. Each model has a process of its own, whose memory at its
highest is that of tracing and planning together.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.claims import conclude
from osdp_compile.errors import InfeasibleLimit
from osdp_compile.planning.traced_step import predicted, trace
from passes.types.hardware_presets import PRESETS
from passes.types.units import format_bytes, format_seconds

_HARDWARE, _TOKENS = "h100-sxm", 4096


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama's, how many ranks train it, and what the project promises of planning it.

    ``most_seconds``: with tracing; ``most_bytes``: of the process.
    """

    sizes: dict[str, Any]
    ranks: int
    most_seconds: float
    most_bytes: int = round(1.2 * (1 << 30))


def llama(sizes: dict[str, Any]) -> nn.Module:
    """A Hugging Face Llama on the meta device; ``sizes``: arguments of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, vocab_size=128256, use_cache=False)
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        return model.to(torch.bfloat16).train()


MODELS = {
    "Llama 8B": Shape(
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        ranks=64,
        most_seconds=10.0,
    ),
    "Llama 405B": Shape(
        {
            "num_hidden_layers": 126,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
        },
        ranks=1024,
        most_seconds=30.0,
    ),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """One model under one limit (None: none); ``plan_seconds``: of every time it was planned."""

    name: str
    limit_bytes: int | None
    plan_seconds: list[float]
    trace_seconds: float
    step_seconds: float
    peak_bytes: int
    process_bytes: int


def planned(given: tuple[str, int]) -> list[Found]:
    """Trace a model once, and plan it so many times at each limit."""
    name, repeats = given
    torch.set_num_threads(1)
    shape = MODELS[name]
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    began = time.perf_counter()
    step = trace(llama(shape.sizes), (), {"input_ids": tokens, "labels": tokens})
    trace_seconds = time.perf_counter() - began
    hardware, ranks = PRESETS[_HARDWARE], {"ranks": shape.ranks}
    least = step.least_bytes(ranks, hardware)
    found = []
    for limit in (None, 80 << 30, least + least // 10):
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            try:
                plan = step.plan(ranks, hardware, limit)
            except InfeasibleLimit:
                break
            seconds.append(time.perf_counter() - began)
        if seconds:
            said = predicted(plan)
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            found.append(
                Found(name, limit, seconds, trace_seconds, said.step_seconds, said.peak_bytes, most)
            )
    return found


def claims(found: list[Found]) -> dict[str, bool]:
    """What the project promises, for every model and limit that was planned."""
    held = {}
    for name, shape in MODELS.items():
        own = [one for one in found if one.name == name]
        for one in own:
            under = "no limit" if one.limit_bytes is None else format_bytes(one.limit_bytes)
            took = one.trace_seconds + statistics.median(one.plan_seconds)
            held[f"{name}, {under}: traced and planned in {format_seconds(shape.most_seconds)}"] = (
                took <= shape.most_seconds
            )
        if own:
            most = max(one.process_bytes for one in own)
            held[f"{name}: the process takes {format_bytes(shape.most_bytes)} at most"] = (
                most <= shape.most_bytes
            )
    return held


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("planning_times.json"))
    given = parser.parse_args()
    console = Console(width=140)
    found: list[Found] = []
    for name in given.models:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found += pool.apply(planned, ((name, given.repeats),))
    table = Table(title=f"{_HARDWARE}, {_TOKENS} tokens a rank", title_justify="left")
    heads = ("limit", "planned in", "fastest", "slowest", "traced in", "process", "step", "peak")
    table.add_column("model")
    for head in heads:
        table.add_column(head, justify="right")
    for one in found:
        table.add_row(
            f"{one.name}, {MODELS[one.name].ranks} ranks",
            "none" if one.limit_bytes is None else format_bytes(one.limit_bytes),
            format_seconds(statistics.median(one.plan_seconds)),
            format_seconds(min(one.plan_seconds)),
            format_seconds(max(one.plan_seconds)),
            format_seconds(one.trace_seconds),
            format_bytes(one.process_bytes),
            format_seconds(one.step_seconds),
            format_bytes(one.peak_bytes),
        )
    console.print(table)
    record = {"found": [dataclasses.asdict(one) for one in found]}
    conclude(console, claims(found), record, given.out)


if __name__ == "__main__":
    main()

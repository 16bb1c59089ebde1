"""Plans and graphs of 36 configurations as text files: what a change of the code changed.

    python -m benchmarks.same_plans before     # on one commit
    python -m benchmarks.same_plans after      # on another
    diff --recursive before after

Each file holds the plan with its prediction, and the graphs after the last pass of each kind. Six
models, each planned six ways: without a limit, halfway to the least one, just above the least one,
on a mesh of hosts, in bfloat16 on 64 ranks, and with room for gradients that add up. The planner
looks at few plans, as on the ranks of tests.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import nn

import osdp_compile
from benchmarks.tasks import TASKS, Task, words
from osdp_compile.trace import trace_graphs
from tests.searching import short_searches

_HOSTS = {"mesh": {"host": 2, "gpu": 4}, "hardware": "h100-sxm"}
_LAST = ("joint/tag", "forward/split", "backward/split", "forward/reorder", "backward/reorder")


class _Tied(nn.Module):
    """A table of words that is the head's weight, too, and a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2050, 64)
        self.mix = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.scale * torch.relu(self.mix(self.words(tokens)))
        logits = hidden @ self.words.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Encoder(nn.Module):
    """Torch's own transformer layers; x: [batch, length, 128]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _numbers(generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(4, 32, 128, generator=generator),)


MODELS: dict[str, Task] = {
    **TASKS,
    "tied": Task(_Tied, words(2050, 4, 64)),
    "encoder": Task(_Encoder, _numbers),
}


def _planned(task: Task, **options: Any) -> osdp_compile.Plan:
    torch.manual_seed(0)
    batch = task.batch(torch.Generator().manual_seed(0))
    return osdp_compile.plan(task.model(), batch, **{"hardware": "cpu-gloo", **options})


def _between(task: Task, share: float, **options: Any) -> int:
    """A limit in bytes: this share of the way from the least to what the fastest plan takes."""
    fastest = _planned(task, **options).prediction
    assert fastest is not None
    try:
        _planned(task, memory_limit="1KiB", **options)
    except osdp_compile.InfeasibleLimit as infeasible:
        least_bytes = infeasible.least_bytes
    return round(least_bytes + share * (fastest.peak_bytes - least_bytes))


#: Options of a plan, from a model.
WAYS: dict[str, Callable[[Task], Mapping[str, Any]]] = {
    "no limit": lambda _: {"world_size": 8},
    "half": lambda task: {"world_size": 8, "memory_limit": _between(task, 0.5, world_size=8)},
    "least": lambda task: {"world_size": 8, "memory_limit": _between(task, 0.02, world_size=8)},
    "hosts": lambda task: {**_HOSTS, "memory_limit": _between(task, 0.3, **_HOSTS)},
    "bfloat16": lambda _: {"world_size": 64, "param_dtype": "bfloat16"},
    "accumulate": lambda task: {
        "world_size": 8,
        "accumulate": "reduced",
        "memory_limit": _between(task, 0.5, world_size=8, accumulate="reduced"),
    },
}


def text(name: str, way: str) -> str:
    """The plan of a configuration and the graphs that it lowers the model to."""
    task = MODELS[name]
    options = dict(WAYS[way](task))
    plan = _planned(task, **options)
    torch.manual_seed(0)
    kept = ("hardware", "param_dtype", "accumulate")
    graphs = trace_graphs(
        task.model(),
        task.batch(torch.Generator().manual_seed(0)),
        world_size=options.get("world_size", 8),
        mesh=options.get("mesh"),
        plan=plan,
        options={
            "hardware": "cpu-gloo",
            **{key: options[key] for key in kept if key in options},
        },
    )
    parts = [json.dumps(plan.to_dict(), indent=1)]
    parts += [f"== {key}\n{graphs[key]}" for key in _LAST if key in graphs]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.getLogger("osdp_compile").setLevel(logging.ERROR)
    configurations = [(name, way) for name in MODELS for way in WAYS]
    with short_searches():
        for name, way in track(configurations, "planning"):
            (given.folder / f"{name}, {way}.txt").write_text(text(name, way))


if __name__ == "__main__":
    main()

"""Plans and graphs of 83 configurations, recorded to show what a change of the code changes.

    python -m benchmarks.same_plans record before                    # on one commit
    python -m benchmarks.same_plans record after --limits before     # on another
    python -m benchmarks.same_plans compare before after

A record has one JSON file for each configuration: the plan with its prediction, the least feasible
limit, and the graphs after the last pass of each kind. All hardware is a preset; nothing is
measured. ``--limits`` takes the memory limits of another record, so that a change of the least
memory does not change the question. The comparison says for each configuration what differs first
in each part; seconds are equal to 1e-12, bytes and texts exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import osdp_compile
from benchmarks.families.hand_written_models import FAMILIES
from benchmarks.tasks import ALL_TASKS, TASKS, Scored, Task, words
from examples.gpt import GPT, GPTConfig
from osdp_compile.trace import trace_graphs
from passes.types.hardware_presets import preset
from tests.searching import short_searches

_CLASSES = 10
_GRAPHS = ("joint/tag", "forward/reorder", "backward/reorder")
#: Seconds closer than this, relative to the larger, are equal.
_SAME_SECONDS = 1e-12


class _Tied(nn.Module):
    """A table of words that is the head's weight, too, and a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2050, 64)
        self.mix = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.scale * torch.relu(self.mix(self.words(tokens)))
        logits = hidden @ self.words.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Encoder(nn.Module):
    """Torch's own transformer layers; x: [batch, length, 128]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class _Residual(nn.Module):
    """A residual block of two convolutions with batch norm; halves the picture."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip = nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(inner + self.skip(x))


class _Experts(nn.Module):
    """A layer of experts, each a slice of one parameter; every token is a mix of all of them."""

    def __init__(self, width: int = 128, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / width**0.5)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        mixed = torch.einsum("te,etd->td", shares, F.gelu(x @ self.up) @ self.down)
        logits: Tensor = self.head(x + mixed)
        return logits


class _Broken(nn.Module):
    """Two frames: a graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        self.second = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, _CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        logits: Tensor = self.second(hidden)
        return logits


class _WithLoss(nn.Module):
    """A model of :mod:`benchmarks.families` with its loss in the graph."""

    def __init__(self, name: str) -> None:
        super().__init__()
        trial = next(one for one in FAMILIES if one.name == name).make()
        self.inner, self.loss = trial.model, trial.loss

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.inner, batch)
        return loss


def _family(name: str) -> Task:
    def batch(generator: torch.Generator) -> tuple[Any, ...]:
        trial = next(one for one in FAMILIES if one.name == name).make()
        found: tuple[Any, ...] = trial.batch(0, 0)
        return found

    return Task(lambda: _WithLoss(name), batch)


def _numbers(*shape: int) -> Any:
    return lambda generator: (torch.randn(shape, generator=generator),)


def _classified(*shape: int) -> Any:
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        targets = torch.randint(0, _CLASSES, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), targets

    return batch


def _residual_net() -> nn.Module:
    blocks = [_Residual(3, 32), _Residual(32, 64), _Residual(64, 128)]
    return Scored(
        nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, _CLASSES))
    )


MODELS: dict[str, Task] = {
    **TASKS,
    "tied": Task(_Tied, words(2050, 4, 64)),
    "encoder": Task(_Encoder, _numbers(4, 32, 128)),
    "residual net": Task(_residual_net, _classified(8, 3, 32, 32)),
    "experts": Task(lambda: Scored(_Experts()), _classified(64, 128)),
    "U-Net": _family("U-Net"),
    "DLRM": _family("DLRM"),
    "deep GPT": Task(
        lambda: GPT(GPTConfig(layers=10, width=64, heads=4, context=32)), words(1024, 2, 32)
    ),
    "wide layer": ALL_TASKS["wide layer"],
    "graph break": Task(lambda: Scored(_Broken()), _classified(64, 256)),
}

_H100 = preset("h100-sxm")
assert _H100.hosts is not None
#: The same GPUs, four to a host.
_FOURS = dataclasses.replace(_H100, hosts=dataclasses.replace(_H100.hosts, ranks=4))
_CPU: dict[str, Any] = {"world_size": 8, "hardware": preset("cpu-gloo")}


@dataclasses.dataclass(frozen=True)
class Way:
    """Options of a plan, and its memory limit.

    ``of_fastest``: the limit as a share of the peak without a limit, the least limit at least.
    ``of_least``: the limit as a multiple of the least one. Neither: no limit.
    ``decision``: of all parameters, in place of a search.
    """

    options: Mapping[str, Any]
    of_fastest: float | None = None
    of_least: float | None = None
    decision: str | None = None


_TWO_DIMENSIONS = {"mesh": {"host": 2, "gpu": 4}, "hardware": _FOURS}
_SQUARE = {"mesh": {"host": 8, "gpu": 8}, "hardware": _H100}
WAYS = {
    # Of every model.
    "8 ranks, 60 %": Way(_CPU, of_fastest=0.6),
    "2 x 4, least": Way(_TWO_DIMENSIONS, of_least=1.1),
    "64 ranks, bfloat16": Way(
        {"world_size": 64, "hardware": _H100, "param_dtype": "bfloat16"}, of_fastest=0.6
    ),
    # Of some models.
    "8 ranks": Way(_CPU),
    "8 ranks, least": Way(_CPU, of_least=1.1),
    "all shard_keep": Way(_CPU, decision="shard_keep"),
    "all shard_host_regather": Way(_TWO_DIMENSIONS, decision="shard_host_regather"),
    "accumulate reduced, 60 %": Way({**_CPU, "accumulate": "reduced"}, of_fastest=0.6),
    "8 x 8, bfloat16": Way({**_SQUARE, "param_dtype": "bfloat16"}, of_fastest=0.6),
    "2 ranks, 60 %": Way({**_CPU, "world_size": 2}, of_fastest=0.6),
    "accumulate whole, 60 %": Way({**_CPU, "accumulate": True}, of_fastest=0.6),
    "8 x 8": Way(_SQUARE),
    "reduce in bfloat16, SGD": Way(
        {**_CPU, "reduce_dtype": "bfloat16", "optimizer": "sgd"}, of_fastest=0.6
    ),
    "whole operators, least": Way({**_CPU, "slices": 1}, of_least=1.1),
}
_OF_EVERY_MODEL = list(WAYS)[:3]
_OF_SOME = ("HF Llama", "conv net", "tied", "experts")
CONFIGURATIONS = [
    (name, way) for way in WAYS for name in (MODELS if way in _OF_EVERY_MODEL else _OF_SOME)
]


def _file(folder: Path, name: str, way: str) -> Path:
    return folder / f"{name}, {way}.json"


class Recorder:
    """Plans of configurations; the plans that limits follow from are made once for equal options.

    ``limits``: a record whose limits hold in place of those that follow from these plans.
    """

    def __init__(self, limits: Path | None = None) -> None:
        self._limits = limits
        self._fastest = functools.cache(lambda name, way: _planned(name, WAYS[way].options))
        self._least_bytes = functools.cache(_least_bytes)

    def record(self, name: str, way: str) -> dict[str, Any]:
        """The plan of a configuration and the graphs that the model is lowered to."""
        chosen = WAYS[way]
        found: dict[str, Any] = {}
        plan: osdp_compile.Plan | str | None = chosen.decision
        if plan is None:
            plan = self._plan(name, way, found)
            found["plan"] = plan.to_dict()
        options = dict(chosen.options)
        mesh = options.pop("mesh", None)
        options.pop("slices", None)  # the plan has them
        torch.manual_seed(0)
        graphs = trace_graphs(
            MODELS[name].model(),
            MODELS[name].batch(torch.Generator().manual_seed(0)),
            world_size=options.pop("world_size", None) or math.prod(mesh.values()),
            mesh=mesh,
            plan=plan,
            options=options,
        )
        found["graphs"] = {key: graphs[key].splitlines() for key in _GRAPHS if key in graphs}
        return found

    def _plan(self, name: str, way: str, found: dict[str, Any]) -> osdp_compile.Plan:
        """The plan, and in ``found`` the bytes that its limit follows from."""
        chosen = WAYS[way]
        same = next(key for key, one in WAYS.items() if one.options == chosen.options)
        if chosen.of_least is not None:
            found["least_bytes"] = self._least_bytes(name, same)
            limit_bytes = round(chosen.of_least * found["least_bytes"])
        else:
            fastest = self._fastest(name, same)
            if chosen.of_fastest is None:
                return fastest
            assert fastest.prediction is not None
            found["fastest_bytes"] = fastest.prediction.peak_bytes
            limit_bytes = round(chosen.of_fastest * found["fastest_bytes"])
        if self._limits is not None:
            limit_bytes = json.loads(_file(self._limits, name, way).read_text())["limit_bytes"]
        try:
            plan = _planned(name, chosen.options, limit_bytes)
        except osdp_compile.InfeasibleLimit as infeasible:
            limit_bytes = infeasible.least_bytes
            plan = _planned(name, chosen.options, limit_bytes)
        found["limit_bytes"] = limit_bytes
        return plan


def _least_bytes(name: str, way: str) -> int:
    try:
        _planned(name, WAYS[way].options, "1KiB")
    except osdp_compile.InfeasibleLimit as infeasible:
        return infeasible.least_bytes
    raise AssertionError("a plan of 1 KiB")


def _planned(
    name: str, options: Mapping[str, Any], limit: int | str | None = None
) -> osdp_compile.Plan:
    torch.manual_seed(0)
    task = MODELS[name]
    batch = task.batch(torch.Generator().manual_seed(0))
    return osdp_compile.plan(task.model(), batch, memory_limit=limit, **options)


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The differing leaves of two records: path, before, after; of two texts, the first line."""
    if isinstance(before, float) and isinstance(after, float):
        if abs(before - after) > _SAME_SECONDS * max(abs(before), abs(after)):
            yield path, before, after
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            own = f"{path}.{key}" if path else key
            yield from differences(before.get(key), after.get(key), own)
    elif isinstance(before, list) and isinstance(after, list):
        for index in range(max(len(before), len(after))):
            old, new = (one[index] if index < len(one) else None for one in (before, after))
            found = list(differences(old, new, f"{path}[{index}]"))
            yield from found
            if found and isinstance(old or new, str):
                return
    elif before != after:
        yield path, before, after


def _read(folder: Path) -> dict[str, Any]:
    return {one.stem: json.loads(one.read_text()) for one in sorted(folder.glob("*.json"))}


def compare(before: Path, after: Path, show: int) -> int:
    """Print the comparison of two records; the number of configurations that differ."""
    old, new = _read(before), _read(after)
    table = Table("configuration", "step, us", "peak, bytes", "verdict")
    different = 0
    for name in [*old, *(one for one in new if one not in old)]:
        if name not in old or name not in new:
            found = [("record", name in old, name in new)]
        else:
            found = list(differences(old[name], new[name]))
        different += bool(found)
        prediction = {**new, **old}[name].get("plan", {}).get("prediction", {})
        lines = [f"{path}: {one!s:.100} -> {other!s:.100}" for path, one, other in found]
        if len(lines) > show:
            lines[show:] = [f"and {len(lines) - show} more"]
        table.add_row(
            name,
            f"{prediction['step_seconds'] * 1e6:.3f}" if prediction else "-",
            str(prediction["peak_bytes"]) if prediction else "-",
            "\n".join(lines) or "equal",
        )
    console = Console(width=200, markup=False)
    console.print(table)
    console.print(f"{len(old)} configurations, {different} of them different")
    return different


def _record(folder: Path, limits: Path | None, only: Sequence[str], full: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.getLogger("osdp_compile").setLevel(logging.ERROR)
    recorder = Recorder(limits)
    chosen = [one for one in CONFIGURATIONS if not only or one[0] in only]
    with contextlib.nullcontext() if full else short_searches():
        for name, way in track(chosen, "planning"):
            data = recorder.record(name, way)
            _file(folder, name, way).write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="plan, and write a record")
    record.add_argument("folder", type=Path)
    record.add_argument("--limits", type=Path, help="the record whose memory limits hold")
    record.add_argument("--only", action="append", default=[], help="a model (default: all)")
    record.add_argument("--full", action="store_true", help="search with the full budget")
    comparison = commands.add_parser("compare", help="compare two records; exit 1 if they differ")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    comparison.add_argument("--show", type=int, default=4, help="differences of a configuration")
    given = parser.parse_args()
    if given.command == "record":
        _record(given.folder, given.limits, given.only, given.full)
    else:
        sys.exit(compare(given.before, given.after, given.show) > 0)


if __name__ == "__main__":
    main()

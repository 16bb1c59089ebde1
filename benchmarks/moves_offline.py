"""What moves in Llamas on H100s: the fastest plan with and without activations that move.

    python -m benchmarks.moves_offline                        # 144 settings: half an hour, one core
    python -m benchmarks.moves_offline --models "Llama 8B" --gpus 8 64 --tokens 512 4096

Traced on the meta device for the H100 preset, in bf16, with hosts of 8 GPUs; under the 80 GB of a
GPU. The loss is the model's result, so that logits need not be whole. Predicted, not measured.
Saves a table as JSON and a heat map: how many times as fast the step is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from benchmarks.planning_times import MODELS, llama
from osdp_compile.errors import InfeasibleLimit
from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.types.decision import Moves
from passes.types.hardware_presets import PRESETS
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_seconds

_HARDWARE = PRESETS["h100-sxm"]
_GPUS_OF_A_HOST = 8
_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
#: By model, the sizes of its configuration.
_MODELS = {
    "Llama 8B": MODELS["Llama 8B"].sizes,
    "Llama 70B": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Llama 405B": MODELS["Llama 405B"].sizes,
}


class Loss(nn.Module):
    """A language model that returns its loss only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


@dataclasses.dataclass(frozen=True)
class Found:
    """One setting: seconds and peak bytes without and with moves; None: no plan fits.

    ``moved``: the kinds of weights that stay, within hosts or on all ranks, each with its bytes'
    share of the model's.
    """

    model: str
    gpus: int
    tokens: int
    weights: tuple[float, int] | None
    moves: tuple[float, int] | None
    moved: dict[str, float]

    @property
    def times(self) -> float | None:
        """How many times as fast the step is with moves."""
        return self.weights[0] / self.moves[0] if self.weights and self.moves else None


def planned(given: tuple[str, int, Sequence[int]]) -> list[Found]:
    """A model's plans at a number of tokens a rank, for these numbers of GPUs."""
    name, tokens, all_gpus = given
    torch.set_num_threads(1)
    batch = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    step = trace(Loss(llama(_MODELS[name])), (batch,), hardware=_HARDWARE)
    free = dataclasses.replace(step, tensor_parallel=True)
    found = []
    for gpus in all_gpus:
        weights, moves = (_plan(one, gpus) for one in (step, free))
        found.append(
            Found(
                name,
                gpus,
                tokens,
                _said(weights) if weights else None,
                _said(moves) if moves else None,
                moved(moves) if moves else {},
            )
        )
    return found


def _plan(step: TracedStep, gpus: int) -> Plan | None:
    """The fastest plan within a GPU's memory; None: there is none."""
    ranks = {"gpus": gpus}
    if gpus > _GPUS_OF_A_HOST:
        ranks = {"hosts": gpus // _GPUS_OF_A_HOST, "gpus": _GPUS_OF_A_HOST}
    try:
        return step.plan(ranks, _HARDWARE, _HARDWARE.memory_bytes)
    except InfeasibleLimit:
        return None


def _said(plan: Plan) -> tuple[float, int]:
    prediction = predicted(plan)
    return prediction.step_seconds, prediction.peak_bytes


def moved(plan: Plan) -> dict[str, float]:
    """The kinds of weights that stay, with their share of all parameters."""
    sizes: Counter[str] = Counter()
    total = 0
    for row in plan.parameters:
        count = torch.Size(row.shape).numel()
        total += count
        if row.moves is Moves.ACTIVATIONS:
            kind = re.sub(r"^model\.|model\.layers\.\d+\.|\.weight$", "", row.name)
            where = "hosts" if row.decision.within_host else "all"
            sizes[f"{kind} ({where})"] += count
    return {kind: count / total for kind, count in sorted(sizes.items())}


def table(found: Sequence[Found]) -> Table:
    """For people."""
    made = Table(title=f"{_HARDWARE.name}, under {format_bytes(_HARDWARE.memory_bytes or 0)}")
    made.add_column("model")
    for head in ("GPUs", "tokens", "weights move", "peak", "with moves", "peak", "times"):
        made.add_column(head, justify="right")
    made.add_column("activations move to")
    for one in found:
        cells = []
        for said in (one.weights, one.moves):
            cells += [format_seconds(said[0]), format_bytes(said[1])] if said else ["none fits", ""]
        times = "" if one.times is None else f"{one.times:.2f}"
        stays = ", ".join(f"{kind} {share:.0%}" for kind, share in one.moved.items())
        made.add_row(one.model, str(one.gpus), str(one.tokens), *cells, times, stays)
    return made


def draw(found: Sequence[Found], path: Path) -> None:
    """How many times as fast the step is with moves, by GPUs and tokens; a map for each model."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(one.model for one in found))
    gpus, tokens = (
        [*dict.fromkeys(getattr(one, at) for one in found)] for at in ("gpus", "tokens")
    )
    figure = Figure(figsize=(1 + 3.6 * len(names), 3.6), layout="constrained")
    own = {(one.model, one.gpus, one.tokens): one for one in found}
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        grid = [[own[name, n, t].times or float("nan") for n in gpus] for t in tokens]
        axes.imshow(grid, origin="lower", aspect="auto", cmap="viridis", vmin=1.0, vmax=2.0)
        for row, t in enumerate(tokens):
            for column, n in enumerate(gpus):
                one = own[name, n, t]
                said = f"{one.times:.2f}" if one.times else "fits" if one.moves else "none fits"
                color = "white" if one.times else "black"
                axes.text(column, row, said, ha="center", va="center", fontsize=7, color=color)
        axes.set(title=name, xlabel="GPUs", ylabel="tokens a GPU" if not place else "")
        axes.set_xticks(range(len(gpus)), [str(n) for n in gpus], fontsize=7)
        axes.set_yticks(range(len(tokens)), [str(t) for t in tokens], fontsize=7)
    figure.suptitle("Step time: weights that move / activations may move", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=_MODELS, default=list(_MODELS))
    parser.add_argument("--gpus", nargs="*", type=int, default=list(_GPUS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(_TOKENS))
    parser.add_argument("--out", type=Path, default=Path("moves_offline.json"))
    given = parser.parse_args()
    console = Console(width=180)
    tasks = [(name, tokens, given.gpus) for name in given.models for tokens in given.tokens]
    found: list[Found] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        every = pool.imap(planned, tasks)
        for own in track(every, "planning", total=len(tasks), console=console):
            found += own
    console.print(table(found))
    record: dict[str, Any] = {"found": [dataclasses.asdict(one) for one in found]}
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    picture = given.out.with_suffix(".png")
    draw(found, picture)
    console.print(f"saved {given.out} and {picture}")


if __name__ == "__main__":
    main()

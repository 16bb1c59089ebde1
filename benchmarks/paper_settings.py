"""The settings of the OSDP paper, planned: 8 RTX TITAN cards on PCIe 3 (arXiv 2209.13258).

    python -m benchmarks.paper_settings

Two language models under a memory limit, in fp32 with Adam. For each batch size of a rank the
planner's plan is beside shard-all (gather again, as FSDP), which may use the same memory for its
schedule; both with the batch size that is best for them. Predicted, not measured: no such machine
is here. The paper's gains, beside them, are measured, on another stack (FairScale). Of the first,
whose many layers are planned by a few, nothing runs in slices here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from osdp_compile.errors import InfeasibleLimit
from osdp_compile.planning.traced_step import TracedStep, trace
from passes.types.decision import Decision
from passes.types.hardware import Hardware
from passes.types.hardware_presets import PRESETS
from passes.types.plan import Prediction
from passes.types.units import format_bytes, format_seconds

_RANKS = {"ranks": 8}
_MOST_BATCH = 64


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 48, "n_embd": 2048, "n_head": 32, "n_positions": 1024}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))


def _opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 7168, "ffn_dim": 28672, "num_attention_heads": 56}
    return OPTForCausalLM(
        OPTConfig(num_hidden_layers=8, word_embed_proj_dim=7168, use_cache=False, **sizes)
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """``reported``: how many times FSDP's throughput the paper has."""

    model: Callable[[], nn.Module]
    limit_bytes: int
    reported: float


SETTINGS = {
    "GPT-2, 48 layers of 2048": Setting(_gpt2, 8 << 30, 1.22),
    "OPT-30B cut to 8 layers": Setting(_opt, 16 << 30, 2.78),
}


def traced(setting: Setting, batch: int, length: int) -> TracedStep:
    """The training step of a batch of a rank, ``length`` tokens each."""
    with torch.device("meta"):
        model, tokens = setting.model(), torch.zeros(batch, length, dtype=torch.long)
    return trace(model.train(), (), {"input_ids": tokens, "labels": tokens})


def fastest(step: TracedStep, hardware: Hardware, limit_bytes: int) -> Prediction | None:
    """The planner's; None if nothing fits."""
    try:
        return step.plan(_RANKS, hardware, limit_bytes).prediction
    except InfeasibleLimit:
        return None


def shard_all(step: TracedStep, hardware: Hardware, limit_bytes: int) -> Prediction | None:
    """Everything gathered again; None if it does not fit."""
    said = step.uniform(Decision.SHARD_REGATHER, _RANKS, hardware, limit_bytes).prediction
    return said if said is not None and said.peak_bytes <= limit_bytes else None


Found = tuple[int, Prediction]


def best(
    setting: Setting, length: int, hardware: Hardware, console: Console
) -> dict[str, Found | None]:
    """By way, the batch size of the highest throughput, and what is predicted of it."""
    found: dict[str, Found | None] = {"osdp": None, "shard all": None}
    for batch in range(1, _MOST_BATCH + 1):
        step = traced(setting, batch, length)
        fits = False
        for way, price in (("osdp", fastest), ("shard all", shard_all)):
            said = price(step, hardware, setting.limit_bytes)
            if said is None:
                continue
            fits = True
            console.print(
                f"batch {batch}, {way}: {format_seconds(said.step_seconds)}, "
                f"{format_bytes(said.peak_bytes)}"
            )
            before = found[way]
            if before is None or batch / said.step_seconds > before[0] / before[1].step_seconds:
                found[way] = batch, said
        if not fits:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("paper_settings.json"))
    given = parser.parse_args()
    console = Console(width=140)
    table = Table(title=f"8 RTX TITAN, {given.sequence_length} tokens", title_justify="left")
    for head in ("model", "limit", "way", "batch", "sequences/s", "step", "waiting", "peak"):
        table.add_column(head, justify="left" if head in ("model", "way") else "right")
    table.add_column("times FSDP (paper)", justify="right")
    record = []
    for name in given.settings:
        setting = SETTINGS[name]
        found = best(setting, given.sequence_length, PRESETS["rtx-titan-pcie3"], console)
        rates = {
            way: 8 * one[0] / one[1].step_seconds for way, one in found.items() if one is not None
        }
        for way, one in found.items():
            if one is None:
                table.add_row(name, format_bytes(setting.limit_bytes), way, "does not fit")
                continue
            batch, said = one
            gain = ""
            if way == "osdp" and "shard all" in rates:
                gain = f"{rates['osdp'] / rates['shard all']:.2f} ({setting.reported:.2f})"
            table.add_row(
                name,
                format_bytes(setting.limit_bytes),
                way,
                str(batch),
                f"{rates[way]:.1f}",
                format_seconds(said.step_seconds),
                format_seconds(said.exposed_seconds),
                format_bytes(said.peak_bytes),
                gain,
            )
            record.append({"model": name, "way": way, "batch": batch, **dataclasses.asdict(said)})
    console.print(table)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

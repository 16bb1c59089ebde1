"""Kept graphs: a later start loads what an earlier one compiled, and does not lower it again.

AOTAutograd's cache keeps what it made of a Dynamo graph, with the code in Inductor's cache. Its key
has neither the plan nor the passes. And a graph that is found passes through no partition and no
pass, so nothing is noted about it. Hence a record of each graph in the cache folder::

    <hash of the graph, the plan, the context, the passes and the versions>.json:
        token      stands for the record in the key of AOTAutograd's cache
        phases     timelines, skeletons, labels for the profiler
        ...        what else lowering notes

The token is random. So AOTAutograd finds a graph only if the record beside it is of the same
compilation. A record that is damaged or gone is written anew, with another token.

Kept are steps of one graph with static shapes, whose lowering said nothing that a user must read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.calibration import kept_files
from osdp_compile.calibration.kept_files import GRAPHS, cache_folder, is_used
from osdp_compile.planning.plan_cache import file_name, pass_lines
from osdp_compile.planning.step_key import (
    TORCHS,
    Uncertain,
    check_certain,
    graph_lines,
    text_of,
    value_text,
)
from osdp_compile.tracking.profiler_ranges import Range
from passes.pipeline import Pass
from passes.simulate.skeleton import Row
from passes.simulate.timeline import Timeline
from passes.types.context import Context

log = logging.getLogger("osdp_compile")

#: The records above this size together are removed, the longest unused first.
_MOST_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class KeptPhase:
    """A lowered forward or backward."""

    timeline: Timeline
    skeleton: tuple[Row, ...]
    ranges: tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """What lowering notes of a graph.

    ``phases``: by the value of ``Phase``. ``inference_bytes``: the peak of a graph for inference.
    ``gathered``: as ``GraphLowering.gathered``. ``sent``: lines of ``Sent``.
    """

    token: str
    phases: dict[str, KeptPhase]
    inference_bytes: int | None
    gathered: tuple[tuple[str, ...], tuple[str, ...]]
    parameters: tuple[str, ...]
    model_groups: tuple[str, ...]
    returned_bytes: int
    kept_bytes: int
    sent: list[tuple[str, list[int]]]


@dataclasses.dataclass
class KeptGraph:
    """The place of a graph's record. ``record``: of an earlier start; None: there is none."""

    path: Path
    record: Record | None
    token: str

    def keep(self, record: Record) -> None:
        """Write the record; a failure only costs time at the next start."""
        text = msgspec.json.encode(record).decode()
        kept_files.keep(self.path, text, _MOST_BYTES, "the compiled graph")


def find(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    names: Mapping[int, str],
    ctx: Context,
    passes: Sequence[Pass],
) -> KeptGraph | None:
    """The kept graph for a Dynamo graph; None: it cannot be kept.

    ``names``: by input, its name. ``ctx``: with the plan.
    """
    folder = cache_folder()
    if folder is None or not _torch.aot_autograd.has_cache():
        return None
    try:
        check_certain(gm, (*TORCHS, "osdp", "_c10d_functional"))
        lines = [
            *pass_lines(passes),
            *_own_lines(ctx),
            *(f"{names[place]}: {_input_text(one)}" for place, one in enumerate(inputs)),
            *graph_lines(gm),
        ]
        path = folder / GRAPHS / file_name(lines, ctx)
    except Uncertain as error:
        log.debug("the compiled graph is not kept: %s", error)
        return None
    what = f"the record of a compiled graph, {path},"
    record = kept_files.find(path, functools.partial(msgspec.json.decode, type=Record), what)
    if record is None:
        return KeptGraph(path, None, secrets.token_hex(16))
    is_used(path)
    return KeptGraph(path, record, record.token)


def _own_lines(ctx: Context) -> list[str]:
    """The parts of the context on which a lowered graph depends, and its plan does not."""
    hardware = ctx.hardware
    measured = json.dumps([hardware.kernel_seconds, dict(ctx.workspaces)], sort_keys=True)
    groups = [ctx.group_name, *(one.group_name for one in ctx.mesh_dims or ())]
    of_model = [(name, sorted(one.beside)) for name, one in ctx.model_groups.items()]
    return [measured, text_of(hardware.in_force), text_of(groups), text_of(of_model)]


def _input_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return value_text(value)
    text = f"{value_text(value)} {value.is_leaf} {value._is_view()}"
    if isinstance(value, DTensor):
        text += f" {value.placements} {value_text(value.to_local())}"
    return text

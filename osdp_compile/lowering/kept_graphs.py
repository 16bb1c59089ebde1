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
import hashlib
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
from osdp_compile.calibration.kept_files import (
    cache_folder,
    is_used,
    read_checked,
    remove,
    trim,
    write_checked,
)
from osdp_compile.planning.plan_cache import context_lines, pass_lines, source_digest, versions
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
    """A lowered forward or backward. ``others_bytes``: held by other calls of the graph."""

    timeline: Timeline
    skeleton: tuple[Row, ...]
    ranges: tuple[Range, ...]
    others_bytes: int


@dataclasses.dataclass(frozen=True)
class Record:
    """What lowering notes of a graph.

    ``phases``: by the value of ``Phase``. ``inference_bytes``: the peak of a graph for inference.
    ``gathered``: as ``_Lowering.gathered``. ``sent``: lines of ``Sent``.
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
        try:
            write_checked(self.path, msgspec.json.encode(record).decode())
            trim(self.path.parent, _MOST_BYTES)
        except OSError as error:
            log.info("the compiled graph is not kept: %s", error)


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
            *versions(),
            source_digest(),
            *pass_lines(passes),
            *context_lines(ctx),
            *_own_lines(ctx),
            *(f"{names[place]}: {_input_text(one)}" for place, one in enumerate(inputs)),
            *graph_lines(gm),
        ]
    except Uncertain as error:
        log.debug("the compiled graph is not kept: %s", error)
        return None
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
    path = folder / "graphs" / f"{digest}.json"
    record = _read(path)
    return KeptGraph(path, record, secrets.token_hex(16) if record is None else record.token)


def _read(path: Path) -> Record | None:
    try:
        record = msgspec.json.decode(read_checked(path), type=Record)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.info("the record of a compiled graph, %s, is of no use and dropped: %s", path, error)
        remove(path)
        return None
    is_used(path)
    return record


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

"""Plan cache: plans of earlier runs, kept on disk, so that a second start does not plan.

A file's name is a hash of everything that the planner reads, and of its source. The measurements
of single operators are in the file instead, because training of another model adds some to the
profile: a plan is found as long as the profile still has the times that it was made with.

The folder: ``plans`` in that of ``osdp_compile/calibration/kept_files.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx
import numpy
import torch

import passes
from osdp_compile.calibration import kept_files
from osdp_compile.calibration.kept_files import PLANS, cache_folder, is_used
from osdp_compile.planning.step_key import Uncertain, text_of
from passes.pipeline import Pass
from passes.types.context import Context
from passes.types.plan import Plan

log = logging.getLogger("osdp_compile")

#: The plans above this size together are removed, the longest unused first.
_MOST_BYTES = 1 << 26
_PACKAGES = (Path(passes.__file__).parent, Path(__file__).parents[1])


def plans_folder() -> Path | None:
    """The folder of kept plans; None: the cache is off."""
    folder = cache_folder()
    return None if folder is None else folder / PLANS


def path_of(step: Sequence[str], ctx: Context) -> Path | None:
    """The file of a step's plan; None: the cache is off.

    ``step``: the step (``step_key.py``), the options, and all else that the planner depends on
    beside the context, as text.

    Raises:
        Uncertain: a part has no text of its own.
    """
    folder = plans_folder()
    if folder is None:
        return None
    return folder / file_name(step, ctx)


def file_name(lines: Sequence[str], ctx: Context) -> str:
    """A name that stands for these lines, a context, this package, and what it depends on.

    Raises:
        Uncertain: a part of the context has no text of its own.
    """
    text = "\n".join([*_versions(), source_digest(), *context_lines(ctx), *lines])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def pass_lines(given: Sequence[Pass]) -> list[str]:
    """The list of passes.

    Raises:
        Uncertain: a pass is a user's function, whose source is not in the key.
    """
    for one in given:
        if one.function.__module__.partition(".")[0] != "passes":
            raise Uncertain(f"the pass {one.name!r}")
    return [f"pass {one.name}: {one.function.__qualname__}" for one in given]


@dataclasses.dataclass(frozen=True)
class KeptPlan:
    """A plan with the measurements of single operators that it was made with.

    ``kernel_seconds``: of the profile (``Hardware``). ``workspaces``: of the ``Context``.
    """

    plan: Plan
    kernel_seconds: Mapping[str, float]
    workspaces: Mapping[str, int]


def find(path: Path, ctx: Context) -> KeptPlan | None:
    """The plan that this file holds, if it was made with the operator times of this profile."""
    decode = functools.partial(_decoded, ctx)
    kept = kept_files.find(path, decode, f"the kept plan {path}")
    if kept is None or not kept.kernel_seconds.items() <= ctx.hardware.kernel_seconds.items():
        return None
    log.info("plan found: %s. To plan anew, delete it; OSDP_CACHE_DIR='' keeps none", path)
    is_used(path)
    return kept


def keep(plan: Plan, ctx: Context, path: Path) -> None:
    """Write a plan; a failure only costs time at the next start."""
    data = {
        "kernel_seconds": ctx.hardware.kernel_seconds,
        "workspaces": ctx.workspaces,
        "plan": plan.to_dict(),
    }
    kept_files.keep(path, json.dumps(data), _MOST_BYTES, "the plan")


@functools.cache
def source_digest() -> str:
    """A digest of the source of both packages."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted(package.rglob("*.py")):
            digest.update(f"{file.relative_to(package.parent)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _versions() -> list[str]:
    git: str | None = torch.version.git_version
    packages = (torch.__version__, git, numpy.__version__, networkx.__version__)
    return [platform.python_version(), platform.machine(), *map(str, packages)]


def context_lines(ctx: Context) -> list[str]:
    """The context as text.

    Without names of process groups, measurements of single operators, and what other training
    steps have taught.
    """
    hardware = ctx.hardware.to_dict()
    del hardware["kernel_seconds"], hardware["learned"]
    dims = [(dim.name, dim.size) for dim in ctx.mesh_dims or ()]
    ours = {ctx.group_name: "", **{dim.group_name: dim.name for dim in ctx.mesh_dims or ()}}
    of_model = [
        (one.name, one.size, sorted(ours[name] for name in one.beside if name in ours))
        for one in ctx.model_groups.values()
    ]
    own: dict[str, Any] = {
        "hardware": json.dumps(hardware, sort_keys=True),
        "group_name": "",
        "mesh_dims": dims,
        "model_groups": of_model,
        "staged": sorted(ctx.staged),
        "workspaces": "",
    }
    fields = [field.name for field in dataclasses.fields(ctx)]
    return [f"{name}: {text_of(own.get(name, getattr(ctx, name)))}" for name in fields]


def _decoded(ctx: Context, text: str) -> KeptPlan:
    data = json.loads(text)
    plan = Plan.from_dict(data["plan"])
    different = plan.mismatch(
        [(one.name, one.shape, one.dtype) for one in ctx.parameters],
        ctx.world_size,
        ctx.ranks_of_a_host,
    )
    if different is not None:
        raise ValueError(different)
    return KeptPlan(plan, data["kernel_seconds"], data["workspaces"])

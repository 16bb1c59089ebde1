"""Offline: plans without the cluster, and without memory for the model.

The trace uses a fake model without memory (the model may be on the meta device) and no process
group. A hardware profile describes the cluster:

    plan = osdp_compile.plan(model, (tokens, targets), world_size=64, hardware="h100-sxm",
                             memory_limit="80GB")
    plan.save("plan.json")        # later, on the cluster: options={"plan": "plan.json"}
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile.options import Accumulate, CheckedOptions, Search
from osdp_compile.planning.planner_inputs import slices_of, stays_of
from osdp_compile.planning.traced_step import TracedStep, trace
from passes.pipeline import Pass
from passes.simulate.chrome_trace import StepTimeline
from passes.types.hardware import Hardware
from passes.types.plan import Plan

log = logging.getLogger("osdp_compile")


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int | None = None,
    mesh: Mapping[str, int] | DeviceMesh | None = None,
    hardware: Hardware | str | Path,
    memory_limit: int | str | None = None,
    optimizer: int | str = "adamw",
    slices: int | Mapping[str, int | tuple[int, int]] | None = None,
    tensor_parallel: bool | Sequence[str] | None = None,
    search: Search = "quick",
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    accumulate: Accumulate = False,
    passes: Sequence[Pass] | None = None,
) -> Plan:
    """The plan that ``torch.compile(model, backend="osdp")`` makes on such a cluster.

    The model does not change, run or take memory; it may be on the meta device.

    Args:
        model: a module; it may be on the meta device.
        args: the model's arguments in training on one rank (only their shapes count).
        kwargs: its keyword arguments.
        world_size: number of ranks; or ``mesh``.
        mesh: number of ranks along each dimension, the outer first, as ``{"host": 8, "gpu": 8}``
            (collectives are hierarchical if the profile has rates along both names).
        hardware: a profile, the path of one, or the name of a preset.
        memory_limit: of one rank, in bytes or as ``"80GB"``; None: no limit.
        optimizer: bytes of its state per element, or a name.
        slices: 1 to run every operator as a whole; or numbers of slices by parameter, as
            ``{"blocks.*.up.weight": 4}``, or ``(4, 1)`` to keep one of four slices gathered for the
            backward and regather the others; None: the planner's choice.
        tensor_parallel: True: the planner may leave weights where they are and move activations;
            or names of such parameters; None: all weights move.
        search: ``"thorough"`` searches under lower limits too, so more memory never gives a slower
            step; it takes minutes, ``"quick"`` takes seconds.
        param_dtype: data type of gathered parameters and compute, as ``torch.bfloat16``; None:
            their own.
        reduce_dtype: data type of reduced gradients; None: the one they are computed in.
        accumulate: ``"reduced"``: plan memory for the reduced gradients of earlier backwards; True:
            for whole accumulated gradients (``osdp_compile.no_sync``).
        passes: a list of ``passes.pipeline.Pass``; None: the default passes.

    Raises:
        ValueError: for a malformed argument, naming it.
        InfeasibleLimit: if no plan fits; the message names the lowest feasible limit.
        OsdpError: if the model cannot be sharded, or has nothing to train.
    """
    options = {
        "hardware": hardware,
        "memory_limit": memory_limit,
        "optimizer": optimizer,
        "slices": slices,
        "tensor_parallel": tensor_parallel,
        "search": search,
        "param_dtype": param_dtype,
        "reduce_dtype": reduce_dtype,
        "accumulate": accumulate,
        "passes": passes,
    }
    return _traced(model, args, kwargs, world_size, mesh, options).plan()


@dataclasses.dataclass(frozen=True)
class OfflineStep:
    """A traced step, and the cluster to plan it for.

    ``ranks``: number of ranks by mesh dimension, the outer first.
    """

    step: TracedStep
    ranks: Mapping[str, int]
    hardware: Hardware
    limit_bytes: int | None
    search: Search

    def plan(self) -> Plan:
        """The fastest plan under the limit.

        Raises:
            InfeasibleLimit: if no plan fits.
        """
        return self.step.plan(self.ranks, self.hardware, self.limit_bytes, self.search)

    def simulated(self, plan: Plan) -> StepTimeline:
        """The simulated step of a plan of :meth:`plan`."""
        return self.step.simulated(plan, self.ranks, self.hardware)


def offline_step(model: nn.Module, args: Sequence[Any] = (), **options: Any) -> OfflineStep:
    """The traced step of :func:`plan`, which takes the same arguments and has the defaults.

    Raises:
        TypeError: for an argument that :func:`plan` does not have.
        ValueError, OsdpError: as :func:`plan`.
    """
    bound = inspect.signature(plan).bind(model, args, **options)
    bound.apply_defaults()
    given = bound.arguments
    _, _, kwargs, world_size, mesh = (
        given.pop(name) for name in ("model", "args", "kwargs", "world_size", "mesh")
    )
    return _traced(model, args, kwargs, world_size, mesh, given)


def _traced(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    world_size: int | None,
    mesh: Mapping[str, int] | DeviceMesh | None,
    options: Mapping[str, Any],
) -> OfflineStep:
    """The traced step. ``options``: the other arguments of :func:`plan`."""
    passes = options["passes"]
    checked = CheckedOptions.parse({**options, "passes": None if passes is None else list(passes)})
    assert checked.hardware is not None
    ranks = mesh_sizes(world_size, mesh)
    step = trace(
        model,
        args,
        kwargs,
        optimizer=options["optimizer"],
        passes=checked.passes,
        precision=checked.precision,
        accumulate=checked.accumulate,
        hardware=checked.hardware,
    )
    log.info("%s", step.operators)
    step = dataclasses.replace(
        step,
        slices=slices_of(checked.slices, step.parameters),
        tensor_parallel=stays_of(checked.tensor_parallel, step.parameters),
    )
    return OfflineStep(step, ranks, checked.hardware, checked.memory_limit_bytes, checked.search)


def mesh_sizes(
    world_size: int | None, mesh: Mapping[str, int] | DeviceMesh | None
) -> dict[str, int]:
    """Mesh dimension -> number of ranks, the outer first, from the user's arguments.

    Raises:
        ValueError: unless exactly one of the two is given, well formed.
    """
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        mesh = dict(zip(names, mesh.shape, strict=True))
    if (world_size is None) == (mesh is None):
        raise ValueError("give world_size, or mesh as {'host': 8, 'gpu': 8}, and not both")
    if mesh is None:
        assert world_size is not None
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size={world_size!r} is not a number of ranks")
        return {"ranks": world_size}
    sizes = dict(mesh)
    if not 1 <= len(sizes) <= 2:
        raise ValueError(f"mesh={sizes!r} has {len(sizes)} dimensions: one or two are supported")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh={sizes!r}: {name!r} is not a number of ranks")
    return sizes

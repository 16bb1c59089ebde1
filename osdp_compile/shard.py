"""Shard a model in place by a given plan, before its first call and before it has memory.

Example:

    with torch.device("meta"):
        model = GPT(config)
    plan = osdp_compile.plan(model, args, world_size=64, hardware="h100-sxm", memory_limit="80GB")
    osdp_compile.shard(model, plan)
    model.to_empty(device="cuda")           # allocates this rank's rows only
    model.init_weights()
    model = torch.compile(model, backend="osdp")
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile.engine.backend import say_once, why_alone
from osdp_compile.engine.deferred_init import write_as_into_whole_ones
from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import agree, fingerprint, from_rank_zero, on_every_rank
from osdp_compile.model.shard_in_place import (
    ModelParameter,
    Reading,
    check_fits,
    check_shardable,
    model_parameters,
    shard_in_place,
)
from osdp_compile.model.synchronize import synchronize
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.options import CheckedOptions
from osdp_compile.runtime.collectives import backend_of
from osdp_compile.runtime.eager_markers import register_group
from osdp_compile.runtime.meshes import flat_mesh, groups_along, mesh_dim, own_mesh
from osdp_compile.tracking.pending_model import PendingModel, keep_for_one_rank, wait_for_first_call
from osdp_compile.tracking.session import plan_of
from passes.types.context import Context
from passes.types.hardware import generic
from passes.types.plan import Plan

M = TypeVar("M", bound=nn.Module)


def shard(model: M, plan: Plan | str | Path, *, mesh: DeviceMesh | None = None) -> M:
    """Shard a model by a plan before its first call. Collective.

    Every parameter becomes a ``DTensor`` parameter of the same name: ``Shard(0)``, of which this
    rank holds its rows, or ``Replicate()``, or ``Shard(1)`` where activations move to columns. A
    plan that shards within hosts gives placements on both dimensions of a mesh of hosts and ranks.
    Optimizers that hold the parameters get the new ones. Meta tensors stay on the meta device, so
    ``model.to_empty(device=...)`` allocates this rank's part only. Tensors with values get rank 0's
    values.

    ``torch.compile(model, backend="osdp")`` then uses this plan and does not search for another.
    Until its first call ``module.weight`` is the DTensor itself, for code that initialises it
    (with one seed, all ranks together hold the values of
    a single process), and the model cannot be called uncompiled. The first compiled call
    broadcasts rank 0's buffers and replicated parameters; each rank keeps its own rows.

    Without a process group, or with one rank, nothing is sharded. A plan for one rank is kept all
    the same: what it recomputes, and its slices. A plan for more ranks is not.

    Args:
        model: a module, or the result of ``torch.compile`` for it.
        plan: a result of ``osdp_compile.plan`` or ``plan_of``, a hand-made Plan, or the path
            of a saved one. The same on every rank.
        mesh: as the backend's option: over the data-parallel ranks, with one dimension or two
            (default: all ranks). Needed for a model on the meta device that will not train on the
            process group's accelerator, and, with two dimensions, for a plan that shards within
            hosts.

    Returns:
        The model.

    Raises:
        ValueError: for a malformed argument.
        RanksDiffer: on every rank, if ranks give different plans or models.
        PlanMismatch: on every rank, naming the first difference between the plan and the model.
        OsdpError: on every rank, if a parameter cannot be sharded or is sharded already.
    """
    options = CheckedOptions.parse({"plan": plan, "mesh": mesh})
    if options.plan is None:
        raise ValueError("plan=None: give an osdp_compile.Plan, or the path of a saved one")
    root: nn.Module = getattr(model, "_orig_mod", model)
    alone = why_alone(options)
    if alone is not None:
        say_once(f"{alone}: nothing is sharded")
        if options.plan.world_size == 1:
            keep_for_one_rank(root, options.plan)
        return model
    flat = flat_mesh(options.mesh, _device_type(root))
    group = flat.get_group()
    entries = on_every_rank(lambda: _shardable(root, flat), group)
    agree([*options.lines(), *fingerprint(None, entries)], group)
    along = groups_along(options.mesh)
    mesh_dims = [mesh_dim(name, one) for name, one in along.items()]

    def fitting() -> Plan:
        assert options.plan is not None
        ranks_of_a_host = mesh_dims[1].size if mesh_dims else None
        check_fits(options.plan, entries, flat.size(), ranks_of_a_host=ranks_of_a_host)
        return options.plan

    chosen = from_rank_zero(fitting, group)
    own = own_mesh(flat, options.mesh, chosen)
    values = (entry.parameter.detach() for entry in entries if not entry.parameter.is_meta)
    synchronize(values, group)
    reading = Reading()
    optimizers = OptimizerIndex(entry.parameter for entry in entries)
    # The layout depends only on the plan and on the fields about this rank.
    context = Context(
        plan=chosen,
        hardware=generic(),
        parameters=(),
        world_size=flat.size(),
        rank=flat.get_local_rank(),
        group_name=register_group(group),
        mesh_dims=(mesh_dims[0], mesh_dims[1]) if mesh_dims else None,
    )
    for one in along.values():
        register_group(one)
    shard_in_place(entries, own, context, optimizers, reading)
    wait_for_first_call(root, PendingModel(context, flat, options.mesh, own, reading))
    write_as_into_whole_ones()
    return model


def _device_type(root: nn.Module) -> str:
    """The model's device type; for a meta model the type that the process group implies."""
    for parameter in root.parameters():
        if parameter.device.type != "meta":
            return parameter.device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.group.WORLD is None:
        return "cpu"
    # A process group made for CPUs names gloo for accelerators too.
    carried = backend_of(dist.group.WORLD, accelerator.type)
    return "cpu" if carried in ("", "gloo") else accelerator.type


def _shardable(root: nn.Module, mesh: DeviceMesh) -> list[ModelParameter]:
    if plan_of(root) is not None:
        raise OsdpError("the model is sharded already: call osdp_compile.shard once")
    entries = model_parameters([("", root)])
    check_shardable(entries)
    for entry in entries:
        device = entry.parameter.device
        if device.type not in ("meta", mesh.device_type):
            raise OsdpError(
                f"parameter {entry.name!r} is on {device}, and the mesh over ranks of "
                f"{mesh.device_type}"
            )
    return entries

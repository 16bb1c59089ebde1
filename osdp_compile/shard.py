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

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile.engine.backend import say_once, why_alone
from osdp_compile.engine.deferred_init import write_as_into_whole_ones
from osdp_compile.engine.first_call import check_with_other_dims
from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import agree, fingerprint, from_rank_zero, on_every_rank
from osdp_compile.model.model_parameters import (
    ModelParameter,
    check_fits,
    check_shardable,
    model_parameters,
)
from osdp_compile.model.other_dims import (
    are_on_other_dims,
    group_of_everyone,
    local_form,
    mesh_beside,
    mesh_of,
)
from osdp_compile.model.own_data import beside_theirs
from osdp_compile.model.synchronize import synchronize
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.options import CheckedOptions
from osdp_compile.runtime.collectives import Group, backend_of
from osdp_compile.runtime.eager_markers import register_group
from osdp_compile.runtime.meshes import flat_mesh, groups_along, local_part, mesh_dim, own_mesh
from osdp_compile.sharding.parameter_reads import Reading
from osdp_compile.sharding.shard_in_place import shard_in_place
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

    ``parallelize_module`` may have distributed the model over other dimensions of the mesh before.
    Then the plan has the shapes of local tensors, and DTensors are on all dimensions, as after a
    first call (``docs/parallelized_models.md``).

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
            process group's accelerator, with two dimensions for a plan that shards within hosts,
            and beside ``parallelize_module``, as ``mesh["dp"]``.

    Returns:
        The model.

    Raises:
        ValueError: for a malformed argument.
        RanksDiffer: on every rank, if ranks give different plans or models.
        PlanMismatch: on every rank, naming the first difference between the plan and the model.
        OsdpError: on every rank, if a parameter cannot be sharded or is sharded already.
    """
    root: nn.Module = getattr(model, "_orig_mod", model)
    before = list(root.parameters())
    options = CheckedOptions.parse({"plan": plan, "mesh": mesh})
    options = dataclasses.replace(options, mesh=beside_theirs(before, mesh))
    if options.plan is None:
        raise ValueError("plan=None: give an osdp_compile.Plan, or the path of a saved one")
    alone = why_alone(options)
    if alone is not None:
        say_once(f"{alone}: nothing is sharded")
        if options.plan.world_size == 1:
            keep_for_one_rank(root, options.plan)
        return model
    flat = flat_mesh(options.mesh, _device_type(root))
    entries, theirs, everyone = _agreed(root, flat, options, own_data=options.mesh is not mesh)
    along = groups_along(options.mesh)
    mesh_dims = [mesh_dim(name, one) for name, one in along.items()]

    def fitting() -> Plan:
        assert options.plan is not None
        ranks_of_a_host = mesh_dims[1].size if mesh_dims else None
        check_fits(options.plan, entries, flat.size(), ranks_of_a_host=ranks_of_a_host)
        return options.plan

    chosen = from_rank_zero(fitting, everyone)
    if theirs is None or options.mesh is None:
        own = own_mesh(flat, options.mesh, chosen)
    else:
        own = mesh_beside(flat, options.mesh, theirs, chosen)
    values = (entry.parameter.detach() for entry in entries if not entry.parameter.is_meta)
    synchronize(values, flat.get_group())
    reading = Reading()
    optimizers = OptimizerIndex(before)
    for old, entry in zip(before, entries, strict=True):
        optimizers.rebind(old, entry.parameter, local_part)
    # The layout depends only on the plan and on the fields about this rank.
    context = Context(
        plan=chosen,
        hardware=generic(),
        parameters=(),
        world_size=flat.size(),
        rank=flat.get_local_rank(),
        group_name=register_group(flat.get_group()),
        mesh_dims=(mesh_dims[0], mesh_dims[1]) if mesh_dims else None,
    )
    for one in along.values():
        register_group(one)
    shard_in_place(entries, own, context, optimizers, reading)
    others = {entry.name: entry.others for entry in entries if entry.others is not None}
    pending = PendingModel(context, flat, mesh, options.mesh, own, reading, everyone, others)
    wait_for_first_call(root, pending)
    write_as_into_whole_ones()
    return model


def _agreed(
    root: nn.Module, flat: DeviceMesh, options: CheckedOptions, own_data: bool
) -> tuple[list[ModelParameter], DeviceMesh | None, Group]:
    """The parameters, equal on all ranks, their other mesh dimensions, and these ranks. Collective.

    A parameter on other mesh dimensions is a new local one; the model does not change.

    ``own_data``: the ranks along the other dimensions have batches of their own.
    """
    group, given = flat.get_group(), list(root.parameters())

    def are_beside() -> bool:
        if plan_of(root) is not None:
            raise OsdpError("the model is sharded already: call osdp_compile.shard once")
        return are_on_other_dims(given, options.mesh)

    beside = on_every_rank(are_beside, group)
    agree([f"parallelize_module: {beside}"], group)
    theirs, everyone = mesh_of(given) if beside else None, group
    if theirs is not None and options.mesh is not None:
        everyone = group_of_everyone(options.mesh, theirs)

    def shardable() -> list[ModelParameter]:
        entries = model_parameters([("", root)])
        if theirs is not None:
            check_with_other_dims(options)
            forms = [local_form(one.name, one.parameter, theirs, own_data) for one in entries]
            entries = [
                dataclasses.replace(one, parameter=local, others=others)
                for one, (local, others) in zip(entries, forms, strict=True)
            ]
        _check(entries, flat)
        return entries

    entries = on_every_rank(shardable, everyone)
    agree([*options.lines(), *fingerprint(None, entries)], everyone)
    return entries, theirs, everyone


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


def _check(entries: Sequence[ModelParameter], mesh: DeviceMesh) -> None:
    """Refuse parameters that cannot be sharded over the ranks of a mesh."""
    check_shardable(entries)
    for entry in entries:
        device = entry.parameter.device
        if device.type not in ("meta", mesh.device_type):
            raise OsdpError(
                f"parameter {entry.name!r} is on {device}, and the mesh over ranks of "
                f"{mesh.device_type}"
            )

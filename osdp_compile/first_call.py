"""The first call: agree, measure, plan, shard in place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import fx

from osdp_compile.agreement import agree, fingerprint, from_rank_zero, on_every_rank
from osdp_compile.collectives import backend_of
from osdp_compile.describe import captured_step, described, held_bytes_of, owned_parameters
from osdp_compile.errors import PlanMismatch
from osdp_compile.exchange import by_messages
from osdp_compile.markers import register_group
from osdp_compile.meshes import flat_mesh, groups_along, level, levels_of, mesh_of_shards
from osdp_compile.optimizers import OptimizerIndex
from osdp_compile.options import Options
from osdp_compile.plan_table import log_plan
from osdp_compile.profiles import hardware_of, keep
from osdp_compile.roots import plain_parameters
from osdp_compile.session import Session, remember
from osdp_compile.state import (
    ModelParameter,
    buffers_of,
    shard_in_place,
    synchronize,
)
from osdp_compile.step_times import with_step_seconds
from osdp_compile.traced_step import planned_whole
from passes.capture import Captured, NothingSaved
from passes.context import Context
from passes.decisions import Plan
from passes.hardware import Hardware
from passes.pipeline import default_passes, validate
from passes.plan import complete
from passes.predict import state_bytes

log = logging.getLogger("osdp_compile")


def first_call(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Session:
    """Plan the model that owns the graph's parameters, and shard it in place.

    Nothing is changed before the plan is known to fit.

    Raises:
        InfeasibleLimit, PlanMismatch, RanksDiffer, OsdpError.
    """
    passes = tuple(options.passes or default_passes())
    validate(passes)
    device = plain_parameters(gm, inputs)[0][1].device
    mesh = flat_mesh(options.mesh, device.type)
    group, along = mesh.get_group(), groups_along(options.mesh)
    levels = [level(name, one) for name, one in along.items()]

    roots, entries = on_every_rank(lambda: owned_parameters(gm, inputs), group)
    agree(fingerprint(gm, entries), group)

    optimizers = OptimizerIndex(entry.parameter for entry in entries)
    held_bytes = held_bytes_of(roots, inputs, entries)
    spare_bytes = _spare_bytes(entries, held_bytes, options)
    hardware = hardware_of(
        group,
        device,
        spare_bytes,
        options.hardware,
        mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None,
        along,
    )
    by_exchange = by_messages(group, device)
    context = Context(
        plan=Plan((), world_size=mesh.size()),
        hardware=hardware,
        parameters=tuple(described(entry, optimizers, options.optimizer) for entry in entries),
        world_size=mesh.size(),
        rank=mesh.get_local_rank(),
        group_name=group.group_name,
        base_bytes=held_bytes,
        limit_bytes=options.memory_limit_bytes,
        by_exchange=by_exchange,
        levels=levels_of(levels, hardware, by_exchange),
    )

    captured: list[Captured] = []  # on rank 0
    given: list[Plan] = []

    def prepare() -> bool:
        """Whether operators are to be measured: without a profile and a plan that has figures."""
        if options.plan is not None:
            given.append(_given(options.plan, context))
            if given[0].order and given[0].prediction is not None:  # saved by an earlier run
                return False
        captured.append(captured_step(gm, inputs, entries, context, passes))
        return options.hardware is None and backend_of(group, device.type) != "fake"

    def decide() -> tuple[Plan, Hardware]:
        if not captured:
            return given[0], context.hardware
        if given:
            try:
                return complete(given[0], captured[0], context, passes), context.hardware
            except NothingSaved as error:
                raise PlanMismatch(f"the plan given in options does not fit: {error}") from None
        return planned_whole(captured[0], context, passes), context.hardware

    measures = from_rank_zero(prepare, group)
    if measures:
        step = captured[0] if captured else None
        hardware = with_step_seconds(step, context, group, device, spare_bytes)
        context = context.replace(hardware=hardware)
    plan, hardware = from_rank_zero(decide, group)
    if measures:
        keep(hardware, group, device, along)
    for one in (group, *along.values()):
        register_group(one)
    context = context.replace(
        plan=plan,
        hardware=hardware,
        levels=levels_of(levels, hardware, by_exchange),  # of rank 0's profile
    )
    synchronize(entries, list(buffers_of(roots)), mesh)
    if plan.within_hosts and options.mesh is not None:
        renewed = shard_in_place(entries, mesh_of_shards(options.mesh, along), context, optimizers)
    else:
        renewed = shard_in_place(entries, mesh, context, optimizers)
    state = state_bytes(context, plan)
    context = context.replace(
        base_bytes=context.base_bytes + state["parameters"] + state["optimizer"]
    )
    session = Session(plan, mesh, context, options, passes)
    names = [entry.name for entry in entries]
    remember(session, [root for _, root in roots], list(zip(names, renewed, strict=True)))
    if context.rank == 0:
        log_plan(plan, log)
        if along and context.levels is None:
            log.info(
                "the hardware profile %r has no rates along %s: no collective goes leg by leg",
                hardware.name,
                " and ".join(map(repr, along)),
            )
    return session


def _given(plan: Plan, context: Context) -> Plan:
    rows = [(p.name, p.shape, p.dtype) for p in context.parameters]
    host = None if context.levels is None else context.levels[1].size
    difference = plan.mismatch(rows, context.world_size, host)
    if difference is not None:
        raise PlanMismatch(f"the plan given in options does not fit: {difference}")
    return plan


def _spare_bytes(entries: Sequence[ModelParameter], held_bytes: int, options: Options) -> int:
    """What measuring may take beside the whole model without passing the peak of training.

    Without a limit that is not known yet, but gradients and optimizer state come on top of the
    model, and rarely take less than it.
    """
    whole_bytes = sum(e.parameter.numel() * e.parameter.element_size() for e in entries)
    if options.memory_limit_bytes is None:
        return whole_bytes
    return options.memory_limit_bytes - whole_bytes - held_bytes

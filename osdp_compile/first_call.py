"""The first call: agree, measure, plan, shard in place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from osdp_compile.agreement import agree, fingerprint, from_rank_zero, on_every_rank
from osdp_compile.capture import capture
from osdp_compile.collectives import backend_of
from osdp_compile.errors import InfeasibleLimit, PlanMismatch
from osdp_compile.exchange import by_messages
from osdp_compile.lower import static_inputs
from osdp_compile.markers import register_group
from osdp_compile.meshes import flat_mesh, groups_along, levels_of
from osdp_compile.optimizer_names import state_bytes_per_element
from osdp_compile.optimizers import OptimizerIndex
from osdp_compile.options import Options
from osdp_compile.plan_table import log_plan
from osdp_compile.profiles import hardware_of, keep
from osdp_compile.roots import find_roots, plain_parameters
from osdp_compile.session import Session, remember
from osdp_compile.state import (
    ModelParameter,
    buffers_of,
    check_shardable,
    model_parameters,
    shard_in_place,
    synchronize,
)
from osdp_compile.step_times import with_step_seconds
from passes.capture import Captured
from passes.context import Context, Parameter
from passes.decisions import Plan
from passes.hardware import Hardware
from passes.pipeline import default_passes, validate
from passes.plan import Infeasible, complete, make_plan
from passes.predict import state_bytes

log = logging.getLogger("osdp_compile")
_UNSEEN_BYTES = 1 << 16


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

    roots, entries = on_every_rank(lambda: _found(gm, inputs), group)
    agree(fingerprint(gm, entries), group)

    optimizers = OptimizerIndex(entry.parameter for entry in entries)
    held_bytes = _held_bytes(roots, inputs, entries)
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
        parameters=tuple(_described(entry, optimizers, options) for entry in entries),
        world_size=mesh.size(),
        rank=mesh.get_local_rank(),
        group_name=group.group_name,
        base_bytes=held_bytes,
        limit_bytes=options.memory_limit_bytes,
        by_exchange=by_exchange,
        levels=levels_of(along, hardware, by_exchange),
    )

    captured: list[Captured] = []  # on rank 0
    given: list[Plan] = []

    def prepare() -> bool:
        """Whether operators are to be measured: without a profile and a plan that has figures."""
        if options.plan is not None:
            given.append(_given(options.plan, context))
            if given[0].prediction is not None:  # saved by an earlier run
                return False
        captured.append(_captured(gm, inputs, entries, context, passes))
        return options.hardware is None and backend_of(group, device.type) != "fake"

    def decide() -> tuple[Plan, Hardware]:
        if not captured:
            return given[0], context.hardware
        if given:
            return complete(given[0], captured[0], context, passes), context.hardware
        try:
            return make_plan(captured[0], context, passes), context.hardware
        except Infeasible as error:
            raise InfeasibleLimit(str(error), error.least_bytes) from None

    measures = from_rank_zero(prepare, group)
    if measures:
        step = captured[0] if captured else None
        hardware = with_step_seconds(step, context, group, device, spare_bytes)
        context = context.replace(hardware=hardware)
    plan, hardware = from_rank_zero(decide, group)
    if measures:
        keep(hardware, group, device, along)
    for one in along.values():
        register_group(one)
    synchronize(entries, list(buffers_of(roots)), mesh)
    renewed = shard_in_place(entries, plan, mesh, optimizers)
    state = state_bytes(context, plan)
    context = context.replace(
        plan=plan,
        hardware=hardware,
        levels=levels_of(along, hardware, by_exchange),  # of rank 0's profile
        base_bytes=context.base_bytes + state["parameters"] + state["optimizer"],
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


def _found(
    gm: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[list[tuple[str, nn.Module]], list[ModelParameter]]:
    roots = find_roots(gm, inputs)
    entries = model_parameters(roots)
    check_shardable(entries)
    return roots, entries


def _captured(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    entries: Sequence[ModelParameter],
    context: Context,
    passes: Sequence[Any],
) -> Captured:
    by_id = {id(entry.parameter): entry.name for entry in entries}
    names = {i: by_id[id(value)] for i, value in enumerate(inputs) if id(value) in by_id}
    static = {**static_inputs(gm, inputs), **names}
    return capture(gm, inputs, names, static, context, passes)


def _given(plan: Plan, context: Context) -> Plan:
    rows = [(p.name, p.shape, p.dtype) for p in context.parameters]
    difference = plan.mismatch(rows, context.world_size)
    if difference is not None:
        raise PlanMismatch(f"the plan given in options does not fit: {difference}")
    return plan


def _described(entry: ModelParameter, optimizers: OptimizerIndex, options: Options) -> Parameter:
    parameter = entry.parameter
    return Parameter(
        name=entry.name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        numel=parameter.numel(),
        element_bytes=parameter.element_size(),
        requires_grad=parameter.requires_grad,
        optimizer_bytes=_optimizer_bytes(parameter, optimizers, options),
    )


def _optimizer_bytes(parameter: nn.Parameter, optimizers: OptimizerIndex, options: Options) -> int:
    """Bytes of optimizer state the whole parameter has or will get."""
    if not parameter.requires_grad:
        return 0
    if isinstance(options.optimizer, int):
        return options.optimizer * parameter.numel()
    if isinstance(options.optimizer, str):
        return (
            state_bytes_per_element(options.optimizer, parameter.element_size()) * parameter.numel()
        )
    holding = optimizers.holding(parameter)
    if holding:
        return sum(optimizers.state_bytes(parameter, optimizer) for optimizer in holding)
    return state_bytes_per_element("adamw", parameter.element_size()) * parameter.numel()


def _held_bytes(
    roots: Sequence[tuple[str, nn.Module]], inputs: Sequence[Any], entries: Sequence[ModelParameter]
) -> int:
    """Bytes held all along besides parameters and optimizer state: buffers and the batch.

    And some for what no graph shows: Adam's step counters, and small tensors that a
    collective's thread lets go of a moment late.
    """
    own = {id(entry.parameter) for entry in entries}
    held = {id(t): t for t in inputs if isinstance(t, torch.Tensor) and id(t) not in own}
    held.update((id(buffer), buffer) for buffer in buffers_of(roots))
    return sum(t.numel() * t.element_size() for t in held.values()) + _UNSEEN_BYTES


def _spare_bytes(entries: Sequence[ModelParameter], held_bytes: int, options: Options) -> int:
    """What measuring may take beside the whole model without passing the peak of training.

    Without a limit that is not known yet, but gradients and optimizer state come on top of the
    model, and rarely take less than it.
    """
    whole_bytes = sum(e.parameter.numel() * e.parameter.element_size() for e in entries)
    if options.memory_limit_bytes is None:
        return whole_bytes
    return options.memory_limit_bytes - whole_bytes - held_bytes

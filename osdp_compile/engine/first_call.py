"""First call of a model: ranks agree, measure, plan, and shard the model in place."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from osdp_compile import _torch, progress
from osdp_compile.calibration.profile_cache import hardware_of, keep_learned
from osdp_compile.calibration.shared_links import model_groups
from osdp_compile.engine.deferred_init import write_as_into_whole_ones
from osdp_compile.engine.no_sync import begin_if_waiting, check_if_waiting
from osdp_compile.engine.plan_decision import Groups, PlanDecision, Step
from osdp_compile.engine.processor_test import start_processor_test
from osdp_compile.errors import OsdpError
from osdp_compile.log_lines import NAMES, OF_ALL_RANKS
from osdp_compile.lowering.strip_markers import only_reads, unmarked
from osdp_compile.model.agreement import agree, fingerprint, from_rank_zero, on_every_rank
from osdp_compile.model.find_modules import plain_parameters
from osdp_compile.model.mixed_precision import end_casting
from osdp_compile.model.model_parameters import ModelParameter, buffers_of, held_elsewhere
from osdp_compile.model.other_dims import (
    end_local,
    group_of_everyone,
    keep_other_dims,
    mesh_beside,
    others_of,
)
from osdp_compile.model.own_data import check_batches
from osdp_compile.model.same_parameters import compare_anew
from osdp_compile.model.synchronize import synchronize, synchronized
from osdp_compile.optim.checks import check_works_on_rows
from osdp_compile.optim.muon import share_matrices
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.optim.whole_state import is_laid_out
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.frames import captured_frames
from osdp_compile.planning.planner_inputs import (
    accumulated_bytes_of,
    captured_step,
    described,
    held_bytes_of,
    input_bytes_of,
    owned_parameters,
)
from osdp_compile.reports.plan_table import log_plan
from osdp_compile.runtime.collectives import name_of, rank_in, size_of
from osdp_compile.runtime.current_call import interrupted_call
from osdp_compile.runtime.eager_markers import register_group
from osdp_compile.runtime.meshes import (
    flat_mesh,
    group_of_mesh,
    groups_along,
    number_of_ranks,
    own_mesh,
)
from osdp_compile.runtime.p2p import group_uses_p2p, staged_kinds
from osdp_compile.runtime.pipeline_stage import current_pipeline
from osdp_compile.runtime.written_reads import assigned_in
from osdp_compile.sharding.dtensor_layout import lay_out as lay_out_tensor
from osdp_compile.sharding.parameter_reads import Reading
from osdp_compile.sharding.shard_in_place import keep_in_place, shard_in_place
from osdp_compile.tracking.learning import trace_steps
from osdp_compile.tracking.other_models import OtherModels, other_models
from osdp_compile.tracking.pending_model import PendingModel, end_waiting
from osdp_compile.tracking.session import Session, base_parts, remember, session_for
from osdp_compile.tracking.uncovered import compiled_models
from passes.annotate.training_state import held_between_steps, shard_bytes
from passes.graph.captured import Captured
from passes.pipeline import Pass, default_passes, validate
from passes.types.context import Context, ModelGroup
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_limit

log = logging.getLogger("osdp_compile")


def first_call(gm: fx.GraphModule, inputs: Sequence[Any], options: CheckedOptions) -> Session:
    """Plan the model that owns the graph's parameters, and shard it in place.

    The model gets rank 0's values while rank 0 plans, and stays unchanged otherwise until a plan
    fits.

    Raises:
        InfeasibleLimit, PlanMismatch, RanksDiffer, OsdpError.
    """
    device = plain_parameters(gm, inputs)[0][1].device
    mesh = flat_mesh(options.mesh, device.type) if number_of_ranks(options.mesh) > 1 else None
    group = group_of_mesh(mesh)
    others = others_of(gm, inputs)
    everyone = group
    if others is not None and options.mesh is not None:
        check_with_other_dims(options)
        everyone = group_of_everyone(options.mesh, others.mesh)
    call = interrupted_call(gm, inputs)
    roots, owned = on_every_rank(lambda: owned_parameters(gm, inputs, call), everyone)
    entries = held_elsewhere(owned)
    reading = Reading(options.precision)
    names = {id(entry.parameter): entry.name for entry in entries}
    reading.assigned = assigned_in(gm, inputs, names)

    def captured(context: Context, passes: Sequence[Pass]) -> Captured:
        if call is not None:
            found = captured_frames(call, roots, context, passes)
            if found is not None:
                return found
        return captured_step(gm, inputs, entries, context, passes)

    def with_values() -> AbstractContextManager[None]:
        values = (entry.parameter for entry in entries)
        return synchronized(itertools.chain(values, buffers_of(roots)), group)

    def lay_out(context: Context, optimizers: OptimizerIndex) -> Sequence[nn.Parameter]:
        end_casting([module for _, root in roots for module in root.modules()])
        end_local()
        _warn_of_whole(context, options)
        if mesh is not None and others is not None:
            assert options.mesh is not None
            beside = mesh_beside(mesh, options.mesh, others.mesh, context.plan)
            return shard_in_place(entries, beside, context, optimizers, reading)
        if mesh is None or not context.plan.shards:
            renewing = optimizers if call is not None else None
            return keep_in_place(entries, context, reading, renewing)
        own = own_mesh(mesh, options.mesh, context.plan)
        return shard_in_place(entries, own, context, optimizers, reading)

    given = inputs if call is None else _torch.tensors.tree_leaves((call.args, call.kwargs))
    step = Step(
        gm,
        given,
        roots,
        entries,
        mesh,
        captured,
        lay_out,
        reading,
        with_values,
        frames=call is not None,
        others=others,
        everyone=everyone,
    )
    session = _session(step, options)
    _log(session)
    return session


def first_call_of_sharded(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: CheckedOptions,
    root: nn.Module,
    laid_out: PendingModel,
) -> None:
    """Start the session of a model that ``osdp_compile.shard`` sharded.

    A graph that needs no gradients, or only reads parameters, has no training step to price. The
    first graph with a training step replaces the session.

    Raises:
        PlanMismatch, RanksDiffer, OsdpError.
    """
    needs_gradients = torch.is_grad_enabled() and any(
        isinstance(value, nn.Parameter) and value.requires_grad for value in inputs
    )
    trains = needs_gradients and not only_reads(gm)
    if not trains and session_for(root) is not None:
        return
    mesh = laid_out.mesh
    given, entries = on_every_rank(
        lambda: (laid_out.options(options), laid_out.parameters(root)), laid_out.everyone
    )
    others = laid_out.any_others
    if trains and others is not None and others.own_data:
        assert given.mesh is not None
        check_batches(inputs, given.mesh, others.mesh)

    def captured(context: Context, passes: Sequence[Pass]) -> Captured:
        return captured_step(*unmarked(gm, inputs, entries), context, passes)

    def lay_out(context: Context, _: OptimizerIndex) -> Sequence[nn.Parameter]:
        whole: list[torch.Tensor] = []
        of_hosts: list[torch.Tensor] = []  # sharded within each host, equal on all hosts
        for entry in entries:
            cut = context.cut(context.plan.decision(entry.name))
            local = cast(DTensor, entry.parameter).to_local().detach()
            if cut.between:
                of_hosts.append(local)
            elif cut.ranks == 1:
                whole.append(local)
        synchronize([*whole, *buffers_of([("", root)])], mesh.get_group())
        if of_hosts:
            synchronize(of_hosts, next(iter(groups_along(given.mesh).values())))
        return [entry.parameter for entry in entries]

    reading = laid_out.reading
    step = Step(
        gm,
        inputs,
        [("", root)],
        entries,
        mesh,
        captured,
        lay_out,
        reading,
        contextlib.nullcontext,  # the plan decides which values travel
        everyone=laid_out.everyone,
        others=others,
    )
    session = _session(step, given, to_train=trains)
    if trains:
        end_waiting(root)
        write_as_into_whole_ones()
        _log(session)


@progress.of_first_call
def _session(step: Step, options: CheckedOptions, to_train: bool = True) -> Session:
    """Agree on the options, measure, decide on a plan, shard the model. Collective."""
    passes = tuple(options.passes or default_passes())
    validate(passes)
    entries, ranks = step.entries, group_of_mesh(step.mesh)
    device = entries[0].parameter.device
    groups = Groups(
        ranks,
        groups_along(options.mesh),
        device,
        group_uses_p2p(ranks, device),
        step.everyone,
        None if step.others is None else step.others.mesh,
    )
    check_if_waiting([entry.parameter for entry in entries], options)
    lines = [*options.lines(), *fingerprint(step.gm, entries)]
    agree([f"gathers and scatters by messages: {groups.uses_p2p}", *lines], groups.everyone)

    optimizers = OptimizerIndex(entry.parameter for entry in entries)
    others = OtherModels()
    if options.memory_limit_bytes is not None:
        others = other_models(entries, ranks, _compiled)
    context, spare_bytes = _context_before_plan(step, options, groups, optimizers, others)
    decision = PlanDecision(step, options, passes, groups, others, context)
    if step.frames:
        decision.trace_frames()
    plan = _planned_and_synchronized(decision, step, groups, spare_bytes, to_train)
    for one in (ranks, *groups.along.values(), *groups.beside.values()):
        if one is not None:
            register_group(one)
    compare_anew(ranks)
    context = decision.decided(plan)
    if options.plan is None and (options.search == "thorough" or others.pending_bytes):
        # The plan's schedule is for a lower limit. A higher limit would change the schedule.
        context = context.replace(limit_bytes=plan.memory_limit_bytes)
    if plan.shards:
        for optimizer in optimizers.optimizers:
            check_works_on_rows(optimizer)
    progress.stage("sharding")
    renewed = step.lay_out(context, optimizers)
    for entry, new in zip(entries, renewed, strict=True):
        if entry.others is not None:
            keep_other_dims(new, entry.others)
    held = held_between_steps(context, plan)
    context = context.replace(base_bytes=context.base_bytes + sum(held.values()))
    session = Session(
        plan,
        step.mesh,
        context,
        options,
        passes,
        step.reading,
        step.frames,
        searched=decision.searched,
    )
    named = list(zip([entry.name for entry in entries], renewed, strict=True))
    remember(session, [root for _, root in step.roots], named)
    _tell_optimizers(named, context)
    _watch(session, renewed, others.watched_bytes + others.pending_bytes)
    _trace_steps(session, decision.step_key, groups)
    begin_if_waiting(session)
    return session


def _tell_optimizers(named: Sequence[tuple[str, nn.Parameter]], ctx: Context) -> None:
    """Let optimizers know who owns a matrix, and how whole state that they load is laid out."""
    share_matrices(named, ctx)
    if ctx.model_groups:  # state is a part, on other mesh dimensions
        return
    for name, parameter in named:
        if isinstance(parameter, DTensor):
            decision, cut = ctx.plan.decision(name), ctx.layout_of(name)
            mesh = parameter.device_mesh
            alike = functools.partial(lay_out_tensor, mesh=mesh, decision=decision, cut=cut)
            is_laid_out(parameter, alike)


def _planned_and_synchronized(
    decision: PlanDecision, step: Step, groups: Groups, spare_bytes: int, to_train: bool
) -> Plan:
    """The kept plan, or rank 0's; then all ranks have rank 0's values, too. Collective."""
    plan = decision.found()
    if plan is None:
        decision.measure_operators(spare_bytes, to_train)
    start_processor_test(groups.device)
    with step.with_values():
        if plan is None:  # the network and the other ranks are idle while rank 0 plans
            plan = from_rank_zero(decision.plan, groups.everyone)
    return plan


def _context_before_plan(
    step: Step,
    options: CheckedOptions,
    groups: Groups,
    optimizers: OptimizerIndex,
    others: OtherModels,
) -> tuple[Context, int]:
    """The machine, the parameters and the memory held, to plan with. Collective.

    The second result is the memory limit of measurements, in bytes.
    """
    entries, mesh = step.entries, step.mesh
    accumulated_bytes = 0
    if options.accumulate is True:
        accumulated_bytes = accumulated_bytes_of(entries, options.precision)
    held_bytes = held_bytes_of(step.roots, step.inputs, entries) + accumulated_bytes
    held_bytes += others.held_bytes
    pipeline = current_pipeline()
    in_flight = 1 if pipeline is None else pipeline.in_flight
    more = 0 if pipeline is None else pipeline.microbatches - 1
    held_bytes += more * input_bytes_of(step.roots, step.inputs, entries)
    spare_bytes = _spare_bytes(entries, held_bytes, options)
    progress.stage("measuring the machine")
    hardware = hardware_of(
        groups.ranks,
        groups.device,
        spare_bytes,
        options.hardware,
        mesh.mesh_dim_names[0] if mesh is not None and mesh.mesh_dim_names else None,
        groups.along,
        groups.beside,
        groups.everyone if groups.beside else None,
    )
    if groups.others is not None:  # the plan's ranks measure at once, beside those of other places
        hardware = from_rank_zero(lambda: hardware, groups.everyone)
    context = Context(
        plan=Plan((), world_size=size_of(groups.ranks)),
        hardware=hardware,
        parameters=tuple(described(entry, optimizers, options.optimizer) for entry in entries),
        world_size=size_of(groups.ranks),
        rank=rank_in(groups.ranks),
        group_name=name_of(groups.ranks),
        base_bytes=held_bytes + hardware.library_bytes,
        accumulated_bytes=accumulated_bytes,
        calls_in_flight=in_flight,
        gradient_buffers=0 if pipeline is None or pipeline.is_last else more,
        adds_gradients=options.accumulate == "reduced"
        or (pipeline is not None and pipeline.microbatches > 1)
        or (not options.accumulate and any(one.parameter.grad is not None for one in entries)),
        other_models_bytes=others.held_bytes,
        between_bytes=others.running_bytes,
        limit_bytes=options.memory_limit_bytes,
        uses_p2p=groups.uses_p2p,
        staged=staged_kinds(groups.ranks, groups.device),
        param_dtype=options.precision.param_dtype,
        reduce_dtype=options.precision.reduce_dtype,
        mesh_dims=groups.mesh_dims(hardware),
        model_groups=_model_groups(options, groups),
    )
    return context, spare_bytes - hardware.library_bytes


def _model_groups(options: CheckedOptions, groups: Groups) -> dict[str, ModelGroup]:
    """The process groups of the model's own collectives. Collective."""
    if groups.others is None or groups.ranks is None or groups.everyone is None:
        return {}
    assert options.mesh is not None
    return model_groups(
        options.mesh, groups.others, groups.ranks, groups.everyone, options.hardware
    )


def _trace_steps(session: Session, step_key: str, groups: Groups) -> None:
    """Trace some of the steps to come, on ranks that compute on CPUs; learn from them."""
    if groups.device.type != "cpu" or groups.are_fake:
        return
    learns = session.options.hardware is None and session.context.rank == 0
    kept = functools.partial(
        keep_learned,
        step_key=step_key,
        hardware=session.context.hardware,
        group=groups.ranks,
        device=groups.device,
        along=groups.measured,
    )
    trace_steps(session, kept if learns else None)


def _warn_of_whole(ctx: Context, options: CheckedOptions) -> None:
    """Warn if the whole model, before it is sharded, is above the limit."""
    limit_bytes = options.memory_limit_bytes
    whole_bytes = sum(one.full_bytes for one in ctx.parameters)
    if limit_bytes is not None and whole_bytes > limit_bytes and ctx.world_size > 1:
        log.warning(
            "the whole model takes %s until it is sharded at this first call, above "
            "memory_limit=%s: build it on the meta device, and shard it with osdp_compile.shard",
            format_bytes(whole_bytes),
            format_limit(limit_bytes),
            extra=OF_ALL_RANKS,
        )


def _watch(session: Session, parameters: Sequence[nn.Parameter], counted_bytes: int) -> None:
    """Begin to watch the model's memory in its process.

    ``counted_bytes``: bytes that its plan counts for other models, planned or not yet called.
    """
    ctx, plan = session.context, session.plan
    trained = [
        (parameter, shard_bytes(ctx, plan, one))
        for one, parameter in zip(ctx.parameters, parameters, strict=True)
        if one.requires_grad
    ]
    parts = base_parts(session)
    own = [parts["parameters"], parts["optimizer"], parts["inputs"]]
    room = ctx.adds_gradients or ctx.accumulated_bytes > 0
    session.watch.laid_out(trained, sum(own), room, counted_bytes)


def check_with_other_dims(options: CheckedOptions) -> None:
    """Refuse options for a model that is distributed over other mesh dimensions too.

    Raises:
        OsdpError: naming the option.
    """
    moved = options.plan is not None and options.plan.moved
    if options.tensor_parallel or moved:
        raise OsdpError(
            f"option {'plan' if moved else 'tensor_parallel'!r}: activations cannot move beside "
            "parallelize_module, which moves them already: leave the option out, or build the "
            "model without parallelize_module"
        )


def _log(session: Session) -> None:
    """Log the plan on rank 0."""
    if session.context.rank != 0:
        return
    log_plan(session.plan, log, in_one_line=bool(_torch.logs.shown_by_torch(NAMES)))
    learned = session.context.hardware.in_force
    if learned.steps:
        log.info("planned with what %d earlier steps taught: %s", learned.steps, learned)
    along = groups_along(session.options.mesh)
    if along and session.context.mesh_dims is None:
        log.info(
            "the hardware profile %r has no rates along %s: no collective goes stage by stage",
            session.context.hardware.name,
            " and ".join(map(repr, along)),
        )


def _spare_bytes(
    entries: Sequence[ModelParameter], held_bytes: int, options: CheckedOptions
) -> int:
    """Bytes for measurements beside the whole model, below the peak of training.

    Without a limit that peak is not known yet: the estimate is the size of the model, as gradients
    and optimizer state rarely take less.
    """
    whole_bytes = sum(e.shape.numel() * e.parameter.element_size() for e in entries)
    if options.memory_limit_bytes is None:
        return whole_bytes
    return options.memory_limit_bytes - whole_bytes - held_bytes


def _compiled() -> Iterator[nn.Module]:
    """The models compiled with this backend, directly or through a function that calls them."""
    from osdp_compile.engine.backend import osdp  # it imports this file

    return compiled_models(osdp)

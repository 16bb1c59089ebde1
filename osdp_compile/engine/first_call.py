"""First call of a model: ranks agree, measure, plan, and shard the model in place."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp_compile import _torch, progress
from osdp_compile.calibration.profile_cache import hardware_of, keep, keep_learned
from osdp_compile.calibration.step_times import with_step_seconds
from osdp_compile.calibration.workspaces import measured_workspaces
from osdp_compile.engine.deferred_init import write_as_into_whole_ones
from osdp_compile.engine.no_sync import begin_if_waiting, check_if_waiting
from osdp_compile.engine.strip_markers import only_reads, unmarked
from osdp_compile.errors import PlanMismatch
from osdp_compile.log_lines import NAMES, OF_ALL_RANKS
from osdp_compile.model.agreement import agree, fingerprint, from_rank_zero, on_every_rank
from osdp_compile.model.find_modules import plain_parameters
from osdp_compile.model.mixed_precision import end_casting
from osdp_compile.model.shard_in_place import (
    ModelParameter,
    Reading,
    buffers_of,
    check_fits,
    held_elsewhere,
    keep_in_place,
    shard_in_place,
    synchronize,
)
from osdp_compile.optim.checks import check_works_on_rows
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.alternatives import SearchedStep
from osdp_compile.planning.frames import captured_frames, unseen_bytes_of
from osdp_compile.planning.plan_cache import KeptPlan, find, pass_lines, path_of, plans_folder
from osdp_compile.planning.plan_cache import keep as keep_plan
from osdp_compile.planning.planner_inputs import (
    accumulated_bytes_of,
    captured_step,
    described,
    held_bytes_of,
    owned_parameters,
    slices_of,
    stays_of,
)
from osdp_compile.planning.step_key import Uncertain, captured_lines, dynamo_lines
from osdp_compile.planning.traced_step import planned_whole
from osdp_compile.reports.plan_table import log_plan
from osdp_compile.runtime.collectives import Group, backend_of, name_of, rank_in, size_of
from osdp_compile.runtime.current_call import interrupted_call
from osdp_compile.runtime.eager_markers import register_group
from osdp_compile.runtime.meshes import (
    flat_mesh,
    group_of_mesh,
    groups_along,
    mesh_dim,
    mesh_dims_of,
    number_of_ranks,
    own_mesh,
)
from osdp_compile.runtime.p2p import group_uses_p2p, staged_kinds
from osdp_compile.tracking.learning import trace_steps
from osdp_compile.tracking.other_models import OtherModels, other_models, planned_under_share
from osdp_compile.tracking.pending_model import PendingModel, end_waiting
from osdp_compile.tracking.session import Session, base_parts, remember, session_for
from osdp_compile.tracking.uncovered import compiled_models
from passes.annotate.training_state import held_between_steps
from passes.capture.captured_step import NothingMoves, NothingSaved
from passes.graph.captured import Captured
from passes.pipeline import Pass, default_passes, validate
from passes.plan.planner import complete
from passes.types.context import Context, MeshDim
from passes.types.hardware import Hardware
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_limit

log = logging.getLogger("osdp_compile")


@dataclasses.dataclass(frozen=True)
class _Step:
    """The planned graph and its model.

    ``mesh``: over all ranks; None: there is one.
    ``captured``: returns the training step with whole parameters. Rank 0 calls it; if the step
    has several frames, every rank.
    ``frames``: the step may be several graphs, separated by graph breaks.
    ``lay_out``: shards the model by the context's plan; returns the new parameters.
    ``reading``: how modules then read the parameters.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    roots: Sequence[tuple[str, nn.Module]]
    entries: Sequence[ModelParameter]
    mesh: DeviceMesh | None
    captured: Callable[[Context, Sequence[Pass]], Captured]
    lay_out: Callable[[Context, OptimizerIndex], Sequence[nn.Parameter]]
    reading: Reading
    frames: bool = False


def first_call(gm: fx.GraphModule, inputs: Sequence[Any], options: CheckedOptions) -> Session:
    """Plan the model that owns the graph's parameters, and shard it in place.

    The model stays unchanged until a plan fits.

    Raises:
        InfeasibleLimit, PlanMismatch, RanksDiffer, OsdpError.
    """
    device = plain_parameters(gm, inputs)[0][1].device
    mesh = flat_mesh(options.mesh, device.type) if number_of_ranks(options.mesh) > 1 else None
    group = group_of_mesh(mesh)
    call = interrupted_call(gm, inputs)
    roots, owned = on_every_rank(lambda: owned_parameters(gm, inputs, call), group)
    entries = held_elsewhere(owned)
    reading = Reading(options.precision)

    def captured(context: Context, passes: Sequence[Pass]) -> Captured:
        if call is not None:
            found = captured_frames(call, roots, context, passes)
            if found is not None:
                return found
        return captured_step(gm, inputs, entries, context, passes)

    def lay_out(context: Context, optimizers: OptimizerIndex) -> Sequence[nn.Parameter]:
        end_casting([module for _, root in roots for module in root.modules()])
        _warn_of_whole(context, options)
        # A generator, not a list: ``shard_in_place`` frees each whole tensor.
        values = (entry.parameter.detach() for entry in entries)
        synchronize(itertools.chain(values, buffers_of(roots)), group)
        if mesh is None or not context.plan.shards:
            renewing = optimizers if call is not None else None
            return keep_in_place(entries, context, reading, renewing)
        own = own_mesh(mesh, options.mesh, context.plan)
        return shard_in_place(entries, own, context, optimizers, reading)

    given = inputs if call is None else _torch.tree_leaves((call.args, call.kwargs))
    step = _Step(
        gm, given, roots, entries, mesh, captured, lay_out, reading, frames=call is not None
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
        lambda: (laid_out.options(options), laid_out.parameters(root)), mesh.get_group()
    )

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
            synchronize(of_hosts, next(iter(groups_along(laid_out.given_mesh).values())))
        return [entry.parameter for entry in entries]

    reading = laid_out.reading
    step = _Step(gm, inputs, [("", root)], entries, mesh, captured, lay_out, reading)
    session = _session(step, given, to_train=trains)
    if trains:
        end_waiting(root)
        write_as_into_whole_ones()
        _log(session)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The process groups of a first call.

    ``ranks``: of all ranks. ``along``: by mesh dimension, the outer first; empty for a flat mesh.
    ``uses_p2p``: gathers and scatters are P2P messages.
    """

    ranks: Group
    along: Mapping[str, dist.ProcessGroup]
    device: torch.device
    uses_p2p: bool

    @property
    def are_fake(self) -> bool:
        """Whether their collectives do nothing: the other ranks do not exist."""
        return backend_of(self.ranks, self.device.type) == "fake"

    def mesh_dims(self, hardware: Hardware) -> tuple[MeshDim, MeshDim] | None:
        """The mesh dimensions along which the profile has rates."""
        dims = [mesh_dim(name, group) for name, group in self.along.items()]
        return mesh_dims_of(dims, hardware, self.uses_p2p)


@progress.of_first_call
def _session(step: _Step, options: CheckedOptions, to_train: bool = True) -> Session:
    """Agree on the options, measure, decide on a plan, shard the model. Collective."""
    passes = tuple(options.passes or default_passes())
    validate(passes)
    entries, ranks = step.entries, group_of_mesh(step.mesh)
    device = entries[0].parameter.device
    groups = _Groups(ranks, groups_along(options.mesh), device, group_uses_p2p(ranks, device))
    check_if_waiting([entry.parameter for entry in entries], options)
    lines = [*options.lines(), *fingerprint(step.gm, entries)]
    agree([f"gathers and scatters by messages: {groups.uses_p2p}", *lines], ranks)

    optimizers = OptimizerIndex(entry.parameter for entry in entries)
    others = OtherModels()
    if options.memory_limit_bytes is not None:
        others = other_models(entries, ranks, _compiled)
    context, spare_bytes = _context_before_plan(step, options, groups, optimizers, others)
    decision = _PlanDecision(step, options, passes, groups, others, context)
    if step.frames and not (options.plan is not None and options.plan.order):
        decision.trace_frames()
    plan = decision.found()
    if plan is None:
        decision.measure_operators(spare_bytes, to_train)
        plan = from_rank_zero(decision.plan, ranks)

    for one in (ranks, *groups.along.values()):
        if one is not None:
            register_group(one)
    context = decision.context.replace(plan=plan)
    if options.plan is None and (options.search == "thorough" or others.pending_bytes):
        # The plan's schedule is for a lower limit. A higher limit would change the schedule.
        context = context.replace(limit_bytes=plan.memory_limit_bytes)
    if plan.shards:
        for optimizer in optimizers.optimizers:
            check_works_on_rows(optimizer)
    progress.stage("sharding")
    renewed = step.lay_out(context, optimizers)
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
    names = [entry.name for entry in entries]
    remember(session, [root for _, root in step.roots], list(zip(names, renewed, strict=True)))
    _watch(session, renewed, others.watched_bytes + others.pending_bytes)
    _trace_steps(session, decision.step_key, groups)
    begin_if_waiting(session)
    return session


def _context_before_plan(
    step: _Step,
    options: CheckedOptions,
    groups: _Groups,
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
    spare_bytes = _spare_bytes(entries, held_bytes, options)
    progress.stage("measuring the machine")
    hardware = hardware_of(
        groups.ranks,
        groups.device,
        spare_bytes,
        options.hardware,
        mesh.mesh_dim_names[0] if mesh is not None and mesh.mesh_dim_names else None,
        groups.along,
    )
    context = Context(
        plan=Plan((), world_size=size_of(groups.ranks)),
        hardware=hardware,
        parameters=tuple(described(entry, optimizers, options.optimizer) for entry in entries),
        world_size=size_of(groups.ranks),
        rank=rank_in(groups.ranks),
        group_name=name_of(groups.ranks),
        base_bytes=held_bytes + hardware.library_bytes,
        accumulated_bytes=accumulated_bytes,
        adds_gradients=options.accumulate == "reduced"
        or (not options.accumulate and any(one.parameter.grad is not None for one in entries)),
        other_models_bytes=others.held_bytes,
        between_bytes=others.running_bytes,
        limit_bytes=options.memory_limit_bytes,
        uses_p2p=groups.uses_p2p,
        staged=staged_kinds(groups.ranks, groups.device),
        param_dtype=options.precision.param_dtype,
        reduce_dtype=options.precision.reduce_dtype,
        mesh_dims=groups.mesh_dims(hardware),
    )
    return context, spare_bytes


class _PlanDecision:
    """The way of one step to its plan: trace, measure operators, plan.

    ``context``: the context to plan with. Tracing and measuring complete it.
    ``step_key``: identifies the step in the profile (``Hardware.for_step``); rank 0's.
    ``searched``: the step, on the rank that searched the plan.
    """

    def __init__(
        self,
        step: _Step,
        options: CheckedOptions,
        passes: Sequence[Pass],
        groups: _Groups,
        others: OtherModels,
        context: Context,
    ) -> None:
        self.step_key = from_rank_zero(lambda: _step_key(step, options), groups.ranks)
        self._step, self._options, self._passes = step, options, passes
        self._groups, self._others = groups, others
        self._profile = context.hardware
        self.context = self._by_profile(context)
        self._captured: Captured | None = None  # on rank 0; with several frames on all ranks
        self._lines: list[str] | None = None  # the step as text, on rank 0; None: no plan is kept
        self.searched: SearchedStep | None = None

    def _by_profile(self, context: Context) -> Context:
        """A context with the prices of the profile, corrected for this step."""
        hardware = self._profile.for_step(self.step_key)
        return context.replace(hardware=hardware, mesh_dims=self._groups.mesh_dims(hardware))

    def _trace(self) -> Captured:
        progress.stage("tracing")
        with _torch.with_settings(self._options.inductor or {}):
            self._captured = self._step.captured(self.context, self._passes)
        return self._captured

    def trace_frames(self) -> None:
        """Trace a step of several frames. Collective.

        The graph break may be at a collective of the model itself: all ranks run it.
        """
        unseen_bytes = unseen_bytes_of(self._trace(), self.context)
        self.context = self.context.replace(base_bytes=self.context.base_bytes + unseen_bytes)

    def found(self) -> Plan | None:
        """The kept plan of an earlier run with the same step, options and machine. Collective."""
        kept = from_rank_zero(self._find, self._groups.ranks)
        if kept is None:
            return None
        self.context = self.context.replace(workspaces=kept.workspaces)
        return kept.plan

    def _find(self) -> KeptPlan | None:
        if self._groups.are_fake or self._options.plan is not None or plans_folder() is None:
            return None
        try:
            self._lines = self._step_lines()
        except Uncertain as why:
            log.debug("no plan is kept for this step: %s", why)
        path = self._path()
        return None if path is None else find(path, self.context)

    def _step_lines(self) -> list[str]:
        """The step as text: the Dynamo graph if that is enough, else the captured graphs."""
        step = self._step
        decided = [*self._options.lines(), *pass_lines(self._passes), repr(self._others)]
        if not step.frames:
            names = {id(entry.parameter): entry.name for entry in step.entries}
            own = {i: names[id(one)] for i, one in enumerate(step.inputs) if id(one) in names}
            try:
                return [*decided, *dynamo_lines(step.gm, step.inputs, own)]
            except Uncertain as why:
                log.debug("the step is traced to look for its plan: %s", why)
        return [*decided, *captured_lines(self._captured or self._trace())]

    def _path(self) -> Path | None:
        """The file of the step's plan with the context's profile; None: no plan is kept."""
        try:
            return None if self._lines is None else path_of(self._lines, self.context)
        except Uncertain as why:
            log.debug("no plan is kept for this step: %s", why)
            return None

    def measure_operators(self, spare_bytes: int, to_train: bool) -> None:
        """Trace the step, and measure its operators, if the plan is not known yet. Collective."""
        group, device = self._groups.ranks, self._groups.device
        measures = from_rank_zero(lambda: self._prepare(to_train), group)
        measured = self._profile
        if measures:
            progress.stage("measuring operators")
            plain = self.context.replace(hardware=self._profile)
            measured = with_step_seconds(self._captured, plain, group, device, spare_bytes)
        self._profile = from_rank_zero(lambda: measured, group)
        workspaces = from_rank_zero(lambda: self._workspaces(spare_bytes), group)
        self.context = self._by_profile(self.context.replace(workspaces=workspaces))
        if measures:  # keep it also if the limit is refused: the error's limit is of this profile
            keep(self._profile, group, device, self._groups.along)

    def _workspaces(self, spare_bytes: int) -> dict[str, int]:
        if self._groups.are_fake or self._captured is None:
            return {}
        return measured_workspaces(self._captured, self._groups.device, spare_bytes)

    def _prepare(self, to_train: bool) -> bool:
        """Check a given plan, trace the step if it is needed; True: measure its operators."""
        given = self._options.plan
        if given is not None:
            check_fits(
                given,
                self._step.entries,
                self.context.world_size,
                _name_of_given_plan(self._step),
                self.context.ranks_of_a_host,
            )
            is_saved = given.order and given.prediction is not None
            if is_saved or not to_train:
                return False
        if self._captured is None:
            self._trace()
        return self._options.hardware is None and not self._groups.are_fake

    def plan(self) -> Plan:
        """The given plan, completed for the traced step, or the planner's plan."""
        options, given = self._options, self._options.plan
        if self._captured is None:
            assert given is not None
            return given
        if given is not None:
            try:
                return complete(given, self._captured, self.context, self._passes)
            except (NothingSaved, NothingMoves) as error:
                raise PlanMismatch(f"the plan given in options does not fit: {error}") from None
        progress.stage("planning")
        self.searched = SearchedStep(self._captured, self.context, tuple(self._passes))
        if options.memory_limit_bytes is None:
            made = self._plan_under(None)
        else:
            whole_bytes = sum(one.full_bytes for one in self.context.parameters)
            made = planned_under_share(
                self._plan_under, self._others, options.memory_limit_bytes, whole_bytes
            )
        path = self._path()
        if path is not None:
            keep_plan(made, self.context, path)
        return made

    def _plan_under(self, limit_bytes: int | None) -> Plan:
        assert self._captured is not None
        slices = slices_of(self._options.slices, self.context.parameters)
        stays = stays_of(self._options.tensor_parallel, self.context.parameters)
        context = self.context.replace(
            slices=slices, tensor_parallel=stays, limit_bytes=limit_bytes
        )
        return planned_whole(self._captured, context, self._passes, self._options.search)


def _step_key(step: _Step, options: CheckedOptions) -> str:
    """Identifies a training step in the profile: its parameters, operations and input shapes."""
    inputs = [
        f"input {tuple(one.shape)} {one.dtype}"
        for one in step.inputs
        if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter)
    ]
    lines = [*fingerprint(step.gm, step.entries), *inputs, str(options.precision)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _trace_steps(session: Session, step_key: str, groups: _Groups) -> None:
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
        along=groups.along,
    )
    trace_steps(session, kept if learns else None)


def _name_of_given_plan(step: _Step) -> str:
    """The plan in the options, for messages; with several frames it names their models."""
    if not step.frames:
        return "plan given in options"
    models = " and ".join(type(root).__name__ for _, root in step.roots)
    return f"plan given in options, which is for all of {models},"


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
        (parameter, one.shard_bytes(ctx.cut(plan.decision(one.name)).ranks))
        for one, parameter in zip(ctx.parameters, parameters, strict=True)
        if one.requires_grad
    ]
    parts = base_parts(session)
    own = [parts["parameters"], parts["optimizer"], parts["inputs"]]
    room = ctx.adds_gradients or ctx.accumulated_bytes > 0
    session.watch.laid_out(trained, sum(own), room, counted_bytes)


def _log(session: Session) -> None:
    """Log the plan on rank 0."""
    if session.context.rank != 0:
        return
    log_plan(session.plan, log, in_one_line=bool(_torch.shown_by_torch(NAMES)))
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
    whole_bytes = sum(e.parameter.numel() * e.parameter.element_size() for e in entries)
    if options.memory_limit_bytes is None:
        return whole_bytes
    return options.memory_limit_bytes - whole_bytes - held_bytes


def _compiled() -> Iterator[nn.Module]:
    """The models compiled with this backend, directly or through a function that calls them."""
    from osdp_compile.engine.backend import osdp  # it imports this file

    return compiled_models(osdp)

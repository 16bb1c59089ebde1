"""The way of a training step to its plan: found again, given, or searched on the traced step."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile import _torch, progress
from osdp_compile.calibration.profile_cache import keep
from osdp_compile.calibration.step_times import with_step_seconds
from osdp_compile.calibration.workspaces import measured_workspaces
from osdp_compile.errors import PlanMismatch
from osdp_compile.model.agreement import fingerprint, from_rank_zero
from osdp_compile.model.alike_frames import alike_frames
from osdp_compile.model.model_parameters import ModelParameter, check_fits
from osdp_compile.model.other_dims import OtherDims
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.alternatives import SearchedStep
from osdp_compile.planning.frames import unseen_bytes_of
from osdp_compile.planning.plan_cache import KeptPlan, find, pass_lines, path_of, plans_folder
from osdp_compile.planning.plan_cache import keep as keep_plan
from osdp_compile.planning.planner_inputs import slices_of, stays_of
from osdp_compile.planning.step_key import Uncertain, captured_lines, dynamo_lines
from osdp_compile.planning.traced_step import planned_whole
from osdp_compile.runtime.collectives import Group, backend_of
from osdp_compile.runtime.meshes import mesh_dim, mesh_dims_of
from osdp_compile.sharding.parameter_reads import Reading
from osdp_compile.tracking.other_models import OtherModels, planned_under_share
from passes.capture.captured_step import NothingMoves, NothingSaved, NotInChunks
from passes.graph.captured import Captured
from passes.pipeline import Pass
from passes.plan.planner import complete
from passes.types.context import Context, MeshDim
from passes.types.hardware import Hardware
from passes.types.plan import Plan

log = logging.getLogger("osdp_compile")


@dataclasses.dataclass(frozen=True)
class Step:
    """The planned graph and its model.

    ``mesh``: over all ranks; None: there is one.
    ``captured``: returns the training step with whole parameters. Rank 0 calls it; if the step
    has several frames, every rank.
    ``frames``: the step may be several graphs, separated by graph breaks.
    ``lay_out``: shards the model by the context's plan; returns the new parameters.
    ``reading``: how modules then read the parameters.
    ``with_values``: a context in which rank 0's values go to the other ranks.
    ``everyone``: the ranks that must agree: those of ``mesh``, and of the parameters' other mesh
    dimensions. ``others``: their placement there; None: they have no other dimensions.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    roots: Sequence[tuple[str, nn.Module]]
    entries: Sequence[ModelParameter]
    mesh: DeviceMesh | None
    captured: Callable[[Context, Sequence[Pass]], Captured]
    lay_out: Callable[[Context, OptimizerIndex], Sequence[nn.Parameter]]
    reading: Reading
    with_values: Callable[[], AbstractContextManager[None]]
    frames: bool = False
    everyone: Group = None
    others: OtherDims | None = None


@dataclasses.dataclass(frozen=True)
class Groups:
    """The process groups of a first call.

    ``ranks``: of all ranks. ``along``: by mesh dimension, the outer first; empty for a flat mesh.
    ``uses_p2p``: gathers and scatters are P2P messages.
    ``everyone``: as in :class:`Step`. ``others``: the parameters' other mesh dimensions.
    """

    ranks: Group
    along: Mapping[str, dist.ProcessGroup]
    device: torch.device
    uses_p2p: bool
    everyone: Group = None
    others: DeviceMesh | None = None

    @property
    def beside(self) -> dict[str, dist.ProcessGroup]:
        """The process groups along the other mesh dimensions."""
        if self.others is None:
            return {}
        return {name: self.others.get_group(name) for name in self.others.mesh_dim_names or ()}

    @property
    def measured(self) -> dict[str, dist.ProcessGroup]:
        """All process groups along a mesh dimension; the profile has their rates."""
        return {**self.along, **self.beside}

    @property
    def are_fake(self) -> bool:
        """Whether their collectives do nothing: the other ranks do not exist."""
        return backend_of(self.ranks, self.device.type) == "fake"

    def mesh_dims(self, hardware: Hardware) -> tuple[MeshDim, MeshDim] | None:
        """The mesh dimensions along which the profile has rates."""
        dims = [mesh_dim(name, group) for name, group in self.along.items()]
        return mesh_dims_of(dims, hardware, self.uses_p2p)


class PlanDecision:
    """The way of one step to its plan: trace, measure operators, plan.

    ``context``: the context to plan with. Tracing and measuring complete it.
    ``step_key``: identifies the step in the profile (``Hardware.for_step``); rank 0's.
    ``searched``: the step, on the rank that searched the plan.
    """

    def __init__(
        self,
        step: Step,
        options: CheckedOptions,
        passes: Sequence[Pass],
        groups: Groups,
        others: OtherModels,
        context: Context,
    ) -> None:
        self.step_key = from_rank_zero(lambda: _step_key(step, options), groups.everyone)
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
        with _torch.inductor.with_settings(self._options.inductor or {}):
            self._captured = self._step.captured(self.context, self._passes)
        return self._captured

    def trace_frames(self) -> None:
        """Trace a step of several frames. Collective.

        The graph break may be at a collective of the model itself: all ranks run it.
        """
        unseen_bytes = unseen_bytes_of(self._trace(), self.context)
        self.context = self.context.replace(base_bytes=self.context.base_bytes + unseen_bytes)

    def decided(self, plan: Plan) -> Context:
        """The context with the plan; notes the frames that share compiled code under it."""
        context = self.context.replace(plan=plan)
        if self._captured is not None and self._captured.runs:
            self._step.reading.alike = alike_frames(self._captured.runs, context)
        return context

    def found(self) -> Plan | None:
        """The kept plan of an earlier run with the same step, options and machine. Collective."""
        kept = from_rank_zero(self._find, self._groups.everyone)
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
        everyone = self._groups.everyone
        measures = from_rank_zero(lambda: self._prepare(to_train), everyone)
        measured = self._profile
        if measures:
            progress.stage("measuring operators")
            plain = self.context.replace(hardware=self._profile)
            measured = with_step_seconds(self._captured, plain, group, device, spare_bytes)
        self._profile = from_rank_zero(lambda: measured, everyone)
        workspaces = from_rank_zero(lambda: self._workspaces(spare_bytes), everyone)
        self.context = self._by_profile(self.context.replace(workspaces=workspaces))
        if measures:  # keep it also if the limit is refused: the error's limit is of this profile
            keep(self._profile, group, device, self._groups.measured)

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
            except (NothingSaved, NothingMoves, NotInChunks) as error:
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


def _step_key(step: Step, options: CheckedOptions) -> str:
    """Identifies a training step in the profile: its parameters, operations and input shapes."""
    inputs = [
        f"input {tuple(one.shape)} {one.dtype}"
        for one in step.inputs
        if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter)
    ]
    lines = [*fingerprint(step.gm, step.entries), *inputs, str(options.precision)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _name_of_given_plan(step: Step) -> str:
    """The plan in the options, for messages; with several frames it names their models."""
    if not step.frames:
        return "plan given in options"
    models = " and ".join(type(root).__name__ for _, root in step.roots)
    return f"plan given in options, which is for all of {models},"

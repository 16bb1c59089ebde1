"""A training step traced once, to plan it for any cluster, without the cluster."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from osdp_compile import _torch, progress
from osdp_compile.errors import InfeasibleLimit, OsdpError
from osdp_compile.model.find_modules import plain_parameters
from osdp_compile.model.mixed_precision import OWN_PRECISION, Precision, traced_cast
from osdp_compile.model.shard_in_place import ModelParameter, check_shardable, model_parameters
from osdp_compile.options import Accumulate, Search
from osdp_compile.planning.fake_model import fake_models
from osdp_compile.planning.frames import captured_frames, collected, is_collecting, unseen_bytes_of
from osdp_compile.planning.planner_inputs import (
    accumulated_bytes_of,
    captured_step,
    described,
    held_bytes_of,
    owned_parameters,
)
from osdp_compile.runtime.current_call import Call, interrupted_call
from osdp_compile.runtime.meshes import mesh_dims_of
from passes.capture.captured_step import Captured
from passes.capture.fold_layers import Folded, fold
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.pipeline import Pass, default_passes, validate
from passes.plan.monotone_search import MonotoneSearch
from passes.plan.planner import Infeasible, complete, make_plan
from passes.types.context import Context, MeshDim, Parameter
from passes.types.decision import Decision
from passes.types.hardware import Hardware, generic
from passes.types.plan import Plan, Prediction

log = logging.getLogger("osdp_compile")

#: A step with more forward and backward nodes is folded, if possible.
_MOST_NODES = 2500
#: Tries to complete the plan of a folded step on the whole step.
_WHOLE_TRIES = 3
#: The kinds of collective that the planner needs rates for.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
NOTHING_TO_PLAN = (
    "no output of the model needs gradients: there is nothing to plan (are all parameters frozen, "
    "or is the model called under no_grad?)"
)
#: The graphs' name of a process group that does not exist.
_GROUP = "osdp_offline"


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A model's training step, traced once, for plans of any cluster.

    ``held_bytes``: buffers, the batch, memory that no graph shows, and ``accumulated_bytes`` (whole
    accumulated gradients). ``adds_gradients``, ``slices``: as in the planner's context.
    """

    captured: Captured
    parameters: tuple[Parameter, ...]
    held_bytes: int
    passes: tuple[Pass, ...]
    slices: tuple[tuple[str, int, int], ...] | None = None
    accumulated_bytes: int = 0
    adds_gradients: bool = False

    @functools.cached_property
    def folded(self) -> Folded | None:
        """The folded step, with a few layers for all; None: not large, or not foldable."""
        return folded_if_large(self.captured, self.parameters)

    def context(
        self, ranks: Mapping[str, int], hardware: Hardware, limit_bytes: int | None
    ) -> Context:
        """The passes' context; ``ranks``: mesh dimension (one or two) -> number of ranks.

        Raises:
            OsdpError: if the profile lacks rates of collectives.
        """
        lacking = [kind for kind in _KINDS if kind not in hardware.collectives]
        if lacking:
            raise OsdpError(
                f"the hardware profile {hardware.name!r} has no rates for {', '.join(lacking)}: "
                "measure it with several ranks, torchrun ... -m osdp_compile calibrate"
            )
        world_size = math.prod(ranks.values())
        hardware = hardware.over(ranks)
        uses_p2p = hardware.collectives["all_gather"].carried_out == "messages"
        mesh_dims = [MeshDim(name, size, f"{_GROUP}_{name}") for name, size in ranks.items()]
        return Context(
            plan=Plan((), world_size=world_size),
            hardware=hardware,
            parameters=self.parameters,
            world_size=world_size,
            rank=0,
            group_name=_GROUP,
            base_bytes=self.held_bytes,
            accumulated_bytes=self.accumulated_bytes,
            adds_gradients=self.adds_gradients,
            limit_bytes=limit_bytes,
            uses_p2p=uses_p2p,
            slices=self.slices,
            mesh_dims=mesh_dims_of(mesh_dims, hardware, uses_p2p),
        )

    def plan(
        self,
        ranks: Mapping[str, int],
        hardware: Hardware,
        limit_bytes: int | None = None,
        search: Search = "quick",
        say: Callable[[str], None] = lambda text: None,
    ) -> Plan:
        """The fastest plan under the limit; a thorough search reports each search to ``say``.

        Raises:
            InfeasibleLimit: if no plan fits.
        """
        ctx = self.context(ranks, hardware, limit_bytes)
        step = chosen(self.captured, self.folded, ctx)
        return planned(step, ctx, self.passes, search, say)

    def monotone_search(
        self,
        ranks: Mapping[str, int],
        hardware: Hardware,
        say: Callable[[str], None] = lambda text: None,
    ) -> MonotoneSearch:
        """A thorough search for several limits; it evaluates each limit of its grid once."""
        ctx = self.context(ranks, hardware, None)
        step = chosen(self.captured, self.folded, ctx)
        return MonotoneSearch(step, ctx, self.passes, say, progress.detail)

    def least_bytes(self, ranks: Mapping[str, int], hardware: Hardware) -> int:
        """The lowest feasible limit, as in the error :class:`InfeasibleLimit`."""
        return self.monotone_search(ranks, hardware).least.peak_bytes

    def uniform(
        self,
        decision: Decision,
        ranks: Mapping[str, int],
        hardware: Hardware,
        limit_bytes: int | None = None,
    ) -> Plan:
        """One decision for all parameters, with its best schedule and its prediction.

        ``limit_bytes``: the schedule gives up overlap for it; None: maximum overlap.
        """
        ctx = self.context(ranks, hardware, limit_bytes)
        plan = Plan.uniform(
            [(one.name, one) for one in self.parameters],
            decision,
            world_size=ctx.world_size,
            bucket_bytes=bucket_bytes_for(ctx),
            ranks_of_a_host=ctx.ranks_of_a_host,
        ).replace(memory_limit_bytes=limit_bytes)
        return self._completed(plan, ctx)

    def priced(self, plan: Plan, ranks: Mapping[str, int], hardware: Hardware) -> Prediction:
        """The simulator's prediction of a plan on this hardware, for which it need not be made."""
        ctx = self.context(ranks, hardware, plan.memory_limit_bytes)
        return predicted(self._completed(plan, ctx))

    def _completed(self, plan: Plan, ctx: Context) -> Plan:
        step = chosen(self.captured, self.folded, ctx)
        if plan.recompute:  # names tensors of all layers
            step = self.captured
        return complete(plan, step, ctx, self.passes)


def predicted(plan: Plan) -> Prediction:
    """The prediction of a made or completed plan."""
    assert plan.prediction is not None
    return plan.prediction


def planned(
    step: Captured | Folded,
    ctx: Context,
    passes: Sequence[Pass],
    search: Search = "quick",
    say: Callable[[str], None] = log.info,
) -> Plan:
    """The fastest plan under the context's limit.

    The plan of a thorough search is for its own limit, which may be lower
    (``passes/plan/monotone_search.py``).

    ``step``: for a folded step the plan has no order of collectives
    (:func:`planned_whole` gives one).

    Raises:
        InfeasibleLimit: if no plan fits.
    """
    try:
        if search == "thorough" and ctx.limit_bytes is not None:
            return MonotoneSearch(step, ctx, passes, say, progress.detail).plan(ctx.limit_bytes)
        return make_plan(step, ctx, passes, progress.detail)
    except Infeasible as error:
        raise InfeasibleLimit(str(error), error.least_bytes) from None


def planned_whole(
    captured: Captured, ctx: Context, passes: Sequence[Pass], search: Search = "quick"
) -> Plan:
    """The fastest plan under the context's limit, with the order of its collectives.

    The plan of a folded step is completed on the whole step. If its peak there is above the limit,
    the next try has a lower limit. After the last try the planner works on the whole step.

    Raises:
        InfeasibleLimit: if no plan fits.
    """
    step = chosen(captured, folded_if_large(captured, ctx.parameters), ctx)
    if step is captured:
        return planned(step, ctx, passes, search)
    asked = ctx
    for _ in range(_WHOLE_TRIES):
        try:
            plan = planned(step, asked, passes, search)
            own = ctx
            if search == "thorough":
                own = ctx.replace(limit_bytes=plan.memory_limit_bytes)
            plan = complete(plan, captured, own, passes)
        except InfeasibleLimit:
            break  # an error must name the whole step's lowest feasible limit
        if ctx.limit_bytes is None or asked.limit_bytes is None:
            return plan
        above_bytes = predicted(plan).peak_bytes - ctx.limit_bytes
        if above_bytes <= 0:
            return plan
        asked = asked.replace(limit_bytes=asked.limit_bytes - above_bytes)
    return planned(captured, ctx, passes, search)


def folded_if_large(captured: Captured, parameters: Sequence[Parameter]) -> Folded | None:
    """The step without repeated inner layers; None: small, several frames, or no equal layers."""
    nodes = len(captured.forward.graph.nodes) + len(captured.backward.graph.nodes)
    if nodes <= _MOST_NODES or captured.is_joined:
        return None
    folded = fold(captured, parameters)
    if folded is None:
        log.debug("a step of %d nodes has no layers that are alike: planned as a whole", nodes)
    return folded


def chosen(captured: Captured, folded: Folded | None, ctx: Context) -> Captured | Folded:
    """The step for the planner: folded, unless the whole step is necessary.

    That is: not folded, a bucket larger than one layer, or user-forced slices.
    """
    if folded is None or ctx.slices or bucket_bytes_for(ctx) > folded.layer_bytes(ctx):
        return captured
    return folded


class _SeveralFrames(OsdpError):
    """Leaves Dynamo: the graph is not the whole step."""


class _Found(OsdpError):
    """Leaves Dynamo with the traced step."""

    def __init__(self, step: TracedStep) -> None:
        super().__init__("traced")
        self.step = step


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: int | str = "adamw",
    passes: Sequence[Pass] | None = None,
    precision: Precision = OWN_PRECISION,
    accumulate: Accumulate = False,
) -> TracedStep:
    """Trace a training step of a fake model, with all graphs that need gradients, as the backend.

    Raises:
        OsdpError: if a parameter cannot be sharded, or if no result needs gradients.
    """
    chosen = tuple(passes or default_passes())
    validate(chosen)
    check_shardable(model_parameters([("", model)]))  # fake parameters have no hooks

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if is_collecting():
            return collected(gm, inputs)
        if not any(parameter.requires_grad for _, parameter in plain_parameters(gm, inputs)):
            return gm
        if interrupted_call(gm, inputs) is not None:
            _torch.raise_to_user(_SeveralFrames("the step is several graphs"))
        try:
            found = _traced(gm, inputs, optimizer, chosen, precision, accumulate)
        except OsdpError as error:
            _torch.raise_to_user(error)
        _torch.raise_to_user(_Found(found))

    compiled = torch.compile(model, backend=backend, dynamic=False)
    inputs = (tuple(args), dict(kwargs or {}))
    with fake_models([model], inputs, _device_of(model)) as (given, named):
        try:
            with torch.enable_grad(), traced_cast(model, precision):
                compiled(*given, **named)
        except _Found as found:
            return found.step
        except _SeveralFrames:
            pass
        else:
            raise OsdpError(NOTHING_TO_PLAN)
    call = Call(compiled, *inputs, modules=(model,), is_whole=False)
    with traced_cast(model, precision):
        return _traced_frames(model, call, optimizer, chosen, precision, accumulate)


def _device_of(model: nn.Module) -> torch.device:
    """The device of the trace: the model's, or the CPU for a meta model.

    Not CUDA for a meta model: a build of torch without CUDA cannot trace for it.
    """
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))


def _traced_frames(
    model: nn.Module,
    call: Call,
    optimizer: int | str,
    passes: tuple[Pass, ...],
    precision: Precision,
    accumulate: Accumulate,
) -> TracedStep:
    """The traced step of a model with graph breaks."""
    roots = [("", model)]
    entries = model_parameters(roots)
    ctx = _context(entries, optimizer, precision)
    captured = captured_frames(call, roots, ctx, passes, _device_of(model))
    if captured is None:
        raise OsdpError(NOTHING_TO_PLAN)
    held_bytes = held_bytes_of(roots, _torch.tree_leaves((call.args, call.kwargs)), entries)
    held_bytes += unseen_bytes_of(captured, ctx)
    return _step(captured, ctx, entries, held_bytes, passes, precision, accumulate)


def _traced(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    optimizer: int | str,
    passes: tuple[Pass, ...],
    precision: Precision,
    accumulate: Accumulate,
) -> TracedStep:
    roots, entries = owned_parameters(gm, inputs)
    ctx = _context(entries, optimizer, precision)
    captured = captured_step(gm, inputs, entries, ctx, passes)
    held_bytes = held_bytes_of(roots, inputs, entries)
    return _step(captured, ctx, entries, held_bytes, passes, precision, accumulate)


def _context(
    entries: Sequence[ModelParameter], optimizer: int | str, precision: Precision
) -> Context:
    """A context; only its parameters, data types and group name enter the graphs."""
    parameters = tuple(described(entry, None, optimizer) for entry in entries)
    return Context(Plan((), world_size=1), generic(), parameters, 1, 0, _GROUP).replace(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype
    )


def _step(
    captured: Captured,
    ctx: Context,
    entries: Sequence[ModelParameter],
    held_bytes: int,
    passes: tuple[Pass, ...],
    precision: Precision,
    accumulate: Accumulate,
) -> TracedStep:
    accumulated_bytes = accumulated_bytes_of(entries, precision) if accumulate is True else 0
    return TracedStep(
        captured=captured,
        parameters=ctx.parameters,
        held_bytes=held_bytes + accumulated_bytes,
        passes=passes,
        accumulated_bytes=accumulated_bytes,
        adds_gradients=accumulate == "reduced",
    )

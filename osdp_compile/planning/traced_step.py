"""A training step traced once, to plan it for any cluster, without the cluster."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from osdp_compile import _torch, progress
from osdp_compile.errors import InfeasibleLimit, OsdpError
from osdp_compile.gpu_operators.gpu import Gpu, gpu_of
from osdp_compile.gpu_operators.tracing import as_on, attentions
from osdp_compile.model.find_modules import plain_parameters
from osdp_compile.model.mixed_precision import OWN_PRECISION, Precision, traced_cast
from osdp_compile.model.model_parameters import ModelParameter, check_shardable, model_parameters
from osdp_compile.options import Accumulate, Search
from osdp_compile.planning.fake_model import fake_models
from osdp_compile.planning.few_layers import FewLayers, long_list
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
from passes.annotate.annotate_costs import flops_by_dtype
from passes.capture.fold_layers import Folded, fold, stretched
from passes.graph.captured import Captured
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.pipeline import Pass, default_passes, validate
from passes.plan.monotone_search import MonotoneSearch
from passes.plan.planner import Infeasible, complete, make_plan
from passes.pricing.predict import predict
from passes.pricing.step_timeline import step_timeline
from passes.simulate.chrome_trace import StepTimeline
from passes.types.context import Context, MeshDim, Parameter
from passes.types.decision import Decision
from passes.types.hardware import Hardware, generic
from passes.types.plan import Plan, Prediction

log = logging.getLogger("osdp_compile")

#: A model's arguments, by position and by keyword.
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
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

    ``whole``: gives the captured step. For a model that was traced through few of its layers, the
    first call traces all of them.
    ``held_bytes``: buffers, the batch, memory that no graph shows, and ``accumulated_bytes`` (whole
    accumulated gradients). ``adds_gradients``, ``slices``, ``tensor_parallel``: as in the planner's
    context.
    ``workspaces``: measured on the device, as in the planner's context; empty: formulas.
    ``few``: the folded step, if it was traced through few of its layers.
    ``device``, ``gpu``: of the trace, and the GPU whose operators it has in place of the device's.
    """

    whole: Callable[[], Captured]
    parameters: tuple[Parameter, ...]
    held_bytes: int
    passes: tuple[Pass, ...]
    slices: tuple[tuple[str, int, int], ...] | None = None
    tensor_parallel: bool | tuple[str, ...] = False
    accumulated_bytes: int = 0
    adds_gradients: bool = False
    few: Folded | None = None
    workspaces: Mapping[str, int] = dataclasses.field(default_factory=dict)
    device: str = "cpu"
    gpu: Gpu | None = None

    @property
    def operators(self) -> str:
        """Whose operators the trace has, as a sentence."""
        step = self.captured if self.few is None else self.few.captured
        found = attentions(step.forward.graph)
        attention = f" Attention: {', '.join(found)}." if found else ""
        if self.gpu is None:
            return f"Traced with the operators of {self.device}.{attention}"
        return f"Traced without a GPU, with the operators of {self.gpu}.{attention}"

    @property
    def captured(self) -> Captured:
        """The captured step with all layers."""
        return self.whole()

    @functools.cached_property
    def folded(self) -> Folded | None:
        """The folded step, with a few layers for all; None: not large, or not foldable."""
        return self.few or folded_if_large(self.captured, self.parameters)

    def step_for(self, ctx: Context) -> Captured | Folded:
        """The step for the planner: folded, unless the whole step is necessary."""
        return if_enough(self.folded, ctx) or self.captured

    def flops(self) -> Iterator[tuple[str, int]]:
        """(dtype, FLOPs) of the forward and of the backward."""
        folded = self.folded
        step = self.captured if folded is None else folded.captured
        for gm in (step.forward, step.backward):
            if folded is None:
                yield from flops_by_dtype(gm.graph).items()
            else:
                yield from flops_by_dtype(gm.graph, folded.copies_of).items()

    def context(
        self, ranks: Mapping[str, int], hardware: Hardware, limit_bytes: int | None
    ) -> Context:
        """The passes' context; ``ranks``: mesh dimension (one or two) -> number of ranks.

        Raises:
            OsdpError: if the profile lacks rates of collectives.
        """
        world_size = math.prod(ranks.values())
        lacking = [kind for kind in _KINDS if kind not in hardware.collectives]
        if lacking and world_size > 1:
            raise OsdpError(
                f"the hardware profile {hardware.name!r} has no rates for {', '.join(lacking)}: "
                "measure it with several ranks, torchrun ... -m osdp_compile calibrate"
            )
        hardware = hardware.over(ranks)
        gather = hardware.collectives.get("all_gather")
        uses_p2p = gather is not None and gather.carried_out == "messages"
        mesh_dims = [MeshDim(name, size, f"{_GROUP}_{name}") for name, size in ranks.items()]
        return Context(
            plan=Plan((), world_size=world_size),
            hardware=hardware,
            parameters=self.parameters,
            world_size=world_size,
            rank=0,
            group_name=_GROUP,
            base_bytes=self.held_bytes + hardware.library_bytes,
            accumulated_bytes=self.accumulated_bytes,
            adds_gradients=self.adds_gradients,
            limit_bytes=limit_bytes,
            uses_p2p=uses_p2p,
            slices=self.slices,
            tensor_parallel=self.tensor_parallel,
            workspaces=self.workspaces,
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
        return planned(self.step_for(ctx), ctx, self.passes, search, say)

    def monotone_search(
        self,
        ranks: Mapping[str, int],
        hardware: Hardware,
        say: Callable[[str], None] = lambda text: None,
    ) -> MonotoneSearch:
        """A thorough search for several limits; it evaluates each limit of its grid once."""
        ctx = self.context(ranks, hardware, None)
        return MonotoneSearch(self.step_for(ctx), ctx, self.passes, say, progress.detail)

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
        return self._completed(uniform_plan(decision, ctx), ctx)

    def priced(self, plan: Plan, ranks: Mapping[str, int], hardware: Hardware) -> Prediction:
        """The simulator's prediction of a plan on this hardware, for which it need not be made."""
        ctx = self.context(ranks, hardware, plan.memory_limit_bytes)
        return predicted(self._completed(plan, ctx))

    def simulated(self, plan: Plan, ranks: Mapping[str, int], hardware: Hardware) -> StepTimeline:
        """The simulated step of a plan that :meth:`plan` made for this hardware."""
        ctx = self.context(ranks, hardware, plan.memory_limit_bytes)
        step = self.step_for(ctx)
        folded = step if isinstance(step, Folded) else None
        lowered = predict(step, plan, ctx.replace(deciding=not plan.order), self.passes)
        return step_timeline(lowered, plan, ctx, folded)

    def _completed(self, plan: Plan, ctx: Context) -> Plan:
        # Slices and recomputed tensors of a plan may differ from layer to layer.
        sliced = any(row.slices > 1 for row in plan.parameters)
        step = self.captured if plan.recompute or sliced else self.step_for(ctx)
        return complete(plan, step, ctx, self.passes)


def uniform_plan(decision: Decision, ctx: Context) -> Plan:
    """One decision for all parameters of a context, without a schedule and a prediction."""
    plan = Plan.uniform(
        [(one.name, one) for one in ctx.parameters],
        decision,
        world_size=ctx.world_size,
        bucket_bytes=bucket_bytes_for(ctx),
        ranks_of_a_host=ctx.ranks_of_a_host,
    )
    return plan.replace(memory_limit_bytes=ctx.limit_bytes)


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
    step = if_enough(folded_if_large(captured, ctx.parameters), ctx)
    if step is None:
        return planned(captured, ctx, passes, search)
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
    """The step without repeated inner layers; None: small, or no equal layers."""
    nodes = len(captured.forward.graph.nodes) + len(captured.backward.graph.nodes)
    if nodes <= _MOST_NODES:
        return None
    folded = fold(captured, parameters)
    if folded is None:
        log.debug("a step of %d nodes has no layers that are alike: planned as a whole", nodes)
    return folded


def if_enough(folded: Folded | None, ctx: Context) -> Folded | None:
    """The folded step, if there is one and it shows all that the planner may do; else None.

    It shows no bucket larger than one layer and no user-forced slices.
    """
    if folded is None or ctx.slices:
        return None
    return folded if bucket_bytes_for(ctx) <= folded.layer_bytes(ctx) else None


class _SeveralFrames(OsdpError):
    """Leaves Dynamo: the graph is not the whole step."""


class _Found(OsdpError):
    """Leaves Dynamo with the traced step."""

    def __init__(self, step: TracedStep) -> None:
        super().__init__("traced")
        self.step = step


@dataclasses.dataclass(frozen=True)
class _Training:
    """Arguments of :func:`trace` that say how the model is trained."""

    optimizer: int | str
    passes: tuple[Pass, ...]
    precision: Precision
    accumulate: Accumulate
    gpu: Gpu | None


def trace(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: int | str = "adamw",
    passes: Sequence[Pass] | None = None,
    precision: Precision = OWN_PRECISION,
    accumulate: Accumulate = False,
    hardware: Hardware | None = None,
) -> TracedStep:
    """Trace a training step of a fake model, with all graphs that need gradients, as the backend.

    A model with a long list of alike layers is traced through few of them. It must not change as
    long as the step is in use, because some questions need a trace of all layers.

    ``hardware``: a GPU's profile: the step has the GPU's operators, and a GPU is not necessary. A
    model on a GPU is traced with those of its own. None: with the operators of the model's device.

    Raises:
        OsdpError: if a parameter cannot be sharded, or if no result needs gradients.
    """
    gpu = None if _device_of(model).type == "cuda" else gpu_of(hardware)
    training = _Training(optimizer, tuple(passes or default_passes()), precision, accumulate, gpu)
    validate(training.passes)
    check_shardable(model_parameters([("", model)]))  # fake parameters have no hooks
    inputs = (tuple(args), dict(kwargs or {}))
    layers = long_list(model)
    few = layers and _traced_few(model, inputs, training, layers)
    return few or _traced_whole(model, inputs, training)


def _traced_few(
    model: nn.Module, inputs: _Inputs, training: _Training, layers: FewLayers
) -> TracedStep | None:
    """The step of a model of many layers, traced through few; None: it needs all of them."""
    backend = _backend(training, layers)
    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
    try:
        with layers.only(), as_on(training.gpu):
            step = _first_graph(compiled, model, inputs, training)
    except Exception as error:  # also from the model's own code: a trace of all layers raises it
        log.debug("tracing few layers: %r", error)
        return None
    folded = fold(step.captured, step.parameters)
    few = folded and stretched(folded, layers.prefix, len(layers.layers))
    if few is None or few.whole_nodes() <= _MOST_NODES:
        return None
    whole = functools.cache(lambda: _traced_whole(model, inputs, training).captured)
    return dataclasses.replace(step, whole=whole, few=few)


def _traced_whole(model: nn.Module, inputs: _Inputs, training: _Training) -> TracedStep:
    """The step of a model, traced through all layers."""
    compiled = torch.compile(model, backend=_backend(training), dynamic=False)
    with as_on(training.gpu):
        try:
            return _first_graph(compiled, model, inputs, training)
        except _SeveralFrames:
            pass
        call = Call(compiled, *inputs, modules=(model,), is_whole=False)
        with traced_cast(model, training.precision):
            return _traced_frames(model, call, training)


def _first_graph(
    compiled: Callable[..., Any], model: nn.Module, inputs: _Inputs, training: _Training
) -> TracedStep:
    """The step of a model that is one graph."""
    with fake_models([model], inputs, _device_of(model)) as (given, named):
        try:
            with torch.enable_grad(), traced_cast(model, training.precision):
                compiled(*given, **named)
        except _Found as found:
            return found.step
    raise OsdpError(NOTHING_TO_PLAN)


def _backend(training: _Training, layers: FewLayers | None = None) -> Callable[..., Any]:
    """A backend that leaves Dynamo with the traced step.

    ``layers``: the list of layers of which only a few run.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if is_collecting():
            return collected(gm, inputs)
        if not any(parameter.requires_grad for _, parameter in plain_parameters(gm, inputs)):
            return gm
        if interrupted_call(gm, inputs) is not None:
            _torch.dynamo.raise_to_user(_SeveralFrames("the step is several graphs"))
        try:
            if layers is not None:
                layers.connect(gm)
            found = _traced(gm, inputs, training)
        except OsdpError as error:
            _torch.dynamo.raise_to_user(error)
        _torch.dynamo.raise_to_user(_Found(found))

    return backend


def _device_of(model: nn.Module) -> torch.device:
    """The device of the trace: the model's, or the CPU for a meta model.

    Not CUDA for a meta model: torch cannot trace a backward for it without a GPU
    (``osdp_compile/gpu_operators/tracing.py``).
    """
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))


def _traced_frames(
    model: nn.Module,
    call: Call,
    training: _Training,
) -> TracedStep:
    """The traced step of a model with graph breaks."""
    roots = [("", model)]
    entries = model_parameters(roots)
    ctx = _context(entries, training)
    captured = captured_frames(call, roots, ctx, training.passes, _device_of(model))
    if captured is None:
        raise OsdpError(NOTHING_TO_PLAN)
    held_bytes = held_bytes_of(roots, _torch.tensors.tree_leaves((call.args, call.kwargs)), entries)
    held_bytes += unseen_bytes_of(captured, ctx)
    return _step(captured, ctx, entries, held_bytes, training, _device_of(model))


def _traced(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    training: _Training,
) -> TracedStep:
    roots, entries = owned_parameters(gm, inputs)
    ctx = _context(entries, training)
    captured = captured_step(gm, inputs, entries, ctx, training.passes)
    held_bytes = held_bytes_of(roots, inputs, entries)
    device = entries[0].parameter.device
    return _step(captured, ctx, entries, held_bytes, training, device)


def _context(entries: Sequence[ModelParameter], training: _Training) -> Context:
    """A context; only its parameters, data types and group name enter the graphs."""
    parameters = tuple(described(entry, None, training.optimizer) for entry in entries)
    return Context(Plan((), world_size=1), generic(), parameters, 1, 0, _GROUP).replace(
        param_dtype=training.precision.param_dtype, reduce_dtype=training.precision.reduce_dtype
    )


def _step(
    captured: Captured,
    ctx: Context,
    entries: Sequence[ModelParameter],
    held_bytes: int,
    training: _Training,
    device: torch.device,
) -> TracedStep:
    accumulated_bytes = 0
    if training.accumulate is True:
        accumulated_bytes = accumulated_bytes_of(entries, training.precision)
    return TracedStep(
        whole=lambda: captured,
        parameters=ctx.parameters,
        held_bytes=held_bytes + accumulated_bytes,
        passes=training.passes,
        accumulated_bytes=accumulated_bytes,
        adds_gradients=training.accumulate == "reduced",
        device=str(device),
        gpu=training.gpu,
    )

"""Lowering: compile a Dynamo graph with markers to forward and backward functions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

import osdp_compile.runtime.p2p  # noqa: F401
from osdp_compile import _torch, progress
from osdp_compile.errors import OsdpError
from osdp_compile.lowering.agreeing import agreeing
from osdp_compile.lowering.double_backward import refusing_double_backward
from osdp_compile.lowering.graph_log import GraphLog
from osdp_compile.lowering.graph_lowering import Compiler, GraphLowering
from osdp_compile.model.find_modules import marked_name, placeholders
from osdp_compile.model.same_parameters import comparing
from osdp_compile.runtime.collectives import backend_of
from osdp_compile.runtime.eager_markers import group_of
from osdp_compile.runtime.written_reads import (
    noting_reads,
    refuse_assigned_reads,
    watching_returned,
)
from osdp_compile.tracking.memory_watch import watched
from osdp_compile.tracking.session import Session, find
from osdp_compile.tracking.step_timer import timed
from passes._torch import copied_graph
from passes.pipeline import Observer
from passes.types.context import Phase


def session_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> Session | None:
    """The session of the graph's parameters; None if they have none.

    Raises:
        OsdpError: if one graph reads models with different plans, or a DTensor parameter that is
            in no plan, or a parameter that was replaced, or several blocks that share code.
    """
    session: Session | None = None
    read: dict[str, str] = {}
    for node, value in zip(placeholders(gm), inputs, strict=True):
        if not isinstance(value, nn.Parameter):
            continue
        name = None if isinstance(value, DTensor) else marked_name(node)
        found = find(value)
        if name is None and found is None and not isinstance(value, DTensor):
            continue
        if found is None and name is not None:
            raise OsdpError(
                f"parameter {name!r} was replaced after the model was sharded: write into the "
                "parameter instead (load_state_dict without assign=True, copy_)"
            )
        if found is None:
            raise OsdpError(
                "a DTensor parameter of this model was not sharded by osdp: do not wrap the "
                "model in FSDP or replace its parameters (model.to, load_state_dict(assign=True)) "
                "after the first call. In place of copy.deepcopy of a sharded model, build another "
                "one and load the state dict. Of a model that parallelize_module distributed over "
                "mesh['tp'], give the other dimension: options={'mesh': mesh['dp']}"
            )
        if session is not None and found[1] is not session:
            raise OsdpError(
                "two models that were planned apart meet in one compiled function: call both for "
                "the first time inside that function (or shard a module that holds both), so that "
                "one plan covers them"
            )
        session = found[1]
        first = session.reading.alike.first_of.get(found[0], found[0])
        if read.setdefault(first, found[0]) != found[0]:
            raise OsdpError(
                f"parameters {read[first]!r} and {found[0]!r} are in one graph, and their blocks "
                "share the code that they were compiled to one by one: keep to those compiled "
                "blocks, or compile the whole model before its first call"
            )
    return session


def lower(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    session: Session,
    compile_inner: Compiler | None = None,
    observe: Observer | None = None,
) -> Any:
    """Compile a graph of a sharded model.

    ``compile_inner``: the compiler of each lowered graph (default: Inductor).
    ``observe``: called with the graph after every pass.
    """
    mesh = session.mesh
    if mesh is None or not session.plan.moved:
        return _lowered(gm, inputs, session, compile_inner, observe)[0]
    spare = fx.GraphModule(gm, copied_graph(gm.graph))  # compilation changes the graph
    compiled, lowering = _lowered(gm, inputs, session, compile_inner, observe)
    if not lowering.step.parameters & session.plan.moved:
        return compiled

    def gathering(*given: Any) -> Any:
        return _lowered(spare, given, session, compile_inner, observe, lowering)[0]

    group = group_of(session.context.group_name)
    if backend_of(group, mesh.device_type) == "fake":
        return compiled
    return agreeing(compiled, lowering.key, gathering, group, torch.device(mesh.device_type))


def _lowered(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    session: Session,
    compile_inner: Compiler | None,
    observe: Observer | None,
    gathers_for: GraphLowering | None = None,
) -> tuple[Any, GraphLowering]:
    """A compiled graph and its lowering.

    ``gathers_for``: the lowering of a graph of which this one is the form that gathers all weights.
    """
    refuse_assigned_reads(gm, session.reading.assigned)
    context = session.context
    if gathers_for is not None:
        context = context.replace(moves_activations=False)
    of_first_form = None if gathers_for is None else gathers_for.log
    graph_log = GraphLog(session.plan, session.passes, of_first_form)
    inner = compile_inner or _torch.inductor.compile_fx_inner
    lowering = GraphLowering(gm, inputs, session, inner, observe, context, graph_log)
    if gathers_for is not None:
        lowering.step.frame = gathers_for.step.frame
    kept = lowering.find_kept(gm, inputs) if compile_inner is None and observe is None else None
    token = "" if kept is None else kept.token
    cached = _torch.aot_autograd.without_cache() if kept is None else contextlib.nullcontext()
    shown: AbstractContextManager[None] = contextlib.nullcontext()
    if compile_inner is None:  # Inductor is slow
        shown = progress.compiling(
            _torch.dynamo.recompile_reason(), first=not session.observed.graphs
        )
    with shown, cached, noting_reads():
        compiled: Any = _torch.inductor.compile_fx(
            gm,
            list(inputs),
            inner_compile=lowering.compile_part,
            config_patches={
                **(session.options.inductor or {}),
                **_torch.inductor.KEEP_ORDER,
                "custom_partitioner_fn": _torch.aot_autograd.Partitioner(lowering.partition, token),
            },
        )
    step = lowering.step
    lowering.take_if_found()
    if Phase.FORWARD in step.timelines:
        compiled = timed(compiled, session.observed, step)
        limit_bytes = session.options.memory_limit_bytes
        if limit_bytes is not None:
            compiled = watched(compiled, session.watch, step, limit_bytes)
        compiled = refusing_double_backward(compiled)
    sharded = {row.name for row in session.plan.parameters if row.decision.sharded}
    compiled = watching_returned(compiled, gm, sharded)
    return _comparing(compiled, session, *lowering.gathered), lowering


def _comparing(
    compiled: Any, session: Session, forward: tuple[str, ...], backward: tuple[str, ...]
) -> Any:
    """The compiled graph; ranks compare what it gathers and reduces."""
    mesh = session.mesh
    if mesh is None or not (forward or backward):
        return compiled
    group = group_of(session.context.group_name)
    if backend_of(group, mesh.device_type) == "fake":
        return compiled
    return comparing(compiled, forward, backward, group, torch.device(mesh.device_type))

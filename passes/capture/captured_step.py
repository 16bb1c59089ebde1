"""Captured steps: the graphs of a training step before any decision, and their copies for a plan.

Needs: a forward and a backward, traced once with whole parameters.
Leaves: the same with the markers that tracing a sharded model gives; and for any plan a copy of
them with sharded parameters, so that the planner predicts many plans from one trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.graph.captured import Captured
from passes.graph.fx_utils import copy_module, empty_value, fake_mode_of, is_cast, output_node
from passes.graph.metadata import (
    GATHERED,
    INPUT,
    NOT_CHUNKED,
    NOT_MOVED,
    NOT_RECOMPUTED,
    PARAMETER,
    SAVED,
    SAVES,
    STATIC,
)
from passes.graph.step_module import graphs_of, step_module
from passes.ops.markers import (
    REDUCE_GRAD,
    UNSHARD,
    ReduceGrad,
    Unshard,
    reduce_grad_of,
    set_args,
    unshard_of,
    unshards,
)
from passes.pipeline import Pass, Stage, run
from passes.types.context import Context, Phase
from passes.types.plan import Plan

_ADD = torch.ops.aten.add.Tensor


class NothingSaved(ValueError):
    """A plan recomputes tensors that the forward does not save.

    The message has their number and the first key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(
            f"it recomputes {len(keys)} tensors that this model's forward does not save or that "
            f"its backward cannot recompute, the first of them {keys[0]!r}; make a new plan"
        )


class NothingMoves(ValueError):
    """A plan moves activations to weights that this step has to gather.

    The message has the first one, with the reason.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        name, reason = min(reasons.items())
        super().__init__(
            f"activations cannot move to {name!r}: {reason}. Let this weight move, or leave the "
            "whole group where it is"
        )


class NotInChunks(ValueError):
    """A plan lets tokens travel in chunks to weights for which this step cannot.

    The message has the first one, with the reason.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        name, reason = min(reasons.items())
        super().__init__(
            f"tokens cannot travel in chunks to {name!r}: {reason}. Give its whole group chunks=1"
        )


def add_markers(
    joint: fx.GraphModule,
    parameters: Mapping[fx.Node, str],
    gradients: Mapping[int, fx.Node],
    ctx: Context,
) -> None:
    """Insert markers into a joint graph that was traced with whole parameters.

    With mixed precision, the trace casts a parameter at every use, and its gradients back. Markers
    replace these casts.

    Args:
        parameters: the name of each parameter, by placeholder.
        gradients: the placeholder of each gradient's parameter, by position in the outputs.
    """
    for shard, name in parameters.items():
        _mark_parameter(joint.graph, shard, name, ctx)
    output = output_node(joint.graph)
    returned = list(output.args[0])  # type: ignore[arg-type]
    for index, shard in gradients.items():
        if isinstance(returned[index], fx.Node):
            returned[index] = _mark_gradient(returned[index], shard, parameters[shard], ctx)
    output.args = (tuple(returned),)
    joint.recompile()


def _mark_parameter(graph: fx.Graph, shard: fx.Node, name: str, ctx: Context) -> None:
    """Insert an ``unshard`` before the first use of a parameter."""
    whole = shard.meta["val"]
    users = list(shard.users)
    first = min(users, default=None)
    if first is None or first.op == "output":
        return
    casts = all(_is_read(user, ctx) for user in users)
    args = (shard, name, list(whole.shape), True, ctx.group_name)
    with graph.inserting_before(first):
        marker = graph.call_function(UNSHARD, args)
    marker.meta["val"] = whole
    if casts:
        marker.meta["val"] = first.meta["val"]
        marker.kwargs = {"dtype": first.meta["val"].dtype}
    if ctx.reduce_dtype is not None:
        marker.kwargs = {**marker.kwargs, "reduce_dtype": ctx.reduce_dtype}
    for user in users:
        if casts:
            user.replace_all_uses_with(marker)
            graph.erase_node(user)
        else:
            user.replace_input_with(shard, marker)


def _mark_gradient(gradient: fx.Node, shard: fx.Node, name: str, ctx: Context) -> fx.Node:
    """Insert a ``reduce_grad`` after a gradient, or after each term of a gradient that is cast.

    Returns the reduced gradient.
    """
    graph = gradient.graph
    cast = any("dtype" in user.kwargs for user in shard.users if user.target is UNSHARD)
    result = gradient
    for whole in _terms(gradient) if cast else [gradient]:
        source: Any = whole.args[0] if cast else whole
        with graph.inserting_before(output_node(graph)):
            reduced = graph.call_function(REDUCE_GRAD, (source, shard, name, True, ctx.group_name))
        reduced.meta["val"] = whole.meta["val"]
        if ctx.reduce_dtype is not None:
            reduced.kwargs = {"reduce_dtype": ctx.reduce_dtype}
        # Directly after the gradient: the reductions must not all stand at the end.
        source.append(reduced)
        if cast:
            whole.replace_all_uses_with(reduced)
            graph.erase_node(whole)
        if whole is gradient:
            result = reduced
    return result


def _is_read(user: fx.Node, ctx: Context) -> bool:
    """Whether a parameter's user is its cast to ``ctx.param_dtype``."""
    dtype = ctx.param_dtype
    return dtype is not None and is_cast(user) and user.meta["val"].dtype == dtype


def _terms(gradient: fx.Node) -> list[fx.Node]:
    """The casts of the gradients whose sum is ``gradient``."""
    if gradient.target is _ADD:
        return [term for source in gradient.all_input_nodes for term in _terms(source)]
    assert is_cast(gradient), f"{gradient} is no gradient of what was cast"
    return [gradient]


def mark_inputs(
    gm: fx.GraphModule, names: Sequence[str | None], parameters: frozenset[str], phase: Phase
) -> None:
    """Write the kind of every placeholder into its metadata.

    ``names``: by placeholder, the name of a parameter or buffer, or ``batch``. These are static:
    the graph does not own their memory. None: a saved tensor or an incoming gradient.
    """
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        if name is not None:
            STATIC.set(node, True)
            (PARAMETER if name in parameters else INPUT).set(node, name)
        elif phase is Phase.BACKWARD:
            SAVED.set(node, True)


def lay_out(captured: Captured, plan: Plan, ctx: Context, passes: Sequence[Pass]) -> Captured:
    """Copies of the captured graphs for a plan, equal to a trace of the sharded model.

    The copies are those after the passes of ``Stage.STEP``.

    Raises:
        NothingSaved: the plan recomputes tensors that this forward does not save.
        NothingMoves: activations cannot move to a weight that the plan leaves where it is.
        NotInChunks: its tokens cannot travel in chunks.
    """
    ctx = ctx.replace(plan=plan)
    forward, backward = copy_module(captured.forward), copy_module(captured.backward)
    for gm in (forward, backward):
        _set_shards(gm, ctx)
    read = {unshard_of(node).name: node for node in unshards(forward.graph)}
    kept = {name: node for name, node in read.items() if plan[name].keeps_gathered}
    _save(forward, backward, kept)
    step = run(passes, Stage.STEP, step_module(forward, backward), ctx, recompile=False)
    missing = NOT_RECOMPUTED.get(step)
    if missing:
        raise NothingSaved(missing)
    refused = NOT_MOVED.get(step)
    if refused:
        raise NothingMoves(refused)
    whole = NOT_CHUNKED.get(step)
    if whole:
        raise NotInChunks(whole)
    return Captured(*graphs_of(step))


def _set_shards(gm: fx.GraphModule, ctx: Context) -> None:
    graph, plan = gm.graph, ctx.plan
    with fake_mode_of(graph):
        for node in list(graph.nodes):
            marker: Unshard | ReduceGrad
            if node.target is UNSHARD:
                marker = unshard_of(node)
            elif node.target is REDUCE_GRAD:
                marker = reduce_grad_of(node)
            else:
                continue
            decision = plan.decision(marker.name)
            cut, shard = ctx.layout_of(marker.name), marker.shard
            set_args(
                node,
                marker._replace(
                    sharded=decision.sharded,
                    group_name=cut.group_name,
                    between=cut.between,
                    hosts=cut.hosts,
                    dim=cut.dim,
                ),
            )
            local = list(ctx.parameter(marker.name).shape)
            if decision.sharded:
                local[cut.dim] = cut.own_rows(local[cut.dim])
                shard.meta["val"] = empty_value(shard.meta["val"], local)
            if node.target is REDUCE_GRAD:
                node.meta["val"] = empty_value(node.meta["val"], local)


def _save(forward: fx.GraphModule, backward: fx.GraphModule, kept: Mapping[str, fx.Node]) -> None:
    """Save gathered weights for the backward, as the partitioner does.

    ``kept``: by parameter, the ``unshard`` in the forward of each weight that is kept gathered.
    """
    output = output_node(forward.graph)
    extra: list[fx.Node] = []
    for node in unshards(backward.graph):
        name = unshard_of(node).name
        if name not in kept:
            continue
        last = list(backward.graph.find_nodes(op="placeholder"))[-1]
        with backward.graph.inserting_after(last):
            saved = backward.graph.placeholder(f"kept_{len(extra)}")
        saved.meta["val"] = node.meta["val"]
        SAVED.set(saved, True)
        GATHERED.set(saved, name)
        SAVES.set(saved, kept[name].name)
        node.replace_all_uses_with(saved)
        backward.graph.erase_node(node)
        extra.append(kept[name])
    output.args = ((*output.args[0], *extra),)  # type: ignore[misc]

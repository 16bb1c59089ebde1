"""Captured graphs: a training step before any decision, and what a plan makes of it.

The forward and backward are traced once, with whole parameters. Here markers are put in
(as tracing a sharded model would), and a copy is laid out for any plan, so that a plan
can be priced without tracing again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes.graph.fx_utils import copy_module, empty_value, fake_mode_of, is_cast, output_node
from passes.graph.metadata import INPUT, PARAMETER, SAVED, SAVES, STATIC
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.recompute.recompute_activations import recompute
from passes.simulate.lent import mark_lent
from passes.split.save_slices import split_saved
from passes.types.context import Context, Phase
from passes.types.plan import Plan

_ADD = torch.ops.aten.add.Tensor


class NothingSaved(ValueError):
    """A plan recomputes what the forward does not save: the message says how many, and one."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__(
            f"it recomputes {len(keys)} tensors that this model's forward does not save or that "
            f"cannot be computed again, the first of them {keys[0]!r}; plan again"
        )


@dataclasses.dataclass(frozen=True)
class Captured:
    """A partitioned training step with a marker for every parameter it reads.

    ``values``: what the graphs that are made of it share
    (:func:`passes.graph.fx_utils.shared_values`).
    ``is_joined``: the graphs are those of several frames (``passes/capture/join_frames.py``).
    ``border_bytes``: the largest gradient that one frame's backward gives to another's. Autograd
    holds it while that runs.
    ``unread``: parameters of the model that code beside the graphs reads, in eager mode.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    values: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)
    unread: frozenset[str] = frozenset()
    is_joined: bool = False
    border_bytes: int = 0


def add_markers(
    joint: fx.GraphModule,
    parameters: Mapping[fx.Node, str],
    gradients: Mapping[int, fx.Node],
    ctx: Context,
) -> None:
    """Put markers into a joint graph that was traced with whole parameters.

    A parameter that is read in another type is cast wherever it is read, and its gradients back:
    markers take the place of these casts.

    Args:
        parameters: placeholder of each parameter, and its name.
        gradients: position of each gradient in the outputs, and its parameter's placeholder.
    """
    graph = joint.graph
    for shard, name in parameters.items():
        whole = shard.meta["val"]
        users = list(shard.users)
        first = min(users, default=None)
        if first is None or first.op == "output":
            continue
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
    output = output_node(graph)
    returned = list(output.args[0])  # type: ignore[arg-type]
    for index, shard in gradients.items():
        gradient = returned[index]
        if not isinstance(gradient, fx.Node):
            continue
        marks = (shard, parameters[shard], True, ctx.group_name)
        cast = any("dtype" in user.kwargs for user in shard.users if user.target is UNSHARD)
        for whole in _terms(gradient) if cast else [gradient]:
            source: Any = whole.args[0] if cast else whole
            with graph.inserting_before(output):
                reduced = graph.call_function(REDUCE_GRAD, (source, *marks))
            reduced.meta["val"] = whole.meta["val"]
            if ctx.reduce_dtype is not None:
                reduced.kwargs = {"reduce_dtype": ctx.reduce_dtype}
            # Where its gradient is ready: the reductions must not all come last.
            source.append(reduced)
            if cast:
                whole.replace_all_uses_with(reduced)
                graph.erase_node(whole)
            if whole is gradient:
                returned[index] = reduced
    output.args = (tuple(returned),)
    joint.recompile()


def _is_read(user: fx.Node, ctx: Context) -> bool:
    """Whether a parameter's user is its cast to the type in which parameters are read."""
    dtype = ctx.param_dtype
    return dtype is not None and is_cast(user) and user.meta["val"].dtype == dtype


def _terms(gradient: fx.Node) -> list[fx.Node]:
    """The casts of the gradients that are added up to one."""
    if gradient.target is _ADD:
        return [term for source in gradient.all_input_nodes for term in _terms(source)]
    assert is_cast(gradient), f"{gradient} is no gradient of what was cast"
    return [gradient]


def mark_inputs(
    gm: fx.GraphModule, names: Sequence[str | None], parameters: frozenset[str], phase: Phase
) -> None:
    """Say on every placeholder what it is.

    ``names``: for each placeholder a parameter's or buffer's name, or ``batch``: these are
    static, their memory is not the graph's. None for what else there is: what the forward
    saved, and the gradients that the backward begins with.
    """
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        if name is not None:
            node.meta[STATIC] = True
            node.meta[PARAMETER if name in parameters else INPUT] = name
        elif phase is Phase.BACKWARD:
            node.meta[SAVED] = True


def lay_out(captured: Captured, plan: Plan, ctx: Context) -> Captured:
    """Copies of the captured graphs as tracing the sharded model would give them.

    Raises:
        NothingSaved: if the plan recomputes what this forward does not save.
    """
    forward, backward = copy_module(captured.forward), copy_module(captured.backward)
    missing = recompute(forward, backward, plan)
    if missing:
        raise NothingSaved(missing)
    for gm in (forward, backward):
        _set_shards(gm, plan, ctx)
    kept = {
        node.args[1]: node
        for node in forward.graph.find_nodes(op="call_function", target=UNSHARD)
        if plan.decision(node.args[1]).keeps
    }
    _save(forward, backward, kept)
    split_saved(forward, backward, ctx.replace(plan=plan))
    mark_lent(forward.graph, backward.graph)
    return Captured(forward, backward)


def _set_shards(gm: fx.GraphModule, plan: Plan, ctx: Context) -> None:
    graph = gm.graph
    ctx = ctx.replace(plan=plan)
    with fake_mode_of(graph):
        for node in list(graph.nodes):
            if node.target is UNSHARD:
                shard, name = node.args[:2]
            elif node.target is REDUCE_GRAD:
                shard, name = node.args[1:3]
            else:
                continue
            decision = plan.decision(name)
            sharded, cut = decision.sharded, ctx.cut(decision)
            node.args = (*node.args[:3], sharded, *cut.marks)
            local = list(ctx.parameter(name).shape)
            if sharded:
                start, stop = cut.rows(local[0])
                local[0] = stop - start
                shard.meta["val"] = empty_value(shard.meta["val"], local)
            if node.target is REDUCE_GRAD:
                node.meta["val"] = empty_value(node.meta["val"], local)


def _save(forward: fx.GraphModule, backward: fx.GraphModule, kept: Mapping[str, fx.Node]) -> None:
    """What the partitioner does for a gathered weight that must be saved."""
    output = output_node(forward.graph)
    extra: list[fx.Node] = []
    for node in list(backward.graph.find_nodes(op="call_function", target=UNSHARD)):
        name = node.args[1]
        if name not in kept:
            continue
        last = list(backward.graph.find_nodes(op="placeholder"))[-1]
        with backward.graph.inserting_after(last):
            saved = backward.graph.placeholder(f"kept_{len(extra)}")
        saved.meta.update(val=node.meta["val"], saved=True, gathered=name)
        saved.meta[SAVES] = kept[name].name
        node.replace_all_uses_with(saved)
        backward.graph.erase_node(node)
        extra.append(kept[name])
    output.args = ((*output.args[0], *extra),)  # type: ignore[misc]

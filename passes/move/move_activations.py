"""Move activations: operators whose weights stay where they are (tensor parallel).

Needs: a step module (``passes/graph/step_module.py``), or the graph of an inference, with one
``unshard`` and one ``reduce_grad`` per parameter.
Leaves: for each parameter of ``plan.moved`` that the graphs allow, no markers. Every rank reads its
shard only, with the tokens of all ranks. ``NOT_MOVED`` of the module: the other parameters of
``plan.moved`` that it reads, each with the reason. Their markers stay, so they are gathered.

Before (a linear, an activation, a linear)::

    w = unshard(p); v = unshard(q)
    h = mm(x, w.t())                      [T, F]
    y = mm(gelu(h), v.t())                [T, d]
    dv = reduce_grad(mm(dy.t(), gelu(h)), q)

After (N ranks)::

    X = wait(all_gather(x))               [N T, d], the tokens of all ranks
    h = mm(X, p.t())                      [N T, F/N]
    y = wait(reduce_scatter(mm(gelu(h), q.t())))      [T, d], the own tokens
    DY = wait(all_gather(dy))
    dv = mm(DY.t(), gelu(h)) / N

Weights, and gradients of weights, do not travel. A gradient of a weight is the sum over the tokens
of all ranks, divided by N: the mean over ranks, as of a gradient that is reduced.

Within hosts (``shard_host_regather``), the N ranks are those of a host, and every host has the
weights whole. The sums of the hosts are all-reduced between them, divided by the number of all
ranks. Weights of each kind are moved by a walk of their own.

Tokens that the backward needs again are saved as the rank's own, and gathered again; or the
gathered tokens are saved (the decision's ``keep``). The gradients of weights stand behind the next
partial sum, so that the ranks add it up meanwhile.

The walk gives every tensor a placement (``passes/move/move_rules.py``). Where an operator has no
rule, the weights that lead to it are not moved in these graphs, and the walk begins again without
them. The result depends on the graph and the plan only, so it is the same on all ranks with equal
shapes. Ranks with other shapes must not run the graph together
(``osdp_compile/lowering/agreeing.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from passes.graph.fx_utils import WAIT, copy_module, output_node, positions
from passes.graph.metadata import AFTER_WAIT, COLLECTIVE, NOT_MOVED
from passes.graph.step_module import graphs_of, rename_saved, saved_count, saved_input, saved_name
from passes.move.move_rules import Mover
from passes.move.placed import Placed, Refused
from passes.move.token_collectives import KeptTokens
from passes.ops.markers import unshard_of, unshards
from passes.recompute.recompute_activations import PartitionBoundary, save_instead
from passes.types.context import Context, Phase
from passes.types.decision import DECISIONS, Decision
from passes.types.shard_layout import ShardLayout


def move(step: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Move activations in a step. See the module's docstring."""
    if not ctx.plan.moved or not ctx.moves_activations:
        return step
    NOT_MOVED.set(step, _move(list(graphs_of(step)), ctx))
    return step


def move_inference(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Move activations in the graph of an inference; other graphs stay as they are."""
    if ctx.phase is not Phase.INFERENCE or not ctx.plan.moved or not ctx.moves_activations:
        return gm
    NOT_MOVED.set(gm, _move([gm], ctx))
    return gm


def _move(graphs: list[fx.GraphModule], ctx: Context) -> dict[str, str]:
    """Move activations as the plan says; returns the reasons of the weights that are not moved."""
    refused: dict[str, str] = {}
    for decision in DECISIONS:
        chosen, others = _movable(graphs, ctx, decision)
        refused |= others
        if chosen:
            rewrite(graphs, chosen, ctx, ctx.cut(decision), decision.keep, ctx.plan.alone)
    return refused


def _movable(
    graphs: list[fx.GraphModule], ctx: Context, decision: Decision
) -> tuple[dict[str, int], dict[str, str]]:
    """The parameters to move, with their dimensions; and the reasons of the others.

    ``decision``: of these parameters. So the same ranks share all of them.
    """
    read = {unshard_of(node).name for gm in graphs for node in unshards(gm.graph)}
    moved = [name for name in sorted(read & ctx.plan.moved) if ctx.plan.decision(name) == decision]
    chosen = {name: ctx.plan[name].dim for name in moved}
    refused: dict[str, str] = {}
    while chosen:
        try:
            copies = [copy_module(gm) for gm in graphs]
            rewrite(copies, chosen, ctx, ctx.cut(decision), decision.keep, ctx.plan.alone)
            break
        except Refused as error:
            for name in error.names & chosen.keys():
                refused[name] = error.reason
                del chosen[name]
    return chosen, refused


def rewrite(
    graphs: list[fx.GraphModule],
    dims: Mapping[str, int],
    ctx: Context,
    layout: ShardLayout,
    keep_tokens: bool = False,
    alone: frozenset[str] = frozenset(),
) -> None:
    """Move activations to these parameters, in a forward and its backward or in one graph.

    ``dims``: the sharded dimension of each parameter. ``layout``: the ranks that share them.
    ``keep_tokens``: the backward reads the tokens that the forward gathered. ``alone``: the weights
    whose products are groups of their own.

    Raises:
        Refused: naming the operator without a rule. The graphs are then half rewritten.
    """
    count = saved_count(graphs[1].graph) if len(graphs) == 2 else 0
    first = Mover(graphs[0].graph, dims, ctx, {}, layout, alone=alone)
    equal = {node.name for node in first.equal}
    first.run()
    saved = _return(first, count)
    _remove_unused(first)
    if len(graphs) == 1:
        return
    backward = graphs[1].graph
    inputs: dict[fx.Node, Placed] = {}
    for node in backward.find_nodes(op="placeholder"):
        placed = saved.get(saved_name(node))
        if placed is None:
            rename_saved([node], first.replaced)
        else:
            with backward.inserting_before(node):
                own = saved_input(backward, placed.node)
            own.meta = {**node.meta, **own.meta}
            inputs[node] = placed.of(own)
    kept = KeptTokens(first) if keep_tokens else None
    second = Mover(backward, dims, ctx, inputs, layout, kept, alone, equal)
    second.run()
    _return(second, 0)
    for node in inputs:
        backward.erase_node(node)
    _remove_unused(second)
    if kept is not None:
        _save(kept, graphs[0].graph, backward, count)
    _sink_gradients(second)


def _save(kept: KeptTokens, forward: fx.Graph, backward: fx.Graph, count: int) -> None:
    """Save the kept tokens; tensors that the backward now reads no more are not saved.

    ``count``: of the last outputs, which are saved for the backward.
    """
    inputs = PartitionBoundary(forward, backward).saved
    output = output_node(forward)
    returned: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    first = len(returned) - count
    saved = [*reversed(kept.read)]  # each input was put before the others
    for node in returned[first:]:
        own = inputs.get(node)
        if own is None or own.users or node in kept.read:
            saved.append(node)
        else:
            backward.erase_node(own)
    save_instead(output, first, saved)


def _remove_unused(mover: Mover) -> None:
    """Erase unused nodes: pure ones, originals of placed ones, and messages of tokens."""
    for node in reversed(mover.graph.nodes):
        start: Any = node.args[0] if node.target is WAIT else node
        purpose = COLLECTIVE.get(start)
        is_erased = node in mover.placed or (purpose is not None and purpose.tokens)
        if not node.users and (is_erased or not node.is_impure()):
            mover.graph.erase_node(node)


def _sink_gradients(mover: Mover) -> None:
    """Move the gradients of weights that stay behind the next sum of the ranks' partial sums."""
    order = positions(mover.graph)
    last_moved: dict[fx.Node, fx.Node] = {}
    for gradient in sorted(mover.gradients, key=order.__getitem__):
        own = _needed_for(gradient)
        later = [total for total in mover.totals if order[total] > order[gradient]]
        if not later:
            continue
        anchor = min(later, key=order.__getitem__)
        place = last_moved.get(anchor, anchor)
        for node in [*sorted(own, key=order.__getitem__), *mover.gradients[gradient]]:
            place.append(node)
            place = node
        last_moved[anchor] = place


def _needed_for(gradient: fx.Node) -> dict[fx.Node, None]:
    """A gradient, and the compute that only it needs."""
    own: dict[fx.Node, None] = {gradient: None}
    stack = [gradient]
    while stack:
        for source in stack.pop().all_input_nodes:
            waits = AFTER_WAIT.is_set(source) or source.target is WAIT
            if source.op != "call_function" or source in own or waits:
                continue
            if all(user in own for user in source.users):
                own[source] = None
                stack.append(source)
    return own


def _return(mover: Mover, count: int) -> dict[str, Placed]:
    """Return the placed tensors of a graph that the backward needs; by the name of the original.

    ``count``: of the last outputs, which are saved for the backward.

    Raises:
        Refused: another output is placed.
    """
    output = output_node(mover.graph)
    returned = list(output.args[0])  # type: ignore[arg-type]
    first = len(returned) - count
    saved: dict[str, Placed] = {}
    for index, node in enumerate(returned):
        placed = mover.placed.get(node) if isinstance(node, fx.Node) else None
        if placed is None:
            continue
        if index < first:
            raise Refused(
                f"the graph returns {node.name}, which it does not have whole", placed.names
            )
        saved[node.name] = placed
        returned[index] = placed.node
    output.args = (tuple(returned),)
    return saved

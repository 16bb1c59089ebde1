"""Save slices: save the slices of a sliced tensor for the backward, and not the whole tensor.

Needs: a step module (``passes/graph/step_module.py``) with a forward and a backward from
AOTAutograd's partitioner, and markers; before ``split``.
Leaves: for each saved tensor that ``split`` makes in slices, its slices among the forward's
outputs and the backward's inputs, in place of the tensor.

Before::                              After (two slices)::

    def forward(...):                     def forward(...):
        ...                                   h0 = take_slice(h, 0); h1 = take_slice(h, 1)
        return y, h                           return y, h0, h1
    def backward(h, dy):                  def backward(h0, h1, dy):
        ...                                   h = join_slices(h0, h1)

``split`` then removes both the ``take_slice`` and the ``join_slices``, so no whole tensor exists.
A weight that is kept gathered is such a tensor. Of a weight that keeps some slices and regathers
the others, the kept slices become further inputs of the backward; ``split`` uses them and does
not regather them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from passes.graph.fx_utils import call, copy_module, output_node
from passes.graph.metadata import GATHERED
from passes.graph.step_module import graphs_of, saved_count, saved_input
from passes.ops.markers import unshard_of, unshards
from passes.ops.slicing import JOIN_SLICES, TAKE_SLICE, Slices, slice_name
from passes.recompute.recompute_activations import PartitionBoundary, save_instead
from passes.split.split_operators import split_by_plan, splits
from passes.split.split_rules import Sliced
from passes.types.context import Context


def save_slices(step: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Save slices in place of sliced tensors. See the module's docstring."""
    if not splits(ctx.plan):
        return step
    forward, backward = graphs_of(step)
    known = split_by_plan(copy_module(forward), ctx)
    sliced = {node.name: found for node, found in known.sliced.items()}
    cut = PartitionBoundary(forward.graph, backward.graph)
    output = output_node(forward.graph)
    returned = list(output.args[0])  # type: ignore[arg-type]
    first = len(returned) - saved_count(backward.graph)
    saved = _kept_slices(forward.graph, backward.graph, sliced, ctx)
    for node in returned[first:]:
        found = sliced.get(node.name)
        if found is None:
            saved.append(node)
            continue
        taken = _taken(node, output, found, range(found.slices.count))
        _given(cut.saved[node], taken, found.dim, found.slices)
        saved.extend(taken)
    save_instead(output, first, saved)
    return step


def _kept_slices(
    forward: fx.Graph, backward: fx.Graph, sliced: dict[str, Sliced], ctx: Context
) -> list[fx.Node]:
    """Give the backward the kept slices of weights whose other slices it regathers.

    Returns these slices in the forward, which must save them.
    """
    output = output_node(forward)
    again = {unshard_of(node).name for node in unshards(backward)}
    tensors = (n for n in backward.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    first = next(tensors, None)
    kept: list[fx.Node] = []
    for node in unshards(forward):
        name = unshard_of(node).name
        found = sliced.get(node.name)
        if name not in again or found is None or first is None:
            continue
        indices = range(min(ctx.plan[name].kept_slices, found.slices.count))
        taken = _taken(node, output, found, indices)
        with backward.inserting_before(first):
            for index, one in enumerate(taken):
                _placeholder(backward, one, slice_name(name, index))
        kept.extend(taken)
    return kept


def _taken(node: fx.Node, output: fx.Node, found: Sliced, indices: Iterable[int]) -> list[fx.Node]:
    """Take some slices of a tensor, at the end of the forward."""
    with node.graph.inserting_before(output):
        return [
            call(
                node.graph,
                TAKE_SLICE,
                found.slices.to_take(node, found.dim, index),
                f"{node.name}_slice",
            )
            for index in indices
        ]


def _given(saved: fx.Node, taken: list[fx.Node], dim: int, slices: Slices) -> None:
    """Replace an input of the backward by its slices, joined by ``join_slices``."""
    graph = saved.graph
    name = GATHERED.get(saved)
    with graph.inserting_before(saved):
        inputs = [
            _placeholder(graph, one, slice_name(name, index) if name else None)
            for index, one in enumerate(taken)
        ]
    top = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(top):
        joined = call(graph, JOIN_SLICES, slices.to_join(inputs, dim))
    saved.replace_all_uses_with(joined)
    graph.erase_node(saved)


def _placeholder(graph: fx.Graph, of: fx.Node, gathered: str | None) -> fx.Node:
    """A placeholder of the backward for a tensor of the forward.

    ``gathered``: the name of the weight's slice, if it is one.
    """
    found = saved_input(graph, of)
    if gathered is not None:
        GATHERED.set(found, gathered)
    return found

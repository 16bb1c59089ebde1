"""Split saved: what the forward computes by slices is saved for the backward by slices.

Needs: a forward and a backward that AOTAutograd's partitioner has cut, with markers.
Leaves: of each tensor that ``split`` will find in slices in the forward, its slices among the
forward's outputs and the backward's inputs in its place.

Before::                              After (two slices)::

    def forward(...):                     def forward(...):
        ...                                   h0 = take_slice(h, 0); h1 = take_slice(h, 1)
        return y, h                           return y, h0, h1
    def backward(h, dy):                  def backward(h0, h1, dy):
        ...                                   h = join_slices(h0, h1)

``split`` then finds that nothing need be taken, nor joined: the whole tensor is nowhere.
"""

from __future__ import annotations

from torch import fx

from passes.context import Context
from passes.graph import call, copy_module, output_node
from passes.recompute import Cut, save_instead
from passes.slices import JOIN_SLICES, TAKE_SLICE, Slices
from passes.split import splits, splitter_of


def split_saved(forward: fx.GraphModule, backward: fx.GraphModule, ctx: Context) -> None:
    """Save slices in place of what is sliced. See the module's docstring."""
    if not splits(ctx.plan):
        return
    known = splitter_of(copy_module(forward), ctx)
    known.run()
    sliced = {node.name: found for node, found in known.sliced.items()}
    cut = Cut(forward.graph, backward.graph)
    output = output_node(forward.graph)
    returned = list(output.args[0])  # type: ignore[arg-type]
    first = len(returned) - len(cut.saved)
    saved: list[fx.Node] = []
    for node in returned[first:]:
        found = sliced.get(node.name)
        if found is None:
            saved.append(node)
            continue
        taken = _taken(node, output, found.dim, found.slices)
        _given(cut.saved[node], taken, found.dim, found.slices)
        saved.extend(taken)
    save_instead(output, first, saved)
    forward.recompile()
    backward.recompile()


def _taken(node: fx.Node, output: fx.Node, dim: int, slices: Slices) -> list[fx.Node]:
    """A tensor's slices, at the end of the forward."""
    with node.graph.inserting_before(output):
        return [
            call(
                node.graph,
                TAKE_SLICE,
                slices.to_take(node, dim, index),
                f"{node.name}_slice",
            )
            for index in range(slices.count)
        ]


def _given(saved: fx.Node, taken: list[fx.Node], dim: int, slices: Slices) -> None:
    """The slices as inputs of the backward, where the whole was one."""
    graph = saved.graph
    inputs = []
    with graph.inserting_before(saved):
        for one in taken:
            inputs.append(graph.placeholder(one.name))
            inputs[-1].meta.update(val=one.meta["val"], saved=True)
    top = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(top):
        joined = call(graph, JOIN_SLICES, slices.to_join(inputs, dim))
    saved.replace_all_uses_with(joined)
    graph.erase_node(saved)

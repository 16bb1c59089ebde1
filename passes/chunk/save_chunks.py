"""Save chunks: save the chunks of a tensor for the backward, and not the whole tensor.

Needs: a forward and a backward that ``passes/chunk/chunk_tokens.py`` has rewritten.
Leaves: for each saved tensor that the forward joins of chunks, and that the backward only cuts into
equal chunks, these chunks among the forward's outputs and the backward's inputs. Of sequences also
if the backward reads the whole tensor too: it joins the chunks there.

Before::                              After (two chunks)::

    def forward(...):                     def forward(...):
        return y, cat([h0, h1])               return y, h0, h1
    def backward(h, dy):                  def backward(h0, h1, dy):
        h0, h1 = h[: T/2], h[T/2 :]           ...

So neither graph has the chunks and the whole tensor at once. The backward that joins them has both
while it computes the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import fx

from passes.chunk.chunked import joined
from passes.graph.fx_utils import call, output_node, positions, remove_dead
from passes.graph.step_module import saved_count, saved_input
from passes.move.move_rules import KEPT
from passes.recompute.recompute_activations import PartitionBoundary, save_instead

#: By a whole tensor, its chunks in their order.
Chunks = Mapping[fx.Node, Sequence[fx.Node]]


def save_chunks(
    forward: fx.Graph,
    backward: fx.Graph,
    made: Chunks,
    cut: Chunks,
    of_sequences: Collection[fx.Node] = (),
) -> None:
    """Save chunks in place of whole tensors. See the module's docstring.

    ``made``: the tensors that the forward joins, and their chunks. ``cut``: the inputs of the
    backward that it cuts into chunks. ``of_sequences``: the joined tensors of sequences.
    """
    inputs = PartitionBoundary(forward, backward).saved
    output = output_node(forward)
    returned = list(output.args[0])  # type: ignore[arg-type]
    first = len(returned) - saved_count(backward)
    saved: list[fx.Node] = []
    saved_before: set[fx.Node] = set()
    for node in returned[first:]:
        given = inputs.get(node)
        chunks, slices = made.get(node, ()), () if given is None else cut.get(given, ())
        is_twice = not saved_before.isdisjoint(chunks)
        if given is None or is_twice or not _is_cut_alike(given, chunks, slices):
            saved.append(node)
            continue
        if node not in of_sequences and not _is_only_cut(given, slices):
            saved.append(node)
            continue
        saved += chunks
        saved_before.update(chunks)
        _give(given, chunks, slices)
    save_instead(output, first, saved)
    remove_dead(forward)


def _is_cut_alike(given: fx.Node, chunks: Sequence[fx.Node], slices: Sequence[fx.Node]) -> bool:
    """Whether a backward cuts an input into the chunks that the forward makes.

    ``slices``: the chunks in the backward, of the input or of a reshape of it.
    """
    kinds = [[_kind(one) for one in own] for own in (chunks, slices)]
    return bool(chunks) and kinds[0] == kinds[1]


def _kind(node: fx.Node) -> tuple[Any, ...]:
    """The sizes, the type and the strides of a tensor, but those of single rows."""
    value = node.meta["val"]
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return value.shape, value.dtype, strides


def _is_only_cut(given: fx.Node, slices: Sequence[fx.Node]) -> bool:
    """Whether a backward reads nothing of an input but its chunks."""
    between = {one.all_input_nodes[0] for one in slices} - {given}
    readers = {user for node in (given, *between) for user in node.users} - between
    return readers == {*slices}


def _give(given: fx.Node, chunks: Sequence[fx.Node], slices: Sequence[fx.Node]) -> None:
    """Replace an input of a backward by its chunks."""
    graph, inputs = given.graph, []
    for chunk, one in zip(chunks, slices, strict=True):
        with graph.inserting_before(given):
            made = saved_input(graph, chunk)
        inputs.append(made)
        one.replace_all_uses_with(made)
        between = one.all_input_nodes[0]
        graph.erase_node(one)
        if between is not given and not between.users:
            graph.erase_node(between)
    if given.users:
        _join(given, inputs)
    graph.erase_node(given)


def _join(given: fx.Node, inputs: Sequence[fx.Node]) -> None:
    """Join an input's chunks before the first operator that reads it whole."""
    graph = given.graph
    first = min(given.users, key=positions(graph).__getitem__)

    def made(target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = call(graph, target, args)
        node.meta.update((key, first.meta[key]) for key in KEPT if key in first.meta)
        return node

    with graph.inserting_before(first):
        given.replace_all_uses_with(joined(made, given, inputs))

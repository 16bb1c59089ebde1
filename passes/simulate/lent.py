"""Lent inputs: the inputs of a backward that are not donated buffers.

Needs: a step module (``passes/graph/step_module.py``).
Leaves: ``LENT`` on the backward's lent placeholders, ``STORAGE`` on saved views. The graphs are
unchanged.

Inductor writes a result into the buffer of a saved tensor after its last read, if AOTAutograd
donates that buffer (``collect_fw_donated_buffer_idxs``). Two kinds of inputs are not donated:
tensors that the forward also returns, which the caller owns; and the incoming gradients, which
autograd owns.

A saved view keeps all the memory of which it is a view: one half of a ``split`` that is saved keeps
both.
"""

from __future__ import annotations

from torch import fx

from passes.graph.fx_utils import bytes_of, output_node, root_of
from passes.graph.metadata import LENT, STORAGE
from passes.graph.step_module import graphs_of, saved_count, saved_name
from passes.types.annotations import Storage
from passes.types.context import Context


def returned_and_saved(
    forward: fx.Graph, backward: fx.Graph
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The outputs of a forward, split into those for its caller and those for the backward.

    A tensor may be in both lists; :func:`passes.graph.fx_utils.output_nodes` has it only once.
    """
    outputs = [n for n in output_node(forward).args[0] if isinstance(n, fx.Node)]  # type: ignore[union-attr]
    first = max(0, len(outputs) - saved_count(backward))
    return outputs[:first], outputs[first:]


def returned_bytes(forward: fx.Graph, backward: fx.Graph) -> int:
    """Bytes of the tensors that the forward returns to its caller and does not save."""
    returned, saved = returned_and_saved(forward, backward)
    return sum(bytes_of(node.meta["val"]) for node in set(returned) - set(saved))


def output_bytes(forward: fx.Graph, backward: fx.Graph) -> int:
    """Bytes of the tensors that the forward returns to its caller."""
    return sum(bytes_of(node.meta["val"]) for node in set(returned_and_saved(forward, backward)[0]))


def lend(step: fx.GraphModule, _: Context) -> fx.GraphModule:
    """Mark the lent inputs of a step's backward. See the module's docstring."""
    forward, backward = graphs_of(step)
    mark_lent(forward.graph, backward.graph)
    return step


def mark_lent(forward: fx.Graph, backward: fx.Graph) -> None:
    """Mark the lent inputs and the saved views of a backward."""
    returned = {root_of(node) for node in returned_and_saved(forward, backward)[0]}
    origins = {node.name: node for node in forward.nodes}
    views: dict[fx.Node, list[fx.Node]] = {}  # by the node that owns the memory
    for node in backward.find_nodes(op="placeholder"):
        STORAGE.pop(node)
        origin = origins.get(saved_name(node))
        if origin is None or root_of(origin) in returned:
            LENT.set(node, True)
        if origin is not None and root_of(origin).op == "call_function":
            views.setdefault(root_of(origin), []).append(node)
    for owner, saved in views.items():
        size_bytes = bytes_of(owner.meta["val"])
        if len(saved) > 1 or bytes_of(saved[0].meta["val"]) != size_bytes:
            for node in saved:
                STORAGE.set(node, Storage(owner.name, size_bytes))

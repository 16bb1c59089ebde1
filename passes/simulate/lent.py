"""Lent: the inputs of a backward that no kernel of it writes over.

Inductor writes a result over a tensor that the forward saved, once that is read for the last time,
if AOTAutograd says that nobody else has it (``collect_fw_donated_buffer_idxs``). What the forward
returns as well is its caller's, and the gradients that the backward begins with are autograd's.
"""

from __future__ import annotations

from torch import fx

from passes.graph.fx_utils import bytes_of, output_node, root_of
from passes.graph.metadata import LENT, SAVES


def returned_and_saved(
    forward: fx.Graph, backward: fx.Graph
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The outputs of a forward: those for its caller, and those for the backward.

    A tensor may be both, so that they are no :func:`passes.graph.fx_utils.output_nodes`.
    """
    given = backward.find_nodes(op="placeholder")
    count = sum(not node.name.startswith("tangents") for node in given)
    outputs = [n for n in output_node(forward).args[0] if isinstance(n, fx.Node)]  # type: ignore[union-attr]
    first = max(0, len(outputs) - count)
    return outputs[:first], outputs[first:]


def returned_bytes(forward: fx.Graph, backward: fx.Graph) -> int:
    """Bytes of what the forward returns to its caller and does not save for the backward."""
    returned, saved = returned_and_saved(forward, backward)
    return sum(bytes_of(node.meta["val"]) for node in set(returned) - set(saved))


def mark_lent(forward: fx.Graph, backward: fx.Graph) -> None:
    """Mark the inputs of a backward that are lent."""
    returned = {root_of(node) for node in returned_and_saved(forward, backward)[0]}
    origins = {node.name: node for node in forward.nodes}
    for node in backward.find_nodes(op="placeholder"):
        origin = origins.get(node.meta.get(SAVES, node.name))
        if origin is None or root_of(origin) in returned:
            node.meta[LENT] = True

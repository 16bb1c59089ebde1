"""Written inputs: save what a forward reads of an input before it writes it.

Torch's partitioner counts inputs as free to save, and computes again in the backward what the
forward read of them. An input that the forward writes at its end has other values by then: the
codebook of a VQ-VAE that an average moves, the vectors of a spectral norm. Gradients would be wrong
without a message.

Before::                                          After::

    code = index(book, i)                             code = index(book, i)    # is saved
    copy_(book, moved)                                copy_(book, moved)
    # backward: index(book, i) again                  # backward: code

What the backward reads of such an input itself is copied first.

Needs: a joint graph, with the writes as ``copy_`` into placeholders. Leaves: ``meta["recompute"]``
for torch's partitioner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes._torch import CheckpointPolicy, InputMutationAOTOutput, OpOverload
from passes.graph.fx_utils import is_view, output_node

_WRITE = torch.ops.aten.copy_.default


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The inputs that a forward or a joint graph writes, or returns to be written."""
    inputs = graph.find_nodes(op="placeholder")
    described = output_node(graph).meta.get("desc") or ()
    later = [one.mutated_input for one in described if isinstance(one, InputMutationAOTOutput)]
    return {node for node in inputs if node.meta.get("desc") in later} | {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and node.args and _writes(node.target)
    }


def _writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and target._schema.is_mutable


def save_reads_of_written_inputs(joint: fx.GraphModule) -> None:
    """Change the graph. See the module's docstring."""
    graph = joint.graph
    writes = graph.find_nodes(op="call_function", target=_WRITE)
    written = {node.args[0] for node in writes if node.args[0].op == "placeholder"}
    if not written:
        return
    backward = {
        node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")
    }
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is _WRITE:
            continue
        if any(source in backward for source in node.all_input_nodes):
            backward.add(node)
        elif is_view(node) and node.args[0] in written:
            written.add(node)
        elif any(source in written for source in node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for source in written:
        if any(user in backward for user in source.users):
            others = [one for one in source.users if one.target is not _WRITE]
            _copy_for(source, [one for one in others if one not in written])
    joint.recompile()


def _copy_for(source: fx.Node, readers: list[fx.Node]) -> None:
    """Let these nodes read a copy, which the forward saves.

    Those of the forward read it too: the partitioner then counts it as a node of the forward.
    """
    graph = source.graph
    inputs = graph.find_nodes(op="placeholder")
    with graph.inserting_after(inputs[-1] if source.op == "placeholder" else source):
        copied = graph.call_function(torch.ops.aten.clone.default, (source,))
    copied.meta["val"] = source.meta["val"]
    copied.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for reader in readers:
        reader.replace_input_with(source, copied)

"""Tag: tell the partitioner which gathered weights the backward keeps.

Needs: a joint graph with one ``unshard`` per parameter, and a plan.
Leaves: ``meta["recompute"]`` and ``meta["ac_graph_id"]`` on each unshard and on the views and
casts of its output.

A parameter that stays gathered is saved for the backward. A regathered parameter is recomputed:
this is its second gather. A replicated parameter is recomputed too, because its read is free.
Views and casts of a weight are always recomputed. Without a tag, the partitioner would save a
view and so keep the whole gathered weight.
"""

from __future__ import annotations

from torch import fx

from passes._torch import CheckpointPolicy
from passes.graph.fx_utils import is_cast, is_view
from passes.ops.markers import UNSHARD, unshard_of
from passes.types.context import Context

# Above all regions of the user's own activation checkpointing: the partitioner turns a tag with a
# lower number into "save" if a checkpointed region reads the weight.
_TAG_ID = 1_000_000


def tag(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Tag unshards, and their views and casts. See the module's docstring."""
    derived: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is UNSHARD:
            keep = ctx.plan[unshard_of(node).name].keeps_gathered
            policy = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
        elif (is_view(node) or is_cast(node)) and node.args[0] in derived:
            policy = CheckpointPolicy.MUST_RECOMPUTE
        else:
            continue
        derived.add(node)
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = _TAG_ID
    return gm

"""Tag: tell the partitioner which gathered weights the backward may keep.

Needs: a joint graph with one ``unshard`` a parameter, and a plan.
Leaves: ``meta["recompute"]`` on each unshard and on everything that is only a view or a
cast of a parameter.

What is kept is saved for the backward; what is gathered again is recomputed there, which
is the second gather; ``REPLICATE`` is recomputed too, since reading it costs nothing. Views
and casts of a weight are always recomputed: untagged, the partitioner would save the view
and with it the whole gathered weight.
"""

from __future__ import annotations

from torch import fx

from passes._torch import CheckpointPolicy
from passes.graph.fx_utils import is_cast, is_view
from passes.ops.markers import UNSHARD
from passes.types.context import Context

# Above every region of the user's own activation checkpointing: a tag of a lower number is
# turned into "save" by the partitioner where a checkpointed region reads the weight.
_TAG_ID = 1_000_000


def tag(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Tag unshards and what derives from them. See the module's docstring."""
    derived: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is UNSHARD:
            keep = ctx.plan.decision(node.args[1]).keeps
            policy = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE
        elif (is_view(node) or is_cast(node)) and node.args[0] in derived:
            policy = CheckpointPolicy.MUST_RECOMPUTE
        else:
            continue
        derived.add(node)
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = _TAG_ID
    return gm

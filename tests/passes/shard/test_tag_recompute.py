"""Tag: what the partitioner is told of each gathered weight and of what is made from it."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes._torch import CheckpointPolicy
from passes.ops.markers import UNSHARD
from passes.shard.tag_recompute import tag
from passes.types.decision import DECISIONS, Decision
from tests.passes.graphs import GROUP, GraphBuilder, context, parameter

aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


class Weight(GraphBuilder):
    """One parameter, read through its marker."""

    def __init__(self) -> None:
        super().__init__()
        shard = self.parameter("w", [2, 2])
        self.whole = self.call(UNSHARD, shard, "w", [4, 2], True, GROUP)

    def tagged(self, *outputs: fx.Node, decision: Decision = Decision.SHARD_KEEP) -> None:
        tag(self.finish(*outputs), context([parameter("w", (4, 2))], decision))


@pytest.mark.parametrize(
    ("decision", "policy"),
    [
        (Decision.SHARD_KEEP, SAVE),
        (Decision.SHARD_HOST_KEEP, SAVE),
        (Decision.SHARD_HOST_REGATHER, RECOMPUTE),
        (Decision.SHARD_REGATHER, RECOMPUTE),
        (Decision.REPLICATE, RECOMPUTE),
    ],
)
def test_only_a_weight_to_keep_is_saved(decision: Decision, policy: CheckpointPolicy):
    b = Weight()
    b.tagged(b.whole, decision=decision)
    assert b.whole.meta["recompute"] is policy


@pytest.mark.parametrize("decision", list(DECISIONS))
def test_views_and_casts_of_a_weight_are_made_again(decision: Decision):
    b = Weight()
    view = b.call(aten.permute.default, b.whole, [1, 0])
    cast = b.call(torch.ops.prims.convert_element_type.default, view, torch.bfloat16)
    again = b.call(aten.t.default, b.call(aten._to_copy.default, cast, dtype=torch.half))
    b.tagged(again, decision=decision)
    assert [n.meta["recompute"] for n in (view, cast, again.args[0], again)] == [RECOMPUTE] * 4  # type: ignore[union-attr]


def test_what_is_computed_from_a_weight_is_left_to_the_partitioner():
    b = Weight()
    computed = b.call(aten.mul.Tensor, b.whole, 2.0)
    view_of_it = b.call(aten.t.default, computed)
    b.tagged(view_of_it)
    assert "recompute" not in computed.meta
    assert "recompute" not in view_of_it.meta


def test_views_of_activations_are_left_to_the_partitioner():
    b = Weight()
    view = b.call(aten.t.default, b.input("x", [4, 2]))
    b.tagged(view)
    assert "recompute" not in view.meta


def test_tags_outrank_every_region_of_the_users_own_checkpointing():
    # The partitioner turns a recomputed node into a saved one where a region of a higher number
    # reads it.
    b = Weight()
    view = b.call(aten.t.default, b.whole)
    b.tagged(view)
    assert b.whole.meta["ac_graph_id"] == view.meta["ac_graph_id"] >= 1_000_000

"""Move within hosts: a host's ranks share the weights; their gradients cross between hosts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from passes.candidates.move_groups import find_move_groups
from passes.capture.captured_step import lay_out
from passes.graph.fx_utils import COLLECTIVES, group_of, is_collective
from passes.graph.metadata import COLLECTIVE
from passes.pipeline import Stage, default_passes, run
from passes.plan.planner import make_plan
from passes.types.context import Context, Phase
from passes.types.decision import Decision, Moves
from passes.types.hardware import LinkRate
from passes.types.plan import Plan
from tests.chosen import thorough
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.graphs import GROUP, INNER, OUTER, hardware, two_dimensions, with_mesh_dims
from tests.passes.move.test_heads import WIDTH, Attention
from tests.passes.move.test_move_activations import MLP, batches
from tests.passes.move.test_reductions import Language, of_next
from tests.passes.split.test_split_operators import Gated, Mlp

WITHIN, OVER_ALL = Decision.SHARD_HOST_REGATHER, Decision.SHARD_REGATHER
#: Between hosts and within one as between all ranks.
EVEN = with_mesh_dims(hardware(), LinkRate(1e-6, 1e-8), LinkRate(1e-6, 1e-8))


def on_hosts(model: nn.Module, batch: torch.Tensor, world_size: int = 4, **changes):
    """A captured step, and its context on two hosts."""
    given = {"hardware": EVEN, "mesh_dims": two_dimensions(2, world_size), **changes}
    return capture_step(model, batch, world_size=world_size, **given)


def check(model, given, within, over_all=(), rest=Decision.REPLICATE, **changes) -> Plan:
    """Compare outputs and gradients with eager PyTorch; returns the plan.

    ``within``, ``over_all``: the dimensions of the weights that stay, on a host's and on all ranks.
    """
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = on_hosts(model, given[0], len(given), **changes)
    plan = decided(ctx, rest).replace(ranks_of_a_host=len(given) // 2)
    contexts = [ctx.replace(rank=rank) for rank in range(len(given))]
    for keep_tokens in (True, False):
        kept = plan.tensor_parallel(dict(within), within_hosts=True, keep_tokens=keep_tokens)
        kept = kept.tensor_parallel(dict(over_all), keep_tokens=keep_tokens)
        made.check(captured, contexts, kept)
    return kept


@pytest.mark.parametrize("rest", [Decision.REPLICATE, OVER_ALL, Decision.SHARD_HOST_KEEP])
@pytest.mark.parametrize("uses_p2p", [False, *thorough(True)])
def test_products_compute_what_they_did(rest: Decision, uses_p2p: bool) -> None:
    model = Mlp(16, True)
    check(model, batches(model, 4), MLP, rest=rest, uses_p2p=uses_p2p)


@pytest.mark.parametrize("uses_p2p", [*thorough(False), True])
def test_hosts_of_four_ranks(uses_p2p: bool) -> None:
    model = Gated()
    dims = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}
    check(model, batches(model, 8), dims, uses_p2p=uses_p2p)


def test_gradients_travel_between_hosts_in_their_own_type() -> None:
    model = Mlp(16, True)
    given = batches(model, 4)
    captured, ctx = on_hosts(model, given[0], reduce_dtype=torch.bfloat16)
    plan = decided(ctx, Decision.REPLICATE).replace(ranks_of_a_host=2)
    plan = plan.tensor_parallel(MLP, within_hosts=True)
    laid = lay_out(captured, plan, ctx, default_passes())
    sent = [node for node in laid.backward.graph.nodes if is_collective(node)]
    between = {COLLECTIVE.of(n).names: n.meta["val"].dtype for n in sent if group_of(n) == OUTER}
    assert {name for (name,) in between} == set(MLP)
    assert set(between.values()) == {torch.bfloat16}


def test_heads_by_the_ranks_of_a_host() -> None:
    """Two heads of keys and values are enough for two ranks, and for four they are not."""
    model = Attention(keys=2)
    given = [torch.randn(3, 5, WIDTH) for _ in range(4)]
    captured, ctx = on_hosts(model, given[0])
    groups = find_move_groups(captured, ctx).groups
    assert [group.decision for group in groups] == [WITHIN, Decision.SHARD_HOST_KEEP]
    check(model, given, groups[0].dims)


@pytest.mark.parametrize("uses_p2p", [*thorough(False), True])
def test_some_weights_on_a_host_and_others_on_all_ranks(uses_p2p: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(12, 6)
            self.mlp = Mlp(16, True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.mlp(self.words(tokens))
            return y

    given = [torch.randint(0, 12, (3, 5)) for _ in range(4)]
    mlp = {f"mlp.{name}": dim for name, dim in MLP.items()}
    plan = check(Both(), given, mlp, {"words.weight": 0}, OVER_ALL, uses_p2p=uses_p2p)
    assert plan["words.weight"].decision == OVER_ALL and plan["mlp.up.bias"].decision == WITHIN
    check(Both(), given, {"words.weight": 0}, mlp, uses_p2p=uses_p2p)


def test_a_head_by_vocabulary() -> None:
    model = Language(of_next, tied=True)
    given = [torch.randint(0, model.words.num_embeddings, (3, 5)) for _ in range(4)]
    check(model, given, {"words.weight": 0}, uses_p2p=True)


def test_a_vocabulary_that_the_ranks_do_not_divide() -> None:
    """The hosts have seven and six words over all ranks: 4, 3, 3 and 3; within hosts 7 and 6."""
    model = Language(of_next, tied=True, words=13)
    given = [torch.randint(0, 13, (3, 5)) for _ in range(4)]
    check(model, given, {"words.weight": 0})
    check(model, given, {}, {"words.weight": 0})


def test_tokens_stay_in_the_host_and_gradients_share_a_bucket_between_hosts() -> None:
    captured, ctx = on_hosts(Mlp(16, True), torch.randn(5, 6), uses_p2p=True)
    plan = decided(ctx, Decision.REPLICATE, bucket_bytes=1 << 20).replace(ranks_of_a_host=2)
    plan = plan.tensor_parallel(MLP, within_hosts=True)
    laid = lay_out(captured, plan, ctx, default_passes())
    backward = ctx.replace(plan=plan, phase=Phase.BACKWARD)
    gm = run(default_passes(), Stage.PARTS, laid.backward, backward)
    found = [
        (COLLECTIVES[node.target], group_of(node), set(COLLECTIVE.of(node).names))
        for node in gm.graph.nodes
        if is_collective(node)
    ]
    assert [one for one in found if one[1] == OUTER] == [("all_reduce", OUTER, set(MLP))]
    tokens = [kind for kind, group, _ in found if group == INNER]
    assert sorted(tokens) == ["all_gather", "all_gather", "all_to_all"]
    weights = {name for _, group, names in found for name in names if group == GROUP}
    assert weights == {"first.weight", "first.bias", "down.bias"}


def planned(rows: int, shared: int = 4, **changes) -> Plan:
    """A plan for two hosts of four ranks, of which ``shared`` share what a host sends."""
    flat = dict.fromkeys(EVEN.collectives, LinkRate(1e-6, shared * 1e-8))
    profile = dataclasses.replace(EVEN, collectives=flat)
    changes = {"hardware": profile, "tensor_parallel": True, **changes}
    captured, ctx = on_hosts(Mlp(1024, True), torch.randn(rows, 6), 8, **changes)
    return make_plan(captured, ctx, default_passes())


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
@pytest.mark.parametrize("rows, decision", [(1, OVER_ALL), (64, WITHIN), (4096, None)])
def test_the_planner_chooses_the_ranks_by_what_their_links_cost(rows, decision) -> None:
    plan = planned(rows)
    assert plan == planned(rows)
    assert plan.moved == (set(MLP) if decision else set())
    if decision is None:
        assert "the bytes of the weights" in plan["up.weight"].reason
        return
    assert {plan[name].decision.scope for name in MLP} == {decision.scope}
    assert "activations: saves" in plan["up.weight"].reason


@pytest.mark.thorough
@pytest.mark.usefixtures("medium_search")
@pytest.mark.parametrize("rows, shared, decision", [(256, 4, WITHIN), (1, 1, OVER_ALL)])
def test_named_weights_stay_on_the_better_ranks(rows, shared, decision) -> None:
    plan = planned(rows, shared, tensor_parallel=("up.weight",))
    assert plan.moved == set(MLP) and plan["down.weight"].decision.scope == decision.scope
    assert plan["up.weight"].moves is Moves.ACTIVATIONS


def test_a_plan_by_hand_needs_hosts_whose_ranks_have_a_part_each() -> None:
    rows = [("w", torch.empty(6, 16)), ("b", torch.empty(1))]
    flat = Plan.uniform(rows, "replicate", world_size=8)
    with pytest.raises(ValueError, match="within_hosts=True needs a plan with hosts"):
        flat.tensor_parallel({"w": 0}, within_hosts=True)
    plan = Plan.uniform(rows, "replicate", world_size=8, ranks_of_a_host=2)
    made = plan.tensor_parallel({"w": 0}, within_hosts=True)
    assert made.within_hosts and Plan.from_dict(made.to_dict()) == made
    with pytest.raises(ValueError, match=r"'b' of shape .* cannot stay on 2 ranks"):
        plan.tensor_parallel({"b": 0}, within_hosts=True)
    shapes = [(row.name, row.shape, row.dtype) for row in made.parameters]
    assert made.mismatch(shapes, 8, 2) is None
    assert "hosts of 2 ranks" in (made.mismatch(shapes, 8, 4) or "")


def test_a_context_without_hosts_has_no_such_layout() -> None:
    captured, ctx = capture_step(Mlp(16, True), torch.randn(5, 6), world_size=4)
    assert isinstance(ctx, Context)
    groups = find_move_groups(captured, ctx).groups
    assert {one.decision for one in groups} == {OVER_ALL, Decision.SHARD_KEEP}
    plan = decided(ctx, Decision.REPLICATE).replace(ranks_of_a_host=2)
    plan = plan.tensor_parallel(MLP, within_hosts=True)
    with pytest.raises(ValueError, match="needs a two-dimensional mesh"):
        lay_out(captured, plan, ctx, default_passes())

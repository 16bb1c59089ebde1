"""Move: products with resting weights compute what gathered weights do, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.candidates.move_groups import find_move_groups
from passes.capture.captured_step import lay_out
from passes.graph.metadata import COLLECTIVE, PARAMETER
from passes.ops.tables import TAKE_ROWS
from passes.pipeline import Stage, default_passes, run
from passes.pricing.predict import predict
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Context, Phase
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT, Plan
from tests.chosen import more, thorough
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import Gated, Mlp, sliced

MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
BARE = {"up.weight": 0, "down.weight": 1}
GATED = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}


def batches(model: nn.Module, world_size: int) -> list[Tensor]:
    shape = (3, 5, 6) if isinstance(model, Gated) else (5, 6)
    return [torch.randn(shape) for _ in range(world_size)]


def training(model: nn.Module, world_size: int) -> Training:
    given = batches(model, world_size)
    return Training(model, given, [torch.randn_like(model(one)) for one in given])


@pytest.mark.parametrize(
    ("world_size", "rest", "uses_p2p"),
    [
        (2, Decision.SHARD_REGATHER, False),
        *thorough((4, Decision.REPLICATE, True)),
        *more((2, Decision.REPLICATE, True), (4, Decision.SHARD_REGATHER, False)),
        *more((4, Decision.SHARD_REGATHER, True), (2, Decision.REPLICATE, False)),
    ],
)
@pytest.mark.parametrize(
    "model, dims", [(Mlp(16, True), MLP), (Mlp(16, False), BARE), (Gated(), GATED)]
)
def test_products_compute_what_they_did(
    model: nn.Module, dims: dict[str, int], world_size: int, rest: Decision, uses_p2p: bool
) -> None:
    made = training(model, world_size)
    captured, ctx = capture_step(model, made.batches[0], world_size=world_size, uses_p2p=uses_p2p)
    contexts = [ctx.replace(rank=rank) for rank in range(world_size)]
    for again, keep_tokens in ((["gather"], False), ([], True)):
        plan = decided(ctx, rest).tensor_parallel(dims, keep_tokens=keep_tokens)
        assert collectives(captured, plan, ctx) == (
            ["gather", "reduce"],
            [*again, "gather", "reduce"],
        )
        made.check(captured, contexts, plan)


@pytest.mark.parametrize("uses_p2p", [False, True])
def test_features_that_the_ranks_do_not_divide(uses_p2p: bool) -> None:
    """Of 16, three ranks have 6, 6 and 4."""
    check_training(Mlp(16, True), batches(Mlp(16, True), 3), MLP, uses_p2p)
    check_training(Gated(), batches(Gated(), 3), GATED, uses_p2p)


@pytest.mark.parametrize("uses_p2p", [False, True])
def test_tokens_that_are_kept_are_saved_in_place_of_the_own_ones(uses_p2p: bool) -> None:
    captured, ctx = capture_step(Gated(), torch.randn(3, 5, 6), world_size=2, uses_p2p=uses_p2p)
    plan = decided(ctx, Decision.REPLICATE)
    rows = []
    for keep_tokens in (False, True):
        kept = plan.tensor_parallel(GATED, keep_tokens=keep_tokens)
        assert kept["up.weight"].kept_share == 0 and kept["up.weight"].decision.keep == keep_tokens
        laid = lay_out(captured, kept, ctx, default_passes())
        saved = PartitionBoundary(laid.forward.graph, laid.backward.graph).saved
        shapes = [node.meta["val"].shape for node in saved if not PARAMETER.is_set(saved[node])]
        rows.append(sorted(shape[0] for shape in shapes if shape[1:] == (6,)))
    assert rows == [[15, 15], [15, 30]]  # the first linear's input, and the group's


def test_tensors_that_the_backward_recomputes() -> None:
    """The forward saves the rank's own tokens only, and the backward gathers them."""
    model = Mlp(16, True)
    made = training(model, 2)
    captured, ctx = capture_step(model, made.batches[0], world_size=2)
    boundary = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    keys = keys_of(captured.forward.graph)
    wide = [one for one in boundary.saved if one in keys and one.meta["val"].shape[-1] == 16]
    assert wide
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(MLP)
    plan = plan.replace(recompute=tuple(keys[node] for node in wide))
    made.check(captured, [ctx.replace(rank=rank) for rank in range(2)], plan)
    laid = lay_out(captured, plan, ctx, default_passes())
    inputs = laid.backward.graph.find_nodes(op="placeholder")
    saved = [node.meta["val"].shape for node in inputs if not PARAMETER.is_set(node)]
    assert not any(shape[-1] == 8 for shape in saved)


@pytest.mark.parametrize("frozen", ["up.weight", "up.bias", "down.weight"])
def test_frozen_weights_stay_too(frozen: str) -> None:
    model = Mlp(16, True)
    model.get_parameter(frozen).requires_grad_(False)
    check_training(model, batches(model, 2), MLP)


class Adapted(nn.Module):
    """An MLP whose frozen first weight has an adapter; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16).requires_grad_(False)
        self.a = nn.Linear(6, 2, bias=False)
        self.b = nn.Linear(2, 16, bias=False)
        self.down = nn.Linear(16, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x) + self.b(self.a(x))))
        return y


def test_an_adapter_is_a_part_of_the_group() -> None:
    model = Adapted()
    captured, ctx = capture_step(model, torch.randn(5, 6), world_size=2)
    ((group, *_),) = find_move_groups(captured, ctx).by_weights  # and not the adapter by itself
    assert group.dims == {**MLP, "b.weight": 0}
    check_training(model, batches(model, 2), group.dims)


def check_training(
    model: nn.Module, given: list[Tensor], dims: dict[str, int], uses_p2p: bool = False
) -> Plan:
    """Compare outputs and gradients with eager PyTorch, also with tokens kept; returns the plan."""
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = capture_step(model, given[0], world_size=len(given), uses_p2p=uses_p2p)
    rest = decided(ctx, Decision.SHARD_REGATHER)
    contexts = [ctx.replace(rank=rank) for rank in range(len(given))]
    for keep_tokens in (True, False):
        plan = rest.tensor_parallel(dims, keep_tokens=keep_tokens)
        made.check(captured, contexts, plan)
    return plan


def collectives(captured: Any, plan: Plan, ctx: Context) -> tuple[list[str], list[str]]:
    """The kinds of the collectives of tokens in the forward and in the backward, sorted."""
    laid = lay_out(captured, plan, ctx, default_passes())
    found = []
    for gm, phase in ((laid.forward, Phase.FORWARD), (laid.backward, Phase.BACKWARD)):
        gm = run(default_passes(), Stage.PARTS, gm, ctx.replace(plan=plan, phase=phase))
        purposes = [COLLECTIVE.of(n) for n in gm.graph.nodes if COLLECTIVE.is_set(n)]
        served = {name for one in purposes for name in one.names if not one.tokens}
        assert not served & plan.moved
        found.append(sorted("gather" if p.gathers else "reduce" for p in purposes if p.tokens))
    return found[0], found[1]


class Words(nn.Module):
    """An embedding and a linear; tokens: [batch, tokens]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, **options)
        self.last = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.words(tokens)))
        return y


@pytest.mark.parametrize(
    ("world_size", "uses_p2p"), [(2, True), *thorough((4, False)), *more((4, True), (2, False))]
)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_the_table_of_an_embedding_stays(
    world_size: int, options: dict[str, Any], uses_p2p: bool
) -> None:
    model = Words(**options)
    given = [torch.randint(0, 12, (3, 5)) for _ in range(world_size)]
    captured, ctx = capture_step(model, given[0], world_size=world_size, uses_p2p=uses_p2p)
    ((group, *_),) = find_move_groups(captured, ctx).by_weights
    assert group.dims == {"words.weight": 0}
    check_training(model, given, group.dims, uses_p2p)


def test_an_id_that_is_in_no_row_is_an_error() -> None:
    with pytest.raises(IndexError):
        TAKE_ROWS(torch.randn(6, 8), torch.tensor([[1, 12]]), 0, 12)
    with pytest.raises(IndexError):
        TAKE_ROWS(torch.randn(6, 8), torch.tensor([-1]), 6, 12)


@pytest.mark.parametrize("along", [0, 1, OF_INPUT])
@pytest.mark.parametrize("keep_tokens", [False, *thorough(True)])
def test_slices_behind_tokens_that_moved(keep_tokens: bool, along: int) -> None:
    """The sliced product's saved input is the sum that the moved MLP's ranks add up."""
    made = training(nn.Sequential(Mlp(16, True), Mlp(16, True)), 2)
    captured, ctx = capture_step(made.model, made.batches[0], world_size=2)
    plan = decided(ctx, Decision.SHARD_REGATHER)
    plan = plan.tensor_parallel(
        {f"0.{name}": dim for name, dim in MLP.items()}, keep_tokens=keep_tokens
    )
    plan = sliced(plan, {"1.first.weight": (2, along, None)})
    made.check(captured, [ctx.replace(rank=rank) for rank in range(2)], plan)
    predict(captured, plan, ctx, default_passes())

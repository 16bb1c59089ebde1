"""Chunk: products in chunks of tokens compute what whole ones do, on any number of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.capture.captured_step import NotInChunks, lay_out
from passes.chunk.chunk_tokens import chunk, chunk_inference
from passes.graph.fx_utils import copy_module, positions
from passes.graph.metadata import CHUNK, COLLECTIVE, NOT_CHUNKED
from passes.graph.step_module import step_module
from passes.pipeline import Stage, default_passes, run
from passes.plan.planner import complete
from passes.types.context import Context, Phase
from passes.types.decision import Decision, Moves
from passes.types.plan import Plan
from tests.chosen import more, thorough
from tests.passes import graphs
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import (
    BARE,
    GATED,
    MLP,
    Words,
    batches,
    collectives,
)
from tests.passes.move.test_move_rules import Between, Twice
from tests.passes.move.test_within_hosts import on_hosts
from tests.passes.split.test_split_operators import Gated, Mlp

_aten = torch.ops.aten


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def check_chunks(
    model: nn.Module, given: list[Tensor], dims: dict[str, int], chunks: int, **changes: Any
) -> tuple[Any, Plan, Context]:
    """Compare outputs and gradients with eager PyTorch, also with tokens kept; returns the step and
    its plan.
    """
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = capture_step(model, given[0], world_size=len(given), **changes)
    rest = decided(ctx, Decision.SHARD_REGATHER)
    contexts = [ctx.replace(rank=rank) for rank in range(len(given))]
    for keep_tokens in (True, False):
        plan = rest.tensor_parallel(dims, chunks=chunks, keep_tokens=keep_tokens)
        made.check(captured, contexts, plan)
    return captured, plan, ctx


@pytest.mark.parametrize(
    "model, dims", [(Mlp(16, True), MLP), (Mlp(16, False), BARE), (Gated(), GATED)]
)
@pytest.mark.parametrize(
    ("world_size", "chunks", "uses_p2p"),
    [
        (2, 4, True),
        *thorough((4, 2, False)),
        *more((2, 2, True), (2, 4, False), (4, 2, True), (4, 4, False)),
    ],
)
def test_chunks_compute_what_whole_tokens_do(
    model: nn.Module, dims: dict[str, int], world_size: int, chunks: int, uses_p2p: bool
) -> None:
    """Of 5 and of 15 tokens, which the chunks do not divide."""
    given = batches(model, world_size)
    captured, plan, ctx = check_chunks(model, given, dims, chunks, uses_p2p=uses_p2p)
    assert collectives(captured, plan, ctx) == (
        ["gather"] * chunks + ["reduce"] * chunks,
        ["gather"] * (chunks + 1) + ["reduce"] * chunks,
    )


def test_fewer_tokens_than_chunks_have_a_chunk_each() -> None:
    captured, plan, ctx = check_chunks(Mlp(16, True), [torch.randn(3, 6) for _ in range(2)], MLP, 4)
    assert collectives(captured, plan, ctx)[0] == ["gather"] * 3 + ["reduce"] * 3


BETWEEN = {
    "a value for each token": lambda model, h, x: h * x.sum(1, keepdim=True),
    "a mask": lambda model, h, x: torch.where(x[:, :1] > 0, h, 0.0),
    "a constant": lambda model, h, x: torch.maximum(h, torch.zeros_like(h)) * 3,
    "numbers of the features": lambda model, h, x: h * torch.arange(16),
    "nothing": lambda model, h, x: h,
    "views": lambda model, h, x: torch.tanh(h.view(2, 2, 4, 4)).view(4, 16),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_operators_between_the_products(what: str) -> None:
    model = Between(BETWEEN[what])
    del model.scale
    captured, plan, ctx = check_chunks(model, [torch.randn(4, 6) for _ in range(2)], MLP, 2)
    forward, _ = collectives(captured, plan, ctx)
    assert forward.count("reduce") == 2


@pytest.mark.parametrize("frozen", ["up.weight", "up.bias", "down.weight"])
def test_frozen_weights(frozen: str) -> None:
    model = Mlp(16, True)
    model.get_parameter(frozen).requires_grad_(False)
    check_chunks(model, batches(model, 2), MLP, 2)


def test_an_mlp_that_is_called_twice() -> None:
    check_chunks(Twice(), [torch.randn(3, 6) for _ in range(2)], MLP, 2)


@pytest.mark.parametrize("uses_p2p", [False, True])
def test_within_hosts(uses_p2p: bool) -> None:
    model = Mlp(16, True)
    given = batches(model, 4)
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = on_hosts(model, given[0], uses_p2p=uses_p2p)
    plan = decided(ctx, Decision.REPLICATE).replace(ranks_of_a_host=2)
    plan = plan.tensor_parallel(MLP, within_hosts=True, chunks=2)
    made.check(captured, [ctx.replace(rank=rank) for rank in range(4)], plan)


def test_an_inference_has_chunks_too() -> None:
    captured, ctx = capture_step(Mlp(16, True), torch.randn(8, 6), world_size=2)
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(MLP, chunks=2)
    local = ctx.replace(plan=plan, phase=Phase.INFERENCE)
    gm = chunk_inference(copy_module(captured.forward), local)
    assert sum(CHUNK.is_set(node) for node in gm.graph.nodes) == 2 * 2
    assert NOT_CHUNKED.of(gm) == {}
    unmoved = local.replace(moves_activations=False)  # ranks with other batches
    gm = chunk_inference(copy_module(captured.forward), unmoved)
    assert not any(CHUNK.is_set(node) for node in gm.graph.nodes)


def lowered(captured: Any, plan: Plan, ctx: Context) -> list[Any]:
    """The forward and the backward in their final order."""
    laid = lay_out(captured, plan, ctx, default_passes())
    return [
        run(default_passes(), Stage.PARTS, gm, ctx.replace(plan=plan, phase=phase)).graph
        for gm, phase in ((laid.forward, Phase.FORWARD), (laid.backward, Phase.BACKWARD))
    ]


def of_tokens(graph: Any, gathers: bool) -> list[Any]:
    """The collectives of tokens, in the order of their starts."""
    own = [node for node in graph.nodes if COLLECTIVE.is_set(node)]
    return [n for n in own if COLLECTIVE.of(n).tokens and COLLECTIVE.of(n).gathers == gathers]


def test_a_chunk_travels_while_another_one_computes() -> None:
    model = Mlp(16, True)
    slow = graphs.hardware(flops_per_second={"default": 1e8})  # a product takes longer than a send
    captured, ctx = capture_step(model, torch.randn(8, 6), world_size=2, hardware=slow)
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(MLP, chunks=4)
    plan = complete(plan, captured, ctx, default_passes())
    for graph in lowered(captured, plan, ctx):
        order = positions(graph)
        products = [
            order[node]
            for node in graph.nodes
            if node.target in (_aten.mm.default, _aten.addmm.default)
            and node.meta["val"].shape == (4, 8)  # 2 tokens of each rank, half of the features
        ]
        gathers, reduces = of_tokens(graph, True), of_tokens(graph, False)
        waits = [order[next(iter(node.users))] for node in reduces]
        assert len(products) == len(reduces) == 4
        for index, place in enumerate(products[:-1]):
            sent = [order[node] for node in gathers[:4]]
            assert sent[index + 1] < place
            assert order[reduces[index]] < products[index + 1] < waits[index]


def test_the_sums_of_a_gated_mlp_travel_while_another_chunk_computes() -> None:
    """Those of the backward add up two products."""
    slow = graphs.hardware(flops_per_second={"default": 1e8})
    captured, ctx = capture_step(Gated(), torch.randn(4, 2, 6), world_size=2, hardware=slow)
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(GATED, chunks=4)
    plan = complete(plan, captured, ctx, default_passes())
    for graph in lowered(captured, plan, ctx):
        order = positions(graph)
        products = [node for node in graph.nodes if node.target is _aten.mm.default]
        products = [node for node in products if node.meta["val"].shape[0] == 2 * 2]  # of a chunk
        firsts, sums = [order[node] for node in products[::3]], of_tokens(graph, False)
        assert len(firsts) == len(sums) == 4
        for one, place in zip(sums, firsts[1:], strict=False):
            assert order[one] < place


def test_gradients_of_weights_are_one_product() -> None:
    model = Mlp(16, False)
    captured, ctx = capture_step(model, torch.randn(8, 6), world_size=2)
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(BARE, chunks=4)
    _, backward = lowered(captured, plan, ctx)
    for shape in ((8, 6), (6, 8)):  # of this rank's half of the features
        made = [n for n in backward.nodes if n.target is _aten.mm.default]
        assert sum(tuple(node.meta["val"].shape) == shape for node in made) == 1


def refused_of(model: nn.Module, batch: Tensor, dims: dict[str, int]) -> dict[str, str]:
    captured, ctx = capture_step(model, batch, world_size=2)
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(dims, chunks=2)
    with pytest.raises(NotInChunks, match="Give its whole group chunks=1"):
        lay_out(captured, plan, ctx, default_passes())
    without = [one for one in default_passes() if one.name not in ("chunk", "move")]
    laid = lay_out(captured, plan, ctx, without)
    step = chunk(step_module(laid.forward, laid.backward), ctx.replace(plan=plan))
    return NOT_CHUNKED.of(step)


def test_what_stays_whole_has_a_reason() -> None:
    found = refused_of(Between(lambda m, h, x: torch.tanh(h.t()).t()), torch.randn(4, 6), MLP)
    assert "permute has no rule for chunks of tokens" in found["up.weight"]
    assert set(found) == {"up.weight", "down.weight"}
    found = refused_of(Words(), torch.randint(0, 12, (3, 5)), {"words.weight": 0})
    assert found == {"words.weight": "it is in no two products of tokens"}


def test_a_plan_says_how_many_chunks() -> None:
    rows = [("up.weight", torch.empty(16, 6)), ("down.weight", torch.empty(6, 16))]
    plan = Plan.uniform(rows, "replicate", world_size=2).tensor_parallel(BARE, chunks=4)
    assert [row.chunks for row in plan.parameters] == [4, 4]
    assert Plan.from_dict(plan.to_dict()) == plan
    data = plan.to_dict()
    for row in data["parameters"]:
        del row["chunks"]  # as plans before chunks
    assert Plan.from_dict(data)["up.weight"].chunks == 1
    with pytest.raises(ValueError, match=r"'up\.weight': chunks=0 needs a number"):
        plan.tensor_parallel(BARE, chunks=0)
    with pytest.raises(ValueError, match="above 1 moves='activations'"):
        dataclasses.replace(plan["up.weight"], moves=Moves.WEIGHT, dim=0)


def test_the_simulated_step_is_shorter_where_compute_and_tokens_take_as_long() -> None:
    model = Mlp(64, False)
    hardware = graphs.hardware(memory_bytes_per_second=1e11)
    captured, ctx = capture_step(model, torch.randn(256, 6), world_size=2, hardware=hardware)
    whole, *others = (
        complete(
            decided(ctx, Decision.REPLICATE).tensor_parallel(BARE, chunks=chunks),
            captured,
            ctx,
            default_passes(),
        ).prediction
        for chunks in (1, 2, 4)
    )
    assert whole is not None
    for found in others:
        assert found is not None
        assert found.step_seconds < whole.step_seconds

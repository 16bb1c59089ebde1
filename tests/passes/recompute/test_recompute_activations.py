"""Recompute: what is not saved is made again, with the same gradients and in less memory."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from passes.capture.captured_step import NothingSaved, lay_out
from passes.graph.captured import Captured
from passes.graph.fx_utils import copy_module, output_node, output_nodes
from passes.graph.metadata import RECOMPUTED
from passes.pipeline import default_passes
from passes.plan.planner import Infeasible, make_plan
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.capture.test_captured_step import MIXED, Training, decided
from tests.passes.captures import capture_step

KEEP, AGAIN, REPLICATE = Decision.SHARD_KEEP, Decision.SHARD_REGATHER, Decision.REPLICATE
PASSES = default_passes()


class Block(nn.Module):
    """Attention and a gated MLP with their residuals; x: [batch, tokens, 16]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.up = nn.Linear(16, 64)
        self.gate = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def blocks(count: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(count)))


def recomputable(step: Captured) -> list[str]:
    """Keys of all that the backward could compute again."""
    forward = step.forward.graph
    cut = PartitionBoundary(forward, step.backward.graph)
    return [key for node, key in keys_of(forward).items() if node in cut.saved and cut.chain(node)]


@functools.cache
def of_blocks(count: int, rows: int = 4) -> tuple[Captured, Context]:
    return capture_step(blocks(count), torch.randn(rows, 12, 16))


@functools.cache
def of_layers() -> tuple[Captured, Context]:
    """Activations that take far more than the parameters."""
    layers = (nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU()) for _ in range(4))
    return capture_step(nn.Sequential(*layers), torch.randn(512, 16))


@functools.cache
def tied() -> tuple[Training, Captured, Context]:
    training = Training.tied(2)
    return training, *capture_step(training.model, training.batches[0], world_size=2)


@functools.cache
def two_blocks() -> tuple[Training, Captured, Context]:
    batches = [torch.randn(2, 5, 16) for _ in range(2)]
    training = Training(blocks(2), batches, [torch.randn(2, 5, 16) for _ in range(2)])
    return training, *capture_step(training.model, batches[0], world_size=2)


@pytest.mark.parametrize("every", [1, 2], ids=["all", "every second"])
@pytest.mark.parametrize(
    ("make", "decisions"),
    [(tied, MIXED), (two_blocks, KEEP), (two_blocks, AGAIN), (two_blocks, REPLICATE)],
)
def test_a_step_that_recomputes_gives_eager_outputs_and_mean_gradients(make, decisions, every):
    training, captured, ctx = make()
    keys = recomputable(captured)[::every]
    assert len(keys) > 1
    plan = decided(ctx, decisions).replace(recompute=tuple(keys))
    if make is two_blocks:  # and begin from what the first block gives
        plan = plan.replace(also_save=("0:add.Tensor:2",))
    contexts = [ctx.replace(rank=rank) for rank in range(2)]
    training.check(captured, contexts, plan)


def test_what_is_recomputed_is_not_saved_and_stands_before_its_first_use():
    captured, ctx = of_blocks(2)
    keys = [key for key in recomputable(captured) if key.endswith("up:addmm:0")]
    assert keys == ["0.up:addmm:0", "1.up:addmm:0"]
    laid = lay_out(captured, decided(ctx, AGAIN).replace(recompute=tuple(keys)), ctx, PASSES)
    saved = [keys_of(laid.forward.graph).get(node) for node in output_nodes(laid.forward.graph)]
    assert not set(keys) & set(saved)
    nodes = list(laid.backward.graph.nodes)
    copies = [node for node in nodes if RECOMPUTED.get(node)]
    assert [RECOMPUTED.of(node) for node in copies] == keys[::-1], "the last layer comes first"
    for node in copies:
        between = nodes[nodes.index(node) + 1 : nodes.index(min(node.users))]
        assert all(RECOMPUTED.is_set(one) for one in between)


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
def test_what_is_saved_besides_is_known_where_the_backward_has_a_node_of_its_name(keeps):
    captured, ctx = of_blocks(3)
    key = "1:add.Tensor:2"
    (node,) = (n for n, own in keys_of(captured.forward.graph).items() if own == key)
    backward = copy_module(captured.backward)
    output_node(backward.graph).all_input_nodes[0]._rename(node.name)  # a gradient has it
    plan = decided(ctx, KEEP if keeps else AGAIN)
    plan = plan.replace(recompute=tuple(recomputable(captured)), also_save=(key,))
    laid = lay_out(dataclasses.replace(captured, backward=backward), plan, ctx, PASSES)
    cut = PartitionBoundary(laid.forward.graph, laid.backward.graph)
    inputs = laid.backward.graph.find_nodes(op="placeholder")
    given = [one for one in inputs if not one.name.startswith("tangents")]
    returned = output_nodes(laid.forward.graph)
    assert key in [keys_of(laid.forward.graph).get(one) for one in cut.saved]
    assert [cut.saved.get(one) for one in returned[-len(given) :]] == given


def test_a_key_of_nothing_saved_is_refused():
    captured, ctx = of_blocks(2)
    plan = decided(ctx, AGAIN).replace(recompute=("0.up:addmm:0", "2.up:addmm:0"))
    with pytest.raises(NothingSaved, match=r"1 tensors .* '2.up:addmm:0'"):
        lay_out(captured, plan, ctx, PASSES)


class SavesProducts(nn.Module):
    """A block in a checkpointed region of the user's own, whose products are to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks(1)

    def forward(self, x: Tensor) -> Tensor:
        def policy(ctx, op, *args, **kwargs):
            saves = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
        return out


class Counts(nn.Module):
    """Reads a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.mm(x[0], torch.outer(self.count, self.count))
        self.count.add_(1)
        return self.linear(torch.relu(hidden @ self.linear.weight).sin())


@pytest.mark.parametrize(
    ("make", "operator", "may"),
    [
        (lambda: blocks(1), "addmm", True),
        (lambda: blocks(1), "attention", True),
        (lambda: blocks(1, dropout=0.5), "random", False),
        (lambda: blocks(1, dropout=0.5), "addmm", True),
        (SavesProducts, "addmm", False),
    ],
    ids=["product", "attention", "random", "product beside random", "the user saves it"],
)
def test_what_is_random_or_the_user_wants_saved_does_not_run_twice(make, operator, may):
    captured, _ = capture_step(make(), torch.randn(4, 12, 16))
    cut = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    assert any(operator in str(node.target) for node in captured.forward.graph.nodes)
    chains = [cut.chain(node) for node in cut.saved]
    running = {str(node.target) for chain in chains if chain for node in chain[0]}
    assert any(operator in target for target in running) == may


def test_an_input_that_the_step_writes_is_not_read_again():
    captured, _ = capture_step(Counts(), torch.randn(4, 12, 16))
    cut = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    chains = {node: cut.chain(node) for node in cut.saved}
    reads = [read.name for chain in chains.values() if chain for read in chain[1]]
    assert any(chain is None and node.op != "placeholder" for node, chain in chains.items())
    assert not any("count" in name for name in reads)


def least_bytes(captured: Captured, ctx: Context) -> int:
    with pytest.raises(Infeasible) as infeasible:
        make_plan(captured, ctx.replace(limit_bytes=1), PASSES)
    return infeasible.value.least_bytes


@pytest.mark.thorough
@pytest.mark.usefixtures("short_search")
def test_the_planner_recomputes_under_a_limit_that_is_too_small_otherwise(monkeypatch):
    captured, ctx = of_layers()
    least = least_bytes(captured, ctx)
    with monkeypatch.context() as patch:
        patch.setattr("passes.pricing.evaluator.PlanEvaluator.sets", [])
        least_without = least_bytes(captured, ctx)
    assert least < 0.8 * least_without
    for limit_bytes in (least, (least + least_without) // 2):
        plan = make_plan(captured, ctx.replace(limit_bytes=limit_bytes), PASSES)
        assert plan.recompute
        assert plan.prediction is not None and plan.prediction.peak_bytes <= limit_bytes
        assert Plan.from_dict(plan.to_dict()) == plan


def test_nothing_is_recomputed_where_the_fastest_plan_fits():
    captured, ctx = of_layers()
    free = make_plan(captured, ctx, PASSES)
    assert free.recompute == () and free.prediction is not None
    limit_bytes = free.prediction.peak_bytes
    assert make_plan(captured, ctx.replace(limit_bytes=limit_bytes), PASSES).recompute == ()


def test_plans_written_before_there_was_recomputation_load():
    _, ctx = of_blocks(2)
    data = decided(ctx, AGAIN).to_dict()
    del data["recompute"], data["also_save"]
    assert Plan.from_dict(data) == decided(ctx, AGAIN)

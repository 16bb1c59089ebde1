"""Chunk sequences: attention in chunks of sequences computes what whole attention does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.candidates.move_groups import MoveGroup, find_move_groups
from passes.capture.captured_step import NotInChunks, lay_out
from passes.graph.captured import Captured
from passes.graph.fx_utils import positions
from passes.graph.metadata import PARAMETER
from passes.move.heads import ATTENTIONS
from passes.pipeline import default_passes
from passes.plan.planner import complete
from passes.types.context import Context
from passes.types.decision import Decision
from tests.chosen import core, more, thorough
from tests.passes import graphs
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.chunk.test_chunk_tokens import check_chunks, lowered, of_tokens
from tests.passes.move import gpu_attention
from tests.passes.move.test_heads import CASES, WIDTH, Attention, OnGpu
from tests.passes.move.test_move_activations import collectives
from tests.passes.move.test_within_hosts import on_hosts

_aten = torch.ops.aten


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def group_of(name: str, captured: Captured, ctx: Context) -> MoveGroup:
    groups = find_move_groups(captured, ctx).groups
    return next(one for one in groups if name in one.dims and not one.decision.keep)


def behind_a_norm(model: nn.Module) -> nn.Module:
    """The model with a weight before it, so that its input has a gradient."""
    return nn.Sequential(nn.RMSNorm(WIDTH), model)


@pytest.mark.parametrize(
    ("case", "sequences", "chunks", "uses_p2p"),
    [
        ("causal", 2, 2, False),
        ("mask", 4, 4, False),
        *thorough(("rotary", 3, 2, True), ("norms", 3, 4, False)),
        *more(*[(case, 3, 2, False) for case in CASES], ("causal", 4, 2, True)),
    ],
)
def test_chunks_of_sequences_compute_what_whole_ones_do(
    case: str, sequences: int, chunks: int, uses_p2p: bool
) -> None:
    """Grouped keys, biases, rotary positions, masks and norms; "causal" is on four ranks."""
    model, world_size = behind_a_norm(CASES[case][0]), CASES[case][1]
    given = [torch.randn(sequences, 5, WIDTH) for _ in range(world_size)]
    captured, ctx = capture_step(model, given[0], world_size=world_size)
    group = group_of("1.q.weight", captured, ctx)
    assert group.has_chunks
    captured, plan, ctx = check_chunks(model, given, group.dims, chunks, uses_p2p=uses_p2p)
    forward, backward = collectives(captured, plan, ctx)
    count = min(chunks, sequences)
    assert forward.count("reduce") == backward.count("reduce") == count
    if case == "causal":  # the others gather positions, masks or tensors of norms too
        assert forward.count("gather") == count and backward.count("gather") == count + 1


def test_within_hosts() -> None:
    model = Attention(keys=2, bias=True)
    given = [torch.randn(3, 5, WIDTH) for _ in range(4)]
    made = Training(model, given, [torch.randn_like(model(one)) for one in given])
    captured, ctx = on_hosts(model, given[0])
    dims = group_of("q.weight", captured, ctx).dims
    plan = decided(ctx, Decision.REPLICATE).replace(ranks_of_a_host=2)
    plan = plan.tensor_parallel(dims, within_hosts=True, chunks=2)
    made.check(captured, [ctx.replace(rank=rank) for rank in range(4)], plan)


@pytest.mark.parametrize("kind", core(gpu_attention.KINDS, "flash"))
def test_the_operators_of_gpus(kind: str) -> None:
    """Their states of random numbers have no sequences."""
    kept = gpu_attention.register()
    model, given = OnGpu(kind), [torch.randn(3, 5, WIDTH) for _ in range(2)]
    captured, ctx = capture_step(model, given[0], world_size=2)
    captured, plan, ctx = check_chunks(model, given, group_of("q.weight", captured, ctx).dims, 2)
    laid = lay_out(captured, plan, ctx, default_passes())
    for gm in (laid.forward, laid.backward):
        found = [one for one in gm.graph.nodes if one.target in ATTENTIONS]
        assert [one.args[0].meta["val"].shape[0] for one in found] == [2 * 2, 2 * 1]
    del kept


class Gate(Attention):
    """Results of attention times a gate of a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, self.o.in_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        out: Tensor = self.o(y * torch.sigmoid(self.gate(x)))
        return out


class Parallel(nn.Module):
    """Attention and an MLP that read the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(keys=2)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x) + self.down(torch.relu(self.up(x)))
        return y


def test_a_gate_beside_attention() -> None:
    given = [torch.randn(3, 5, WIDTH) for _ in range(2)]
    dims = {f"1.{name}.weight": 0 for name in ("q", "k", "v", "gate")}
    check_chunks(behind_a_norm(Gate()), given, {**dims, "1.o.weight": 1}, 2)


@pytest.mark.parametrize("sequences", [*thorough(3), 4])
def test_attention_and_an_mlp_that_read_the_same_tokens(sequences: int) -> None:
    """Of three sequences, the chunks have other tokens than those of an MLP."""
    model = behind_a_norm(Parallel())
    given = [torch.randn(sequences, 5, WIDTH) for _ in range(2)]
    captured, ctx = capture_step(model, given[0], world_size=2)
    dims = group_of("1.up.weight", captured, ctx).dims
    dims = {**dims, **group_of("1.attention.q.weight", captured, ctx).dims}
    captured, plan, ctx = check_chunks(model, given, dims, 2)
    forward, _ = collectives(captured, plan, ctx)
    assert forward == ["gather"] * (2 if sequences == 4 else 4) + ["reduce"] * 4


class Block(nn.Module):
    """A layer as Llama's: norms, grouped keys with rotary positions and a mask, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = Attention(keys=2, turns=True, mask="tokens")
        self.up, self.gate = (nn.Linear(WIDTH, 16, bias=False) for _ in range(2))
        self.down = nn.Linear(16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norms[0](x))
        y = self.norms[1](x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


@pytest.mark.thorough
def test_two_layers_whose_attention_and_mlps_have_chunks() -> None:
    model = nn.Sequential(Block(), Block())
    given = [torch.randn(3, 5, WIDTH) for _ in range(2)]
    captured, ctx = capture_step(model, given[0], world_size=2)
    groups = [group_of(f"0.{name}.weight", captured, ctx) for name in ("attention.q", "up")]
    assert all(group.has_chunks for group in groups)
    dims = {name: dim for group in groups for name, dim in group.dims.items()}
    assert len(dims) == 2 * 7
    captured, plan, ctx = check_chunks(model, given, dims, 2)
    forward, backward = collectives(captured, plan, ctx)
    assert forward.count("reduce") == backward.count("reduce") == 2 * 2 * 2


def test_a_chunk_travels_while_another_one_computes() -> None:
    model = behind_a_norm(Attention())
    slow = graphs.hardware(flops_per_second={"default": 1e8})  # a product takes longer than a send
    captured, ctx = capture_step(model, torch.randn(4, 5, WIDTH), world_size=2, hardware=slow)
    plan = decided(ctx, Decision.REPLICATE)
    plan = plan.tensor_parallel(group_of("1.q.weight", captured, ctx).dims, chunks=4)
    plan = complete(plan, captured, ctx, default_passes())
    for graph in lowered(captured, plan, ctx):
        order = positions(graph)
        products = [node for node in graph.nodes if node.target is _aten.mm.default]
        products = [node for node in products if node.meta["val"].shape[0] == 2 * 5]  # of a chunk
        assert len(products) == 4 * 4
        firsts = [order[node] for node in products[::4]]
        gathers, reduces = of_tokens(graph, True), of_tokens(graph, False)
        waits = [order[next(iter(node.users))] for node in reduces]
        assert len(reduces) == 4
        for index, place in enumerate(firsts[:-1]):
            assert order[gathers[index + 1]] < place
            assert place < order[reduces[index]] < firsts[index + 1] < waits[index]


def test_the_backward_reads_saved_chunks() -> None:
    """No graph has a saved tensor of heads in chunks and whole; one product's gradient joins it."""
    captured, ctx = capture_step(Attention(keys=2), torch.randn(4, 5, WIDTH), world_size=2)
    dims = group_of("q.weight", captured, ctx).dims
    shapes = []
    for chunks in (1, 2):
        plan = decided(ctx, Decision.REPLICATE).tensor_parallel(dims, chunks=chunks)
        laid = lay_out(captured, plan, ctx, default_passes())
        inputs = laid.backward.graph.find_nodes(op="placeholder")
        values = [node.meta["val"] for node in inputs if not PARAMETER.is_set(node)]
        shapes.append(sorted(tuple(one.shape) for one in values if one.dim() == 4))
        cats = [node for node in laid.forward.graph.nodes if node.target is _aten.cat.default]
        assert all(node.meta["val"].dim() == 2 for node in cats)  # of the result only
    whole, parts = shapes
    assert {shape[0] for shape in whole} == {8} and {shape[0] for shape in parts} == {4}
    assert len(parts) == 2 * len(whole)


@pytest.mark.parametrize("batch, reason", [(1, "reads one sequence a rank"), (2, "")])
def test_what_stays_whole_has_a_reason(batch: int, reason: str) -> None:
    captured, ctx = capture_step(Attention(), torch.randn(batch, 5, WIDTH), world_size=2)
    group = group_of("q.weight", captured, ctx)
    assert group.has_chunks == (not reason)
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(group.dims, chunks=2)
    if reason:
        with pytest.raises(NotInChunks, match=reason):
            lay_out(captured, plan, ctx, default_passes())
    else:
        assert lay_out(captured, plan, ctx, default_passes())


class Mixed(Attention):
    """The output projection reads another sequence of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.o(y.flip(0))
        return out


def test_operators_that_mix_sequences_are_no_chunks() -> None:
    captured, ctx = capture_step(Mixed(), torch.randn(4, 5, WIDTH), world_size=2)
    dims = {**dict.fromkeys(("q.weight", "k.weight", "v.weight"), 0), "o.weight": 1}
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(dims, chunks=2)
    without = [one for one in default_passes() if one.name != "move"]
    with pytest.raises(NotInChunks, match="rev has no rule for chunks of sequences"):
        lay_out(captured, plan, ctx, without)


def predicted(model: nn.Module, batch: Tensor, chunks: int, **changes: Any) -> Any:
    captured, ctx = capture_step(model, batch, world_size=2, **changes)
    dims = group_of("q.weight", captured, ctx).dims
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(dims, chunks=chunks)
    return complete(plan, captured, ctx, default_passes()).prediction


def test_the_simulated_step_is_shorter_where_compute_and_tokens_take_as_long() -> None:
    hardware = graphs.hardware(memory_bytes_per_second=1e11)
    batch = torch.randn(8, 64, WIDTH)
    whole, halves = (predicted(Attention(), batch, one, hardware=hardware) for one in (1, 2))
    assert halves.step_seconds < whole.step_seconds

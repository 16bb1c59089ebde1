"""Experts: stacked weights that stay by expert, or by hidden size, compute what whole ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.annotate.training_state import shard_bytes
from passes.candidates.candidate import Stays, rows_of
from passes.candidates.move_groups import find_move_groups
from passes.capture.captured_step import lay_out
from passes.graph.metadata import COLLECTIVE
from passes.pipeline import default_passes
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.chosen import more
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import check_training, collectives
from tests.passes.move.test_within_hosts import check

BY_EXPERT = {"up": 0, "down": 0}
BY_HIDDEN = {"up": 2, "down": 1}


class Experts(nn.Module):
    """Experts with tokens of their own, or with the same ones; x: [experts, tokens, 6].

    ``kind``: ``gated``: a second first weight, and values of each token between the products;
    ``fused``: one weight for both; ``shared``: all experts read the tokens of the first one;
    ``turned``: weights as of linears. ``bias``: of both products.
    """

    def __init__(self, kind: str = "plain", bias: bool = False, experts: int = 4) -> None:
        super().__init__()
        self.kind = kind
        self.mix = nn.Linear(6, 6)
        width = 16 if kind == "fused" else 8
        sizes = (width, 6) if kind == "turned" else (6, width)
        self.up = nn.Parameter(torch.randn(experts, *sizes))
        self.down = nn.Parameter(torch.randn(experts, *((6, 8) if kind == "turned" else (8, 6))))
        if kind == "gated":
            self.gate = nn.Parameter(torch.randn(experts, 6, 8))
        self.first, self.second = (
            nn.Parameter(torch.randn(experts, 1, size)) if bias else None for size in (width, 6)
        )

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.transpose(1, 2) if self.kind == "turned" else weight
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x))
        scores = x[..., :1].sigmoid()
        if self.kind == "shared":
            x = x[:1].expand(x.shape)
        h = self.product(x, self.up, self.first)
        if self.kind == "fused":
            gate, h = h.chunk(2, -1)
            h = F.silu(gate) * h
        elif self.kind == "gated":
            h = h * F.silu(torch.bmm(x, self.gate)) * scores
        else:
            h = F.gelu(h)
        return self.product(h, self.down, self.second) * scores


CASES: dict[str, tuple[Experts, dict[str, int], int]] = {
    "by expert": (Experts(), BY_EXPERT, 4),
    "by expert, biases": (Experts(bias=True), {**BY_EXPERT, "first": 0}, 2),
    "by expert, gated": (Experts("gated"), {**BY_EXPERT, "gate": 0}, 2),
    "by expert, fused": (Experts("fused", bias=True), {**BY_EXPERT, "first": 0}, 2),
    "by expert, shared": (Experts("shared"), BY_EXPERT, 2),
    "by hidden size": (Experts(), BY_HIDDEN, 4),
    "by hidden size, biases": (Experts(bias=True), {**BY_HIDDEN, "first": 2}, 2),
    "by hidden size, gated": (Experts("gated"), {**BY_HIDDEN, "gate": 2}, 2),
    "by hidden size, shared": (Experts("shared"), BY_HIDDEN, 2),
    "by hidden size, turned": (Experts("turned"), {"up": 1, "down": 2}, 2),
}


@pytest.mark.parametrize(
    ("case", "uses_p2p"),
    [
        *((case, place % 2 == 1) for place, case in enumerate(CASES)),
        *more(*((case, place % 2 == 0) for place, case in enumerate(CASES))),
    ],
)
def test_experts_compute_what_they_did(case: str, uses_p2p: bool) -> None:
    model, dims, world_size = CASES[case]
    given = [torch.randn(4, 5, 6) for _ in range(world_size)]
    check_training(model, given, dims, uses_p2p)


def test_within_hosts() -> None:
    for case in ("by expert, gated", "by hidden size, gated"):
        model, dims, _ = CASES[case]
        check(model, [torch.randn(4, 5, 6) for _ in range(4)], dims, uses_p2p=True)


def found_of(model: nn.Module, world_size: int, **changes: Any):
    given = torch.randn(len(model.get_parameter("up")), 5, 6)
    captured, ctx = capture_step(model, given, world_size=world_size, **changes)
    return find_move_groups(captured, ctx), captured, ctx


def test_by_expert_where_the_ranks_divide_them_and_else_by_hidden_size() -> None:
    found, captured, ctx = found_of(Experts("gated"), 4)
    ((group, *_),) = found.by_weights
    assert group.dims == {**BY_EXPERT, "gate": 0}
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(group.dims)
    # The tokens and the scores go, and the results come back. In the backward the gradient goes,
    # and the tokens and the scores again; the gradients of both come back.
    assert collectives(captured, plan, ctx) == (
        ["gather"] * 2 + ["reduce"],
        ["gather"] * 3 + ["reduce"] * 2,
    )
    ((group, *_),) = found_of(Experts("gated", experts=4), 8)[0].by_weights
    assert group.dims == {**BY_HIDDEN, "gate": 2}
    ((group, *_),) = found_of(Experts("turned"), 8)[0].by_weights
    assert group.dims == {"up": 1, "down": 2}


def test_the_state_of_a_rank_is_its_part_along_the_dimension() -> None:
    """Eight ranks have an eighth of each of four experts."""
    _, _, ctx = found_of(Experts(), 8)
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(BY_HIDDEN)
    parts = {one.name: shard_bytes(ctx, plan, one) for one in ctx.parameters}
    assert parts["up"] == parts["down"] == 4 * (4 * 6 * 8) // 8
    rows = rows_of(ctx, [row.decision for row in plan.parameters], stays=_stays(plan))
    saved = {row.name: row.saved_bytes for row in rows}
    assert saved["up"] == 4 * 4 * (4 * 6 * 8) * 7 // 8  # with its gradient and Adam's state


def _stays(plan: Plan) -> list[Stays]:
    rows = enumerate(plan.parameters)
    return [Stays(n, row.name, row.dim) for n, row in rows if row.name in plan.moved]


class Other(nn.Module):
    """Experts in other products; x: [experts, tokens, 6]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.kind = nn.Parameter(torch.randn(4, 6, 6)), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "picked":
            return x @ self.up[x[:, 0, 0].argsort()]
        if self.kind == "left":
            return torch.bmm(self.up, x.transpose(1, 2))
        return torch.bmm(x, self.up).cumsum(1)


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("picked", "index.Tensor has no rule"),
        ("left", "bmm has no rule"),
        ("cumulated", "cumsum has no rule"),
    ],
)
def test_reasons(kind: str, reason: str) -> None:
    found, *_ = found_of(Other(kind), 2)
    assert not found.groups and reason in found.refused["up"]


@pytest.mark.parametrize(
    ("experts", "reason"),
    [(4, "8 ranks are too many for the 4 of up"), (15, "8 ranks do not divide the 15 experts")],
)
def test_an_uneven_number_of_experts_has_a_reason(experts: int, reason: str) -> None:
    found, *_ = found_of(Experts("fused", experts=experts), 8)
    assert not found.groups
    assert reason in found.refused["up"]


@pytest.mark.parametrize("case", ["by expert, gated", "by hidden size, gated"])
def test_steps_in_which_these_weights_travel(case: str) -> None:
    """Ranks whose batches differ gather the weights, which are sharded along these dimensions."""
    model, dims, world_size = CASES[case]
    given = [torch.randn(4, 5, 6) for _ in range(world_size)]
    captured, ctx = capture_step(model, given[0], world_size=world_size)
    plan = decided(ctx, Decision.SHARD_REGATHER).tensor_parallel(dims)
    contexts = [ctx.replace(rank=rank, moves_activations=False) for rank in range(world_size)]
    laid = lay_out(captured, plan, contexts[0], default_passes())
    assert not any(
        COLLECTIVE.of(node).tokens for node in laid.forward.graph.nodes if COLLECTIVE.is_set(node)
    )
    Training(model, given, [torch.randn_like(model(one)) for one in given]).check(
        captured, contexts, plan
    )

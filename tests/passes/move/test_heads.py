"""Heads: attention by heads computes what whole attention does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.candidates.move_groups import find_move_groups
from passes.capture.captured_step import lay_out
from passes.move.heads import ATTENTIONS
from passes.pipeline import default_passes
from tests.chosen import core
from tests.passes.captures import capture_step
from tests.passes.move import gpu_attention
from tests.passes.move.test_move_activations import check_training, collectives

WIDTH, HEADS, SIZE = 12, 4, 6
NAMES = ("q", "k", "v", "o")


class Attention(nn.Module):
    """Projections, attention and a residual; x: [batch, length, 12].

    ``keys``: heads of keys and values. ``mask``: kind of the mask. ``norms``: of queries and keys.
    """

    def __init__(
        self,
        keys: int = HEADS,
        bias: bool = False,
        turns: bool = False,
        mask: str = "causal",
        drop: float = 0.0,
        norms: bool = False,
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(SIZE) for _ in range(2 * norms))
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, heads * SIZE, bias=bias) for heads in (HEADS, keys, keys)
        )
        self.o = nn.Linear(HEADS * SIZE, WIDTH, bias=bias)
        self.turns, self.mask, self.drop = turns, mask, drop

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, SIZE).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        if self.norms:
            q, k = (norm(one) for norm, one in zip(self.norms, (q, k), strict=True))
        if self.turns:
            speeds = x.detach().abs().amax((0, 1))[: SIZE // 2]
            q, k = turned(q, speeds), turned(k, speeds)
        if k.shape[1] < HEADS:
            shape = batch, k.shape[1], HEADS // k.shape[1], length, SIZE
            k, v = (one[:, :, None].expand(shape).reshape(q.shape) for one in (k, v))
        mask = None
        if self.mask == "tokens":  # the first token, and others whose features say so
            seen = (x[:, None, None, :, 0] > 0) | (torch.arange(length) == 0)
            mask = seen & torch.ones(length, length, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.mask == "causal", dropout_p=self.drop
        )
        out: Tensor = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def turned(x: Tensor, speeds: Tensor) -> Tensor:
    """Rotary positions, which every rank has of its own."""
    angles = torch.outer(torch.arange(x.shape[2]), speeds).repeat(1, 2)[None, None]
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


CASES = {
    "causal": (Attention(), 4),
    "biases": (Attention(bias=True), 2),
    "grouped": (Attention(keys=2), 2),
    "rotary": (Attention(keys=2, bias=True, turns=True), 2),
    "mask": (Attention(mask="tokens"), 2),
    "norms": (Attention(keys=2, norms=True), 2),
}


@pytest.mark.parametrize("case", core(CASES, "causal", "grouped", "mask"))
def test_attention_by_heads_computes_what_it_did(case: str) -> None:
    model, world_size = CASES[case]
    given = [torch.randn(3, 5, WIDTH) for _ in range(world_size)]
    uses_p2p = world_size == 2
    captured, ctx = capture_step(model, given[0], world_size=world_size, uses_p2p=uses_p2p)
    found = find_move_groups(captured, ctx)
    ((group, *_),) = found.by_weights
    rows = [f"{name}.{kind}" for name in NAMES[:3] for kind in ("weight", "bias")]
    wanted = dict.fromkeys((name for name in rows if name in dict(model.named_parameters())), 0)
    assert group.dims == {**wanted, "o.weight": 1}
    plan = check_training(model, given, group.dims, uses_p2p)
    if case == "causal":
        assert collectives(captured, plan, ctx)[0] == ["gather", "reduce"]


class OnGpu(Attention):
    """The same by an operator of GPUs; ``kind``: its name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, SIZE).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = gpu_attention.attend(self.kind, q, k, v)
        out: Tensor = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return out


@pytest.mark.parametrize("kind", core(gpu_attention.KINDS, "flash"))
def test_the_operators_of_gpus(kind: str) -> None:
    kept = gpu_attention.register()
    model, given = OnGpu(kind), [torch.randn(3, 5, WIDTH) for _ in range(2)]
    captured, ctx = capture_step(model, given[0], world_size=2)
    ((group, *_),) = find_move_groups(captured, ctx).by_weights
    plan = check_training(model, given, group.dims)
    laid = lay_out(captured, plan, ctx, default_passes())
    for gm in (laid.forward, laid.backward):  # and nothing of the whole attention
        (node,) = (one for one in gm.graph.nodes if one.target in ATTENTIONS)
        shapes = [one.meta["val"].shape for one in node.all_input_nodes]
        assert {shape[:2] for shape in shapes if len(shape) > 2} == {(6, HEADS // 2)}
    del kept


REFUSED = {
    "reads random numbers (dropout)": (Attention(drop=0.5), 2),
    "4 ranks do not divide the 2 heads": (Attention(keys=2), 4),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_refused(reason: str) -> None:
    model, world_size = REFUSED[reason]
    captured, ctx = capture_step(model, torch.randn(3, 5, WIDTH), world_size=world_size)
    found = find_move_groups(captured, ctx)
    assert all(group.alone for group in found.groups)
    assert reason in found.refused["q.weight"]


class Fused(nn.Module):
    """One projection for queries, keys and values; x: [batch, length, 12]."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.o, self.way = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), way

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x)
        if self.way == "chunk":
            q, k, v = parts.chunk(3, -1)
        elif self.way == "slice":
            q, k, v = (parts[..., n * WIDTH : (n + 1) * WIDTH] for n in range(3))
        else:
            q, k, v = parts.unflatten(-1, (3, WIDTH)).unbind(-2)
        q, k, v = (one.unflatten(-1, (2, SIZE)).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    "way, reason",
    [
        ("chunk", "parts of one product, as queries, keys and values of a fused weight"),
        ("slice", "parts of one product, as queries, keys and values of a fused weight"),
        ("unbind", "2 ranks do not divide the 3 heads, or parts"),
    ],
)
def test_a_fused_projection_is_in_no_group_of_attention(way: str, reason: str) -> None:
    captured, ctx = capture_step(Fused(way), torch.randn(2, 5, WIDTH), world_size=2)
    found = find_move_groups(captured, ctx)
    assert all(group.alone for group in found.groups)
    assert reason in found.refused["qkv.weight"]


class ByHand(nn.Module):
    """Attention without an operator of its own; x: [batch, length, 12].

    ``mask``: ``"causal"``, or ``"tokens"``: another one for each sequence. ``bias``: added to the
    scores.
    """

    def __init__(self, mask: str = "causal", heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * SIZE) for _ in range(3))
        self.o = nn.Linear(heads * SIZE, WIDTH)
        self.mask = mask

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, SIZE).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / SIZE**0.5 + bias
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.mask == "tokens":
            seen = seen & (x[:, None, None, :, 0] < 1)
        weights = scores.masked_fill(~seen, -1e9).softmax(-1)
        out: Tensor = x + self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        return out


class ByDistance(nn.Module):
    """Two layers that add a bias for each head and distance, from one table; x: as above.

    ``mask``: of the layers. ``masked``: the layers share the bias with the mask of x in it.
    """

    def __init__(self, mask: str = "causal", masked: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(3, HEADS)
        self.layers = nn.ModuleList(ByHand(mask) for _ in range(2))
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distances = (places - places[:, None]).clamp(-1, 1) + 1
        bias = self.table(distances).permute(2, 0, 1).unsqueeze(0)
        if self.masked:
            bias = bias - 5.0 * (x.detach()[:, None, None, :, 1] > 0)
        for layer in self.layers:
            x = layer(x, bias)
        return x


BY_HAND = {
    "causal": (ByHand(), 4, False),
    "tokens": (ByHand("tokens"), 2, True),
    "distance": (ByDistance(), 4, False),
    "distance, by messages": (ByDistance("tokens"), 2, True),
    "a bias with a mask": (ByDistance(masked=True), 2, False),
}
_DIMS = {
    **{f"{name}.{kind}": 0 for name in NAMES[:3] for kind in ("weight", "bias")},
    "o.weight": 1,
}


@pytest.mark.parametrize("case", core(BY_HAND, "causal", "tokens"))
def test_attention_by_hand_computes_what_it_did(case: str) -> None:
    model, world_size, uses_p2p = BY_HAND[case]
    given = [torch.randn(3, 5, WIDTH) for _ in range(world_size)]
    captured, ctx = capture_step(model, given[0], world_size=world_size, uses_p2p=uses_p2p)
    found = find_move_groups(captured, ctx).by_weights
    (group,) = (one for one, *_ in found if "table.weight" not in one.dims)
    layers = ["layers.0.", "layers.1."] if isinstance(model, ByDistance) else [""]
    assert group.dims == {layer + name: dim for layer in layers for name, dim in _DIMS.items()}
    assert not group.has_chunks
    check_training(model, given, group.dims, uses_p2p)


def test_one_layer_of_two_with_a_common_bias() -> None:
    """The gradient of the bias is the sum of one by heads, and one of the own tokens."""
    given = [torch.randn(3, 5, WIDTH) for _ in range(2)]
    check_training(ByDistance(), given, {f"layers.1.{name}": dim for name, dim in _DIMS.items()})


def test_heads_by_hand_need_to_be_divided() -> None:
    captured, ctx = capture_step(ByHand(heads=2), torch.randn(2, 5, WIDTH), world_size=4)
    found = find_move_groups(captured, ctx)
    assert all(group.alone for group in found.groups)
    assert "4 ranks do not divide the 2 heads" in found.refused["q.weight"]

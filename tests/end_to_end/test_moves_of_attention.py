"""Activations that move to attention by heads, and to all groups of a language model."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import osdp_compile
from osdp_compile import Plan
from tests.chosen import more, thorough
from tests.end_to_end.moving import WithLoss, its_loss, recipe_of, train_by_name
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    plan_in_force,
    train_osdp,
)


class Attention(nn.Module):
    """A norm, and attention of 4 heads, keys and values for ``keys`` of them; x: [rows, 5, 8].

    ``masks``: tokens that are not seen, beside those to come.
    """

    def __init__(self, keys: int, bias: bool, masks: bool) -> None:
        super().__init__()
        self.masks = masks
        self.norm = nn.LayerNorm(8)
        self.q = nn.Linear(8, 24, bias=bias)
        self.k, self.v = (nn.Linear(8, 6 * keys, bias=bias) for _ in range(2))
        self.o = nn.Linear(24, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            one(y).unflatten(-1, (-1, 6)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mask = None
        if self.masks:
            seen = (x[:, None, None, :, 0] > 0) | (torch.arange(5) == 0)
            mask = seen & torch.ones(5, 5, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


def _sequences(step, micro, rank):
    """In step 4 the ranks have other batches."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    rows = 3 + (rank if step == 4 else 0)
    return torch.randn(rows, 5, 8, generator=generator, dtype=torch.float64)


def _attention(rank, world_size, keys, bias):
    """Distance from one process; the weights that stay; the placement of the last product's."""
    torch.manual_seed(0)
    model = Attention(keys, bias, masks=bias).double()
    recipe = recipe_of(_sequences, backwards=2)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": ["q.weight"], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = ours.distance(wanted)
    norms = max(abs(a / b - 1) for a, b in zip(ours.norms, wanted.norms, strict=True))
    return apart, norms, plan_in_force(model).moved, str(model.o.weight.placements)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(
    "ranks, keys, bias",
    [("two_ranks", 2, True), *more(("four_ranks", 4, False))],
)
def test_attention_by_heads_trains_like_one_process(request, ranks, keys, bias):
    found = request.getfixturevalue(ranks).run(_attention, keys, bias)
    for apart, norm, moved, placed in found:
        assert apart < 1e-11 and norm < 1e-9
        weights = {f"{name}.weight" for name in "qkvo"}
        assert moved == (weights | {f"{name}.bias" for name in "qkv"} if bias else weights)
        assert placed == "(Shard(dim=1),)"


class Fused(nn.Module):
    """A norm, and attention of 4 heads with one projection for all three; x: [rows, 5, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(8), nn.Linear(8, 72), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (-1, 6)).transpose(1, 2)
            for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def _fused(rank, world_size, chunks):
    """Distance from one process in float64, of norms too; the placement of the projection."""
    torch.manual_seed(0)
    model = Fused().double()
    recipe = recipe_of(_sequences, backwards=2)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    plan = plan.tensor_parallel({"qkv.weight": 0}, chunks=chunks, keep_tokens=True, alone=True)
    plan = plan.tensor_parallel({"o.weight": 1}, chunks=chunks, alone=True)
    options = {"hardware": SLOW, "plan": plan, "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    norms = max(abs(a / b - 1) for a, b in zip(ours.norms, wanted.norms, strict=True))
    return ours.distance(wanted), norms, str(model.qkv.weight.placements)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks, chunks", [("two_ranks", 2), *more(("four_ranks", 1))])
def test_a_fused_projection_alone_trains_like_one_process(request, ranks, chunks):
    """In step 4 the ranks have other batches, so the weights travel."""
    for apart, norm, placed in request.getfixturevalue(ranks).run(_fused, chunks):
        assert apart < 1e-11 and norm < 1e-9
        assert placed == "(Shard(dim=0),)"


def _of_attention(model, world_size, chunks):
    rows = [f"{name}.{kind}" for name in "qkv" for kind in ("weight", "bias")]
    own = dict(model.named_parameters())
    dims = {**dict.fromkeys((name for name in rows if name in own), 0), "o.weight": 1}
    plan = Plan.uniform(own.items(), "shard_regather", world_size=world_size)
    return plan.tensor_parallel(dims, chunks=chunks)


def _in_chunks(rank, world_size, differ):
    """Distance from one process; the numbers of sums of tokens in both directions."""
    torch.manual_seed(0)
    model = Attention(2, True, masks=True).double()
    recipe = recipe_of(_sequences)
    if not differ:
        recipe = dataclasses.replace(recipe, steps=3)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "plan": _of_attention(model, world_size, 2), "debug": True}
    apart = train_osdp(model, options, recipe, rank).distance(reference.train(rank))
    order = plan_in_force(model).order
    tokens = [[one for one in order[name] if one.tokens] for name in ("forward", "backward")]
    return apart, [sum(not one.gathers for one in own) for own in tokens]


@pytest.mark.ranks
@pytest.mark.parametrize("differ", [False, *thorough(True)])
def test_attention_in_chunks_of_sequences_trains_like_one_process(two_ranks, differ):
    """Of three sequences. In step 4 the ranks have other numbers of them, and weights travel."""
    for apart, reduces in two_ranks.run(_in_chunks, differ):
        assert apart < 1e-11
        assert reduces == [2, 2]


class Wide(nn.Module):
    """A linear, and attention of 8 heads; x: [rows, 64, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.q, self.k, self.v = (nn.Linear(128, 512, bias=False) for _ in range(3))
        self.o = nn.Linear(512, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        q, k, v = (
            one(x).unflatten(-1, (8, 64)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def _peak(rank, world_size, chunks):
    """Bytes of some steps, measured and predicted."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = torch.randn(8, 64, 128)
    with osdp_compile.PeakMemory() as memory:
        model = Wide()
        plan = _of_attention(model, world_size, chunks)
        optimizer = torch.optim.AdamW(model.parameters())
        options = {"hardware": SLOW, "plan": plan}
        compiled = torch.compile(model, backend="osdp", options=options)
        for _ in range(3):
            compiled(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        predicted = osdp_compile.plan_of(model).prediction.peak_bytes
    return memory.peak_bytes, predicted


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize("chunks", [1, 4, *more(2)])
def test_the_measured_peak_of_chunks_is_the_predicted_one(two_ranks, chunks):
    for measured, predicted in two_ranks.run(_peak, chunks):
        assert 0.85 * predicted <= measured <= 1.02 * predicted, (measured, predicted)


def _ids(step, micro, number):
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(0, 64, (2, 12), generator=generator)


def _of_hugging_face(rank, world_size, kind):
    """Distance from one process in float32; the modules whose weights move."""
    torch.manual_seed(0)
    model = WithLoss(kind, tie_word_embeddings=kind == "Qwen3")
    own = [name for name, _ in model.named_parameters()]
    named = ["*embed_tokens*", "*q_proj*", "*up_proj*"] + ["*lm_head*"] * (kind == "Llama")
    apart, plan = train_by_name(model, named, _ids, rank, world_size)
    return apart, {name.rsplit(".", 2)[-2] for name in own if name not in plan.moved}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Qwen3", *more("Llama")])
def test_a_model_of_hugging_face_moves_in_all_its_groups(two_ranks, kind):
    pytest.importorskip("transformers")
    for apart, rest in two_ranks.run(_of_hugging_face, kind):
        assert apart < 1e-5
        assert rest - {"q_norm", "k_norm"} == {
            "input_layernorm",
            "post_attention_layernorm",
            "norm",
        }


def _of_hugging_face_in_chunks(rank, world_size, kind):
    """Distance from one process in float32; the numbers of sums of tokens in both directions."""
    torch.manual_seed(0)
    model = WithLoss(kind, layers=2, tie_word_embeddings=kind == "Qwen3")
    recipe = Recipe(step=its_loss, optimizer=adamw, steps=5, batch=_ids, max_norm=1.0)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    own = dict(model.named_parameters())
    rows = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    rows |= {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
    kinds = {name: name.split(".")[-2] for name in own if "layers" in name}
    dims = {name: rows[kind] for name, kind in kinds.items() if kind in rows}
    plan = Plan.uniform(own.items(), "shard_regather", world_size=world_size)
    options = {"hardware": SLOW, "plan": plan.tensor_parallel(dims, chunks=2), "debug": True}
    apart = train_osdp(model, options, recipe, rank).distance(reference.train(rank))
    order = plan_in_force(model).order
    tokens = [[one for one in order[name] if one.tokens] for name in ("forward", "backward")]
    return apart, [sum(not one.gathers for one in own) for own in tokens], len(dims) // len(rows)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Llama", *more("Qwen3")])
def test_a_model_of_hugging_face_whose_layers_have_chunks(two_ranks, kind):
    """Qwen3 has norms of queries and keys."""
    pytest.importorskip("transformers")
    for apart, reduces, layers in two_ranks.run(_of_hugging_face_in_chunks, kind):
        assert apart < 1e-5
        assert reduces == [2 * 2 * layers] * 2


class Gpt2(nn.Module):
    """A small GPT-2 of Hugging Face, which returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        dropped = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = transformers.GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_layer=1,
            n_head=4,
            n_positions=16,
            use_cache=False,
            **dropped,
        )
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.clamp(max=60)  # words that the ranks do not divide, as those of GPT-2
        logits = self.model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _gpt_2(rank, world_size):
    """Distance from one process in float32; what stays; the rows of the fused projection."""
    torch.manual_seed(0)
    model = Gpt2()
    named = ["*wte*", "*c_fc.weight", "*c_attn.weight"]
    apart, plan = train_by_name(model, named, _ids, rank, world_size)
    fused = [
        (row.alone, row.reason) for row in plan.parameters if row.name.endswith("c_attn.weight")
    ]
    return apart, {name.split(".")[-2] for name in plan.moved}, fused


@pytest.mark.thorough
def test_gpt_2_of_hugging_face_moves_with_its_fused_attention_alone(two_ranks):
    pytest.importorskip("transformers")
    for apart, moved, fused in two_ranks.run(_gpt_2):
        assert apart < 1e-5 and len(fused) == 1
        assert all(alone and "of a fused weight" in reason for alone, reason in fused)
        assert moved == {"wte", "c_fc", "c_proj", "c_attn"}

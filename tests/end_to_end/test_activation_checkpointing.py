"""Activation checkpointing: trains like one process, and gathers no weight more often for it."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import osdp_compile
from osdp_compile import Plan
from osdp_compile.trace import trace_graphs
from tests.chosen import more
from tests.training import SLOW, Recipe, adamw, trains_like_reference


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Attention(nn.Module):
    """No dropout: the operator is one that may drop at random, and does not."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    """A linear, then two blocks, each behind :meth:`call`."""

    def __init__(self, kind=Block):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([kind(), kind()])

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False)

    def forward(self, x):
        x = self.first(x)
        x = self.call(self.blocks[0], x)
        return self.call(self.blocks[1], x)


class Reentrant(Model):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class Nested(Model):
    """A block in a region in a region."""

    def call(self, block, x):
        return checkpoint(super().call, block, x, use_reentrant=False)


class OfSequences(Model):
    def __init__(self):
        super().__init__(Attention)

    def forward(self, x):
        return super().forward(x[:, None, :] * torch.arange(1.0, 4.0)[:, None])


def products_are_saved(ctx, operator, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Model):
    def call(self, block, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, products_are_saved)
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class BrokenInside(Model):
    """Dynamo leaves the regions to eager mode, which computes them again in the backward."""

    use_reentrant = False

    def broken(self, block, x):
        inside = torch.relu(block.up(x))
        torch._dynamo.graph_break()
        return x + block.down(inside)

    def call(self, block, x):
        return checkpoint(self.broken, block, x, use_reentrant=self.use_reentrant)


class ReentrantBrokenInside(BrokenInside):
    use_reentrant = True


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Model, None),
        (Reentrant, "shard_keep"),
        (Nested, "replicate"),
        (OfSequences, "shard_keep"),
        (Selective, "shard_regather"),
        (BrokenInside, "replicate"),
        (ReentrantBrokenInside, "shard_regather"),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_trains_like_one_process(two_ranks, make, plan):
    outcome = trains_like_reference(two_ranks, make, plan)
    if isinstance(plan, str):
        assert set(outcome.decisions.values()) == {plan}


def shard_now(model):
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
    osdp_compile.shard(model, plan)


@pytest.mark.thorough
def test_a_model_that_was_sharded_before(two_ranks):
    trains_like_reference(two_ranks, OfSequences, "shard_regather", prepare=shard_now)


def words(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 61, (2, 12), generator=generator)


def next_word(model, batch):
    """The loss, with random numbers as eager mode draws them, seeded by the batch."""
    torch.manual_seed(int(batch.sum()))
    with torch._inductor.config.patch(fallback_random=True):
        return model(input_ids=batch, labels=batch).loss


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,  # with it transformers warns, and Dynamo breaks the graph there
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    return model


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.loss_type = "ForCausalLM"  # without it transformers warns, and the graph breaks there
    assert model.config.attn_pdrop > 0 and model.training
    return model


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize(("make", "plan"), [(llama, "shard_regather"), *more((gpt2, "shard_keep"))])
def test_hugging_faces_models_train_like_one_process(two_ranks, make, plan):
    pytest.importorskip("transformers")
    recipe = Recipe(step=next_word, batch=words, optimizer=adamw)
    trains_like_reference(two_ranks, make, plan, recipe)


class Plain(Model):
    def call(self, block, x):
        return block(x)


def gathers_and_products(make, plan):
    """By graph: how often each parameter is gathered; and how many products there are."""
    texts = trace_graphs(
        make(), (torch.ones(4, 8),), world_size=2, plan=plan, options={"hardware": SLOW}
    )
    graphs = [texts[f"{phase}/shard"] for phase in ("forward", "backward")]
    gathered = [re.findall(r"# gather (\S+)", graph) for graph in graphs]
    return gathered, [len(re.findall(r"= (?:mm|addmm)\(", graph)) for graph in graphs]


@pytest.mark.parametrize("plan", ["shard_regather", "shard_keep"])
def test_the_backward_computes_again_what_is_checkpointed_and_gathers_each_weight_once(plan):
    checkpointed, products = gathers_and_products(Model, plan)
    _, plain_products = gathers_and_products(Plain, plan)
    # Of each block the first product runs again; what its end needs is not the second's result.
    assert products == [plain_products[0], plain_products[1] + 2]
    for gathered in checkpointed:
        assert len(gathered) == len(set(gathered)), "a weight is gathered twice in one graph"
    backward = set(checkpointed[1])
    if plan == "shard_keep":
        assert not backward
        return
    # Two products for gradients and one that runs again read these; the last biases none.
    assert backward == {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("up.weight", "up.bias", "down.weight")
    }

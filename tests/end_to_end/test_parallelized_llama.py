"""Hugging Face's Llama with torchtitan's tensor parallelism, and osdp over ``mesh["dp"]``."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from osdp_compile import Plan
from tests.chosen import more
from tests.end_to_end.test_parallelized import (
    adamw,
    distance,
    local_parameters,
    two_by_two,
    whole,
)
from tests.training import SLOW

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 64, 12


class Language(nn.Module):
    """Llama and its loss.

    Positions and the causal mask are given. The model would derive them from the output of its
    embedding, which is a part of the sequence.
    """

    def __init__(self, layers):
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens):
        batch, places = tokens[:, :-1], torch.arange(LENGTH)
        later = places[None, :] > places[:, None]
        mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(later, -torch.inf)
        logits = self.llama(
            input_ids=batch, position_ids=places[None], attention_mask=mask[None, None]
        ).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def made(layers=1):
    torch.manual_seed(0)
    return Language(layers).double()


def torchtitans_plan(model, mesh, parallel_loss=False):
    parallelize_module(
        model.llama,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if parallel_loss else Replicate(),
                use_local_output=not parallel_loss,
            ),
        },
    )
    kwargs = {
        "input_kwarg_layouts": {"hidden_states": Shard(1)},
        "desired_input_kwarg_layouts": {"hidden_states": Replicate()},
    }
    whole_input = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    ways = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**kwargs),
        **{f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(**whole_input),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.llama.model.layers:
        parallelize_module(layer, mesh, ways)


def tokens(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)


def step_of(losses, model, optimizer):
    (sum(losses) / len(losses)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return whole(norm).item()


def train(rank, world_size, kind, parallel_loss):
    """``parallel_loss``: each rank of ``tp`` computes the loss of its part of the vocabulary."""
    mesh = two_by_two()
    model, reference = made(), made()
    torchtitans_plan(model, mesh["tp"], parallel_loss)
    plan = Plan.uniform(local_parameters(model), kind, world_size=2)
    options = {"mesh": mesh["dp"], "hardware": SLOW, "plan": plan}
    compiled = torch.compile(model, backend="osdp", options=options, fullgraph=True)
    optimizers = adamw(model), adamw(reference)
    place, apart = mesh["dp"].get_local_rank(), 0.0
    for step in range(3):
        with loss_parallel() if parallel_loss else contextlib.nullcontext():
            loss = compiled(tokens(step, place))
            ours = step_of([loss], model, optimizers[0])
        losses = [reference(tokens(step, other)) for other in range(2)]
        apart = max(apart, abs((whole(loss) - losses[place]).item()))
        apart = max(apart, abs(ours - step_of(losses, reference, optimizers[1])))
    return max(apart, distance(model, reference))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "parallel_loss"), [("shard_keep", True), *more(("shard_regather", False))]
)
def test_trains_like_one_process(four_ranks, kind, parallel_loss):
    assert max(four_ranks.run(train, kind, parallel_loss)) < 1e-11

"""Hugging Face's models, small ones with random weights, train like one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.chosen import others
from tests.training import Recipe, adamw, trains_like_reference

transformers = pytest.importorskip("transformers")

WORDS, LENGTH = 61, 12
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}

#: By model: its configuration's class and arguments, and its own class.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT-2": (
        "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32},
        "GPT2LMHeadModel",
    ),
    "Llama": ("LlamaConfig", {**SMALL, **HEADS}, "LlamaForCausalLM"),
    "Qwen3": ("Qwen3Config", {**SMALL, **HEADS, "head_dim": 8}, "Qwen3ForCausalLM"),
    "BERT": (
        "BertConfig",
        {**SMALL, "num_attention_heads": 4, "max_position_embeddings": 32},
        "BertForMaskedLM",
    ),
    "T5": (
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        "T5ForConditionalGeneration",
    ),
    "ViT": (
        "ViTConfig",
        {
            **{k: v for k, v in SMALL.items() if k != "vocab_size"},
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
        },
        "ViTForImageClassification",
    ),
    "Mixtral": (
        "MixtralConfig",
        {**SMALL, **HEADS, "num_local_experts": 3, "num_experts_per_tok": 2},
        "MixtralForCausalLM",
    ),
}
_NO_DROPOUT = ("dropout", "dropout_rate", "attn_pdrop", "embd_pdrop", "resid_pdrop")


def made(name: str):
    """A model that computes the same each time: without dropout."""
    config_class, arguments, model_class = MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    for option in (*_NO_DROPOUT, "hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, option):
            setattr(config, option, 0.0)
    config.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, model_class)(config).train()


def batch_for(name: str, step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "ViT":
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([step % 5, rank])}
    tokens = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def own_loss(model, batch):
    return model(**batch).loss


#: Each takes as long to compile as all other things do.
_ALWAYS = ("T5",)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*_ALWAYS, *others(MODELS, _ALWAYS)])
def test_trains_like_one_process(two_ranks, name):
    recipe = Recipe(
        step=own_loss, batch=functools.partial(batch_for, name), optimizer=adamw, steps=5
    )
    trains_like_reference(two_ranks, functools.partial(made, name), "shard_regather", recipe)

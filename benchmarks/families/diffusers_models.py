"""Families of diffusers, tiny, with random weights: they learn to give back their input.

Every 50th of the 131 models, autoencoders and U-Nets of diffusers 0.42, in alphabetical order. The
third of them takes protein structures and gives way to the next transformer. Then those that most
people train.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.families.trial import Family, Trial, seeded, without_dropout

_LATENT = (2, 4, 16, 16)
_TEXT: dict[str, tuple[int, ...]] = {"encoder_hidden_states": (2, 6, 32)}

#: Class, arguments of its constructor, shape of its sample, name of the sample, shapes of what else
#: it is called with.
MODELS: list[tuple[str, dict[str, Any], tuple[int, ...], str, dict[str, tuple[int, ...]]]] = [
    (
        "AceStepTransformer1DModel",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "in_channels": 24,
            "audio_acoustic_hidden_dim": 8,
            "encoder_hidden_size": 32,
            "sliding_window": 8,
        },
        (2, 16, 8),
        "hidden_states",
        {"timestep_r": (2,), "encoder_hidden_states": (2, 6, 32), "context_latents": (2, 16, 16)},
    ),
    (
        "DreamLiteUNetModel",
        {
            "block_out_channels": (32, 64, 64),
            "layers_per_block": 1,
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
            "sample_size": 16,
        },
        _LATENT,
        "sample",
        _TEXT,
    ),
    (
        "SD3Transformer2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 64,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        _LATENT,
        "hidden_states",
        {**_TEXT, "pooled_projections": (2, 32)},
    ),
    (
        "UNet2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "layers_per_block": 1,
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        _LATENT,
        "sample",
        {},
    ),
    (
        "UNet2DConditionModel",
        {
            "sample_size": 16,
            "layers_per_block": 1,
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        _LATENT,
        "sample",
        _TEXT,
    ),
    (
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "num_layers": 2,
            "sample_size": 16,
            "num_embeds_ada_norm": 10,
        },
        _LATENT,
        "hidden_states",
        {},
    ),
    (
        "AutoencoderKL",
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "sample_size": 16,
            "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
            "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        },
        (2, 3, 16, 16),
        "sample",
        {},
    ),
]


def _trial(
    name: str,
    arguments: dict[str, Any],
    shape: tuple[int, ...],
    sample: str,
    others: dict[str, tuple[int, ...]],
) -> Trial:
    import diffusers

    model = getattr(diffusers.models, name)(**arguments)

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        generator = seeded(step, rank)
        made = {sample: torch.randn(shape, generator=generator)}
        for other, other_shape in others.items():
            made[other] = torch.rand(other_shape, generator=generator)
        if name != "AutoencoderKL":
            steps = torch.randint(0, 1000, shape[:1], generator=generator)
            made["timestep"] = steps.float() / 1000 if "timestep_r" in others else steps
        if name == "DiTTransformer2DModel":
            made["class_labels"] = torch.randint(0, 10, shape[:1], generator=generator)
        return made

    def loss(called: Callable[..., Any], given: dict[str, Tensor]) -> Tensor:
        out = called(**given).sample
        return F.mse_loss(out[:, : shape[1]], given[sample])

    # AdaLN of DiT drops labels at random, which eager and compiled code draw apart.
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return Trial(without_dropout(model.train()), batch, loss)


FAMILIES = [Family(row[0], "diffusers", functools.partial(_trial, *row)) for row in MODELS]

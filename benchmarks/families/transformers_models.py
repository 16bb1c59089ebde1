"""Families of transformers: tiny configurations with random weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.trial import Family, Trial, seeded, without_dropout, words

VOCABULARY, CLASSES = 512, 5

#: Values of whatever a configuration calls so.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "use_cache": False,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 1,
    "num_heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
    "decoder_start_token_id": 0,
    "embedding_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 32,
    "sliding_window": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 4,
    "mamba_n_groups": 1,
    "num_labels": CLASSES,
    "attention_window": 4,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "drop_path_rate": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}

#: What a model type needs beside or instead of these.
SPECIAL: dict[str, dict[str, Any]] = {
    **{
        name: {"head_dim": 8, "num_key_value_heads": 4}
        for name in ("deepseek_v2", "deepseek_v3", "youtu")
    },
    **{
        name: {"num_hidden_layers": 2}  # layers of two kinds
        for name in ("afmoe", "gemma3_text", "llama4_text", "olmo_hybrid", "qwen3_5_moe_text")
    },
    "gemma4_text": {
        "num_hidden_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "inkling2_loop_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 32,
        "num_hidden_layers": 3,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "n_layers_per_attn_res_block": 1,
        "sliding_window_size": 8,
        "unpadded_vocab_size": VOCABULARY,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 48),
        "axial_pos_shape": (4, 4),
        "hash_seed": 1,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "feed_forward_size": 128,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "is_decoder": False,
    },
    "t5": {"decoder_start_token_id": 0, "num_decoder_layers": 1},
    "distilbert": {"n_layers": 1, "dim": 64, "hidden_dim": 128},
    "perceiver": {
        "num_latents": 16,
        "d_latents": 32,
        "d_model": 64,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "qk_channels": 32,
        "v_channels": 32,
    },
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2},
    "convnext": {
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "num_stages": 2,
        "num_layers": 2,
        "num_hidden_layers": 2,
        "patch_size": 4,
    },
    "segformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "hidden_sizes": [16, 32],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32,
    },
    "rt_detr_v2": {
        "encoder_hidden_dim": 32,
        "decoder_in_channels": [32, 32, 32],
        "d_model": 32,
        "encoder_in_channels": [32, 64, 128],
        "num_queries": 10,
        "decoder_layers": 2,
        "decoder_ffn_dim": 64,
        "encoder_ffn_dim": 64,
        "num_denoising": 0,
    },
    "conditional_detr": {"num_queries": 8},
    "detr": {"num_queries": 8},
    "whisper": {"num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "mobilevitv2": {"image_size": 256, "width_multiplier": 0.5},
}

#: A ResNet that detectors see with.
_BACKBONE: dict[str, Any] = {
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}

Batch = Callable[[int, int], dict[str, Any]]


def tiny_config(model_type: str, **given: Any) -> Any:
    """A small configuration: :data:`SMALL` where its class has the name, then the special ones."""
    from transformers import CONFIG_MAPPING

    given = {**SPECIAL.get(model_type, {}), **given}
    if model_type in ("detr", "conditional_detr"):
        resnet: Any = CONFIG_MAPPING["resnet"]
        stages = ["stage1", "stage2", "stage3", "stage4"]
        given["backbone_config"] = resnet(**_BACKBONE, out_features=stages)
    if model_type == "rt_detr_v2":
        given["backbone_config"] = {**_BACKBONE, "out_features": ["stage2", "stage3", "stage4"]}
    return _made(CONFIG_MAPPING[model_type], given)


def _made(config_class: Any, given: Mapping[str, Any]) -> Any:
    default = config_class()
    values = {name: value for name, value in SMALL.items() if _takes(default, name)}
    for name, kind in (getattr(config_class, "sub_configs", None) or {}).items():
        inner = getattr(default, name, None)
        more = given.get(name, {})
        if inner is not None and not isinstance(inner, dict) and isinstance(more, dict):
            kind = type(inner) if inspect.isclass(type(inner)) else kind
            own = {**SPECIAL.get(getattr(inner, "model_type", ""), {}), **more}
            values[name] = _made(kind, own).to_dict()
    values.update({k: v for k, v in given.items() if not isinstance(v, dict) or k not in values})
    config = config_class(**values)
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        if name == "ctc_zero_infinity":  # sounds are short: labels may not fit, in DDP as well
            config.ctc_zero_infinity = True
    return config


def _takes(config: Any, name: str) -> bool:
    """Whether a configuration has the name, and not with one value for each stage."""
    try:
        return not isinstance(getattr(config, name), list | tuple)
    except AttributeError:
        return False
    except Exception:  # transformers' error for a value that differs between layers
        return True


def _text(rows: int = 2, length: int = 16) -> Batch:
    return words(VOCABULARY, rows, length)


def _images(size: int = 32) -> Batch:
    def batch(step: int, rank: int) -> dict[str, Tensor]:
        generator = seeded(step, rank)
        images = torch.randn(2, 3, size, size, generator=generator)
        return {
            "pixel_values": images,
            "labels": torch.randint(0, CLASSES, (2,), generator=generator),
        }

    return batch


def _segments(size: int = 32) -> Batch:
    def batch(step: int, rank: int) -> dict[str, Tensor]:
        generator = seeded(step, rank)
        images = torch.randn(2, 3, size, size, generator=generator)
        labels = torch.randint(0, CLASSES, (2, size, size), generator=generator)
        return {"pixel_values": images, "labels": labels}

    return batch


def _boxes(size: int = 64) -> Batch:
    def batch(step: int, rank: int) -> dict[str, Any]:
        generator = seeded(step, rank)
        labels = [
            {
                "class_labels": torch.randint(0, CLASSES, (2,), generator=generator),
                "boxes": 0.25 + 0.25 * torch.rand(2, 4, generator=generator),
            }
            for _ in range(2)
        ]
        images = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": labels}

    return batch


def _speech(step: int, rank: int) -> dict[str, Tensor]:
    generator = seeded(step, rank)
    labels = torch.randint(3, 20, (2, 4), generator=generator)
    return {"input_values": torch.randn(2, 1600, generator=generator), "labels": labels}


def _spectrograms(
    bins: int, frames: int, name: str = "input_features", last: bool = False
) -> Batch:
    def batch(step: int, rank: int) -> dict[str, Tensor]:
        generator = seeded(step, rank)
        shape = (2, frames, bins) if last else (2, bins, frames)
        labels = torch.randint(3, 20, (2, 4), generator=generator)
        mask = {"attention_mask": torch.ones(2, frames, dtype=torch.long)} if last else {}
        return {name: torch.randn(shape, generator=generator), "labels": labels, **mask}

    return batch


def _pairs(extra: Mapping[str, Any]) -> Batch:
    """Images with texts."""

    def batch(step: int, rank: int) -> dict[str, Any]:
        generator = seeded(step, rank)
        tokens = torch.randint(3, VOCABULARY, (2, 8), generator=generator)
        images = torch.randn(2, 3, 32, 32, generator=generator)
        more = extra or {"labels": tokens}
        return {"input_ids": tokens, "pixel_values": images, **more}

    return batch


def _own_loss(called: Any, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = called(**batch).loss
    return loss


def build(
    model_type: str, class_name: str, prepare: Callable[[Any], None] | None = None
) -> nn.Module:
    """A tiny model for training, without random numbers in its forward."""
    import transformers

    model = getattr(transformers, class_name)(tiny_config(model_type))
    if prepare is not None:
        prepare(model)
    return without_dropout(model.train())


def _trial(model_type: str, class_name: str, batch: Batch, prepare: Any = None) -> Trial:
    model = build(model_type, class_name, prepare)
    return Trial(model, batch, _own_loss, static=model_type in _BACKWARDS_OF_THEIR_OWN)


#: Their reversible layers call backward inside a backward, which DDP allows in a static graph only.
_BACKWARDS_OF_THEIR_OWN = ("reformer",)


def _checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable()


def _family(
    name: str, model_type: str, class_name: str, batch: Batch, prepare: Any = None
) -> Family:
    make = functools.partial(_trial, model_type, class_name, batch, prepare)
    return Family(name, "transformers", make)


#: Every 16th of the 196 causal language models of transformers 5.24, in alphabetical order.
CAUSAL = {
    "afmoe": "AfmoeForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM",
    "inkling2_loop_text": "Inkling2LoopForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "sarvam_moe": "Glm4MoeForCausalLM",
    "youtu": "YoutuForCausalLM",
}
#: Named ones, which were tried on earlier code or which many people train.
CAUSAL_NAMED = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
#: Every 9th of the 51 masked language models.
MASKED = {
    "albert": "AlbertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "gte": "GteForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "reformer": "ReformerForMaskedLM",
    "ultravbert": "UltraVBertForMaskedLM",
}
MASKED_NAMED = {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "longformer": "LongformerForMaskedLM",
}
#: Every 7th of the 21 sequence-to-sequence models that read text alone, and T5.
SEQUENCE = {
    "bart": "BartForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "pegasus_x": "PegasusXForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
}
#: Every 8th of the 42 image classifiers; DiNAT, which needs natten, gives way to the next one,
#: which is DINOv2.
IMAGES = {
    "beit": "BeitForImageClassification",
    "ijepa": "IJepaForImageClassification",
    "perceiver": "PerceiverForImageClassificationLearned",
    "vit": "ViTForImageClassification",
}
IMAGES_NAMED = {
    "dinov2": "Dinov2ForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
}
#: Every 8th of the 19 object detectors, and DETR.
DETECTION = {
    "conditional_detr": "ConditionalDetrForObjectDetection",
    "detr": "DetrForObjectDetection",
    "rt_detr_v2": "RTDetrV2ForObjectDetection",
}
#: Every 5th of the 10 semantic segmenters, and SegFormer.
SEGMENTATION = [
    ("beit", "BeitForSemanticSegmentation", 32),
    ("mobilevitv2", "MobileViTV2ForSemanticSegmentation", 256),
    ("segformer", "SegformerForSemanticSegmentation", 32),
]

FAMILIES: list[Family] = [
    *(
        _family(t, t, c, _text())
        for t, c in {**CAUSAL, **CAUSAL_NAMED, **MASKED, **MASKED_NAMED}.items()
    ),
    *(_family(t, t, c, _text()) for t, c in SEQUENCE.items()),
    *(_family(t, t, c, _images()) for t, c in {**IMAGES, **IMAGES_NAMED}.items()),
    *(_family(t, t, c, _boxes()) for t, c in DETECTION.items()),
    *(_family(f"{t} (segmentation)", t, c, _segments(s)) for t, c, s in SEGMENTATION),
    _family("data2vec-audio", "data2vec-audio", "Data2VecAudioForCTC", _speech),
    _family("parakeet_ctc", "parakeet_ctc", "ParakeetForCTC", _spectrograms(80, 64, last=True)),
    _family("wav2vec2", "wav2vec2", "Wav2Vec2ForCTC", _speech),
    _family("whisper", "whisper", "WhisperForConditionalGeneration", _spectrograms(16, 32)),
    _family("clip", "clip", "CLIPModel", _pairs({"return_loss": True})),
    _family("siglip", "siglip", "SiglipModel", _pairs({"return_loss": True})),
    _family("blip", "blip", "BlipForConditionalGeneration", _pairs({})),
    _family("llama, gradient checkpointing", "llama", "LlamaForCausalLM", _text(), _checkpointing),
    _family("bert, gradient checkpointing", "bert", "BertForMaskedLM", _text(), _checkpointing),
]

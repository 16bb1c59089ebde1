"""Hugging Face models by their configuration alone, without memory and without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from osdp_compile.errors import OsdpError


def causal_lm(
    folder: Path, batch: int, length: int, dtype: torch.dtype
) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """A causal language model on the meta device, and what it is called with in training.

    Args:
        folder: with a ``config.json``; nothing is downloaded.
        batch, length: of the tokens of one rank.

    Raises:
        OsdpError: if transformers is not installed, or the configuration is of no such model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise OsdpError("--hf-config needs transformers: pip install 'osdp-compile[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.use_cache = False  # of keys and values; training has no use for it
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
            tokens = torch.zeros(batch, length, dtype=torch.long)
    except (ValueError, OSError) as error:
        raise OsdpError(f"{folder}: {error}") from error
    return model.train(), (), {"input_ids": tokens, "labels": tokens}

"""Hugging Face models from a configuration file, on the meta device, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from osdp_compile.errors import OsdpError


def _dtype_name(version: str) -> str:
    """Transformers' argument name for a model's dtype. The old name warns in newer versions.

    >>> _dtype_name("4.55.4"), _dtype_name("4.56.0"), _dtype_name("5.0.0.dev0")
    ('torch_dtype', 'dtype', 'dtype')
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def causal_lm(
    folder: Path, batch: int, length: int, dtype: torch.dtype
) -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """A causal language model on the meta device, and its arguments in training.

    Args:
        folder: contains a ``config.json``; nothing is downloaded.
        batch, length: shape of the tokens of one rank.

    Raises:
        OsdpError: if transformers is not installed, or the configuration is not of such a model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, __version__
    except ImportError as error:
        raise OsdpError("--hf-config needs transformers: pip install 'osdp-compile[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.use_cache = False  # the cache of keys and values, which training does not use
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **{_dtype_name(__version__): dtype})
            tokens = torch.zeros(batch, length, dtype=torch.long)
    except (ValueError, OSError) as error:
        raise OsdpError(f"{folder}: {error}") from error
    return model.train(), (), {"input_ids": tokens, "labels": tokens}

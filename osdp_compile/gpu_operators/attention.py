"""Attention by the operators of GPUs: what ``scaled_dot_product_attention`` becomes on one.

The operators have shapes, gradients and random states without a GPU: torch's rules for fake
tensors do not ask for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from osdp_compile.gpu_operators.attention_choice import Attention, arguments, backend_of
from osdp_compile.gpu_operators.gpu import Gpu

_aten = torch.ops.aten
#: Flash attention takes heads of a multiple of this size.
_FLASH_SIZE = 8
#: The memory-efficient kernel reads masks whose strides are multiples of this.
_MASK_STRIDE = 8


def attend(gpu: Gpu, is_fused: Callable[[], bool], *args: Any, **kwargs: Any) -> Tensor:
    """``aten.scaled_dot_product_attention`` as on the GPU; for fake tensors of any device.

    ``is_fused``: whether Inductor asks, which puts an attention in place of products and a softmax.
    On a GPU it does not for float32, unless the products may use TF32.
    """
    given = arguments(*args, **kwargs)
    exact = torch.get_float32_matmul_precision() == "highest"
    if exact and given.query.dtype is torch.float32 and is_fused():
        return _written_out(given)
    backend = backend_of(given, gpu)
    if backend is SDPBackend.FLASH_ATTENTION:
        return _flash(given)
    mask = _added(given)
    if backend is SDPBackend.MATH:
        by_hand = _aten._scaled_dot_product_attention_math.default
        rest = {"scale": given.scale, "enable_gqa": given.grouped}
        found: Tensor = by_hand(*given.operands, mask, given.dropout, given.causal, None, **rest)[0]
        return found
    if backend is SDPBackend.CUDNN_ATTENTION:
        operator = _aten._scaled_dot_product_cudnn_attention.default
    else:
        operator = _aten._scaled_dot_product_efficient_attention.default
        mask = None if mask is None else _aligned(mask, given)
    keeps = given.needs_gradients
    found = operator(*given.operands, mask, keeps, given.dropout, given.causal, scale=given.scale)[
        0
    ]
    return found


def _written_out(given: Attention) -> Tensor:
    """Products and a softmax, as a model writes them."""
    scale = 1 / math.sqrt(given.query.shape[-1]) if given.scale is None else given.scale
    scores = given.query @ given.key.transpose(-2, -1) * scale
    mask = _added(given)
    if mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), given.dropout) @ given.value


def _flash(given: Attention) -> Tensor:
    size = given.query.shape[-1]
    rest = -size % _FLASH_SIZE
    operands = [F.pad(one, (0, rest)) if rest else one for one in given.operands]
    scale = 1 / math.sqrt(size) if given.scale is None else given.scale
    found: Tensor = _aten._scaled_dot_product_flash_attention.default(
        *operands, given.dropout, given.causal, False, scale=scale
    )[0]
    return found[..., :size] if rest else found


def _added(given: Attention) -> Tensor | None:
    """The mask as a tensor that is added to the scores."""
    mask = given.mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=given.query.dtype, device=mask.device)
    return torch.where(mask.logical_not(), -math.inf, zero)


def _aligned(mask: Tensor, given: Attention) -> Tensor:
    """A mask of the scores' shape, of which rows begin at aligned addresses."""
    strides = mask.stride()
    if strides[-1] != 1 or any(stride % _MASK_STRIDE for stride in strides[:-1]):
        columns = mask.shape[-1]
        mask = F.pad(mask, (0, _MASK_STRIDE - columns % _MASK_STRIDE))[..., :columns]
    batch, heads, rows, _ = given.query.shape
    return mask.expand(batch, heads, rows, given.key.shape[2])

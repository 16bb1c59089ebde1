"""Which kernel computes an attention on a GPU: cuDNN's, flash, memory-efficient, or none (math).

``scaled_dot_product_attention`` asks the GPU for its compute capability. Without a GPU, the same
rules stand here: the constraints of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` for
dense tensors on NVIDIA's GPUs. Flags and priorities that a user sets count.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from osdp_compile import _torch
from osdp_compile.gpu_operators.gpu import Gpu
from osdp_compile.torch_versions import release

_HALVES = (torch.float16, torch.bfloat16)
_MOST_CUDNN_ROWS = 65535


@dataclasses.dataclass(frozen=True)
class Attention:
    """The arguments of ``scaled_dot_product_attention``.

    Shapes of query, key and value: (batch, heads, length, head size). ``grouped``: several heads of
    the query share one of keys and values (``enable_gqa``).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward follows."""
        return torch.is_grad_enabled() and any(one.requires_grad for one in self.operands)


def backend_of(given: Attention, gpu: Gpu) -> SDPBackend:
    """The kernel that computes an attention on a GPU.

    Raises:
        RuntimeError: the user's flags leave no kernel.
    """
    allowed = {
        SDPBackend.CUDNN_ATTENTION: _cudnn,
        SDPBackend.FLASH_ATTENTION: _flash,
        SDPBackend.EFFICIENT_ATTENTION: _efficient,
        SDPBackend.MATH: _math,
    }
    for backend in _order(gpu):
        if backend in allowed and allowed[backend](given, gpu):
            return backend
    raise RuntimeError(
        "no kernel for scaled_dot_product_attention: the flags of torch.backends.cuda, or "
        "torch.nn.attention.sdpa_kernel, allow none that takes these arguments"
    )


def _order(gpu: Gpu) -> list[SDPBackend]:
    """The kernels, the preferred one first. torch prefers cuDNN's on some GPUs by default."""
    order = _torch.operators.attention_order()
    first = order[0] is SDPBackend.FLASH_ATTENTION and order[1] is SDPBackend.EFFICIENT_ATTENTION
    if first and gpu.capability[0] in (9, 10) and gpu.cudnn > 91500 and _prefers_cudnn():
        order.remove(SDPBackend.CUDNN_ATTENTION)
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return order


def _prefers_cudnn() -> bool:
    return os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"


def _math(given: Attention, gpu: Gpu) -> bool:
    return bool(torch.backends.cuda.math_sdp_enabled())


def _cudnn(given: Attention, gpu: Gpu) -> bool:
    strict = torch.are_deterministic_algorithms_enabled()
    if strict and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and gpu.capability >= (8, 0)
        and _fits(given, _HALVES, grouped=True, ignores_single=True)
        and _is_mask_for_cudnn(given)
        and (given.dropout * 16).is_integer()
        and not (given.dropout and 91100 < gpu.cudnn < 91400)
        and _are_sizes_for_cudnn(given, gpu)
    )


def _is_mask_for_cudnn(given: Attention) -> bool:
    mask = given.mask
    if mask is None:
        return True
    batch, heads, rows, _ = given.query.shape
    wanted = (batch, heads, rows, given.key.shape[2])
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    own = wanted[-mask.dim() :]
    return all(size in (1, other) for size, other in zip(mask.shape, own, strict=True))


def _are_sizes_for_cudnn(given: Attention, gpu: Gpu) -> bool:
    batch, heads, rows, size = given.query.shape
    columns, other_size = given.key.shape[2], given.value.shape[3]
    if max(batch, heads) > _MOST_CUDNN_ROWS or size % 8 or other_size % 8:
        return False
    if columns == 1 or (given.dropout and rows == 1):
        return False
    if max(size, other_size) <= 128:
        return True
    sizes = (size, other_size)
    if gpu.capability == (9, 0) and release(torch.__version__) < (2, 15):
        return max(sizes) <= 256
    if gpu.capability[0] not in (9, 10):
        return False
    wide = gpu.cudnn > 92200 and release(torch.__version__) >= (2, 15)
    return sizes == (192, 128) or (wide and sizes == (256, 256))


def _flash(given: Attention, gpu: Gpu) -> bool:
    sizes = {one.shape[-1] for one in given.operands}
    if not (
        torch.backends.cuda.flash_sdp_enabled()
        and gpu.capability >= (8, 0)
        and given.mask is None
        and _fits(given, _HALVES, grouped=True, ignores_single=True)
        and len(sizes) == 1
        and max(sizes) <= 256
        and not (given.causal and given.query.shape[2] != given.key.shape[2])
    ):
        return False
    small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability >= (12, 0)
    if small and given.needs_gradients:  # the backward of wide heads lacks shared memory
        (size,) = sizes
        return size <= 192 or (size > 224 and not given.dropout)
    return True


def _efficient(given: Attention, gpu: Gpu) -> bool:
    is_half = given.query.dtype in _HALVES
    types: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    if gpu.capability >= (8, 0):
        types += (torch.bfloat16,)
        aligned = 8 if is_half else 4
    else:
        aligned = 8 if is_half and gpu.capability >= (7, 0) else 1
    sizes = [one.shape[-1] for one in given.operands]
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and _fits(given, types, grouped=release(torch.__version__) >= (2, 14), ignores_single=False)
        and sizes[0] == sizes[1]
        and all(size and size % aligned == 0 for size in sizes)
    )


def _fits(
    given: Attention, types: tuple[torch.dtype, ...], *, grouped: bool, ignores_single: bool
) -> bool:
    """What all kernels ask for.

    ``grouped``: the kernel takes fewer heads of keys and values than of queries.
    ``ignores_single``: strides of heads of size 1 do not count.
    """
    if given.query.dtype not in types or len({one.dtype for one in given.operands}) > 1:
        return False
    if any(one.dim() != 4 for one in given.operands):
        return False
    if len({one.shape[0] for one in given.operands}) > 1:
        return False
    if 0 in (given.query.shape[2], given.key.shape[2]):
        return False
    single = ignores_single and given.query.shape[-1] == 1
    if not single and any(one.stride(-1) != 1 for one in given.operands):
        return False
    if given.mask is not None and given.mask.stride(-1) != 1:
        return False
    return _are_heads_right(given, grouped)


def _are_heads_right(given: Attention, grouped: bool) -> bool:
    queries, keys, values = (one.shape[1] for one in given.operands)
    if given.grouped and grouped:
        return keys == values and keys > 0 and queries % keys == 0
    if queries == keys == values:
        return True
    return grouped and release(torch.__version__) >= (2, 14) and keys == values == 1


def arguments(*args: Any, **kwargs: Any) -> Attention:
    """The attention of a call of ``aten.scaled_dot_product_attention``."""
    names = ("query", "key", "value", "mask", "dropout", "causal")
    others = {
        "attn_mask": "mask",
        "dropout_p": "dropout",
        "is_causal": "causal",
        "enable_gqa": "grouped",
    }
    named = {others.get(name, name): value for name, value in kwargs.items()}
    return Attention(**dict(zip(names, args, strict=False)), **named)

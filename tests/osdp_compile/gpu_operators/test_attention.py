"""Attention as on a GPU: the kernel that torch chooses there, and what it gets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from osdp_compile.gpu_operators.attention import attend
from osdp_compile.gpu_operators.attention_choice import Attention, backend_of
from osdp_compile.gpu_operators.gpu import Gpu, gpu_of
from osdp_compile.torch_versions import release
from passes.types.hardware import generic
from passes.types.hardware_presets import preset
from tests.passes.move import gpu_attention

HOPPER, AMPERE, TURING = (Gpu(one, 91900) for one in ((9, 0), (8, 0), (7, 5)))
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
BF16 = torch.bfloat16
GROUPED_EFFICIENT = release(torch.__version__) >= (2, 14)


def attention(
    dtype: torch.dtype = BF16,
    size: int = 64,
    *,
    value_size: int | None = None,
    keys: int = 4,
    rows: int = 16,
    columns: int | None = None,
    mask: tuple[int, ...] | None = None,
    **other: Any,
) -> Attention:
    """An attention of 2 x 4 heads; ``mask``: the shape of one."""
    columns = columns or rows
    query = torch.empty(2, 4, rows, size, dtype=dtype, requires_grad=True)
    key = torch.empty(2, keys, columns, size, dtype=dtype)
    value = torch.empty(2, keys, columns, value_size or size, dtype=dtype)
    given = None if mask is None else torch.ones(mask, dtype=torch.bool)
    return Attention(query, key, value, given, **other)


CHOICES = {
    # Measured on an H200: cuDNN's for bf16, the memory-efficient one for float32.
    "bf16": (attention(causal=True), HOPPER, CUDNN),
    "float32": (attention(torch.float32), HOPPER, EFFICIENT),
    "float64": (attention(torch.float64), HOPPER, MATH),
    "an older cuDNN": (attention(), Gpu((9, 0), 91002), FLASH),
    "Ampere": (attention(), AMPERE, FLASH),
    "Turing": (attention(), TURING, MATH),
    "fp16 on Turing": (attention(torch.float16), TURING, EFFICIENT),
    "a mask": (attention(mask=(16, 16)), HOPPER, CUDNN),
    "a mask of one head": (attention(mask=(2, 1, 1, 16)), HOPPER, CUDNN),
    "a mask of three dimensions": (attention(mask=(1, 16, 16)), HOPPER, EFFICIENT),
    "a mask on Ampere": (attention(mask=(16, 16)), AMPERE, EFFICIENT),
    "dropout of sixteenths": (attention(dropout=0.125), HOPPER, CUDNN),
    "dropout": (attention(dropout=0.1), HOPPER, FLASH),
    "heads of 20": (attention(size=20), HOPPER, FLASH),
    "heads of 20 with a mask": (attention(size=20, mask=(16, 16)), HOPPER, MATH),
    "float32 heads of 20": (attention(torch.float32, 20), HOPPER, EFFICIENT),
    "float32 heads of 6": (attention(torch.float32, 6), HOPPER, MATH),
    "heads of 256": (attention(size=256), Gpu((9, 0), 92600), CUDNN),
    "heads of 320": (attention(size=320), HOPPER, EFFICIENT),
    "wide values": (attention(value_size=128), AMPERE, EFFICIENT),
    "one key": (attention(columns=1), HOPPER, FLASH),
    "more rows, causal": (attention(rows=32, columns=16, causal=True), AMPERE, EFFICIENT),
    "grouped": (attention(keys=2, grouped=True), HOPPER, CUDNN),
    "float32 grouped": (
        attention(torch.float32, keys=2, grouped=True),
        HOPPER,
        EFFICIENT if GROUPED_EFFICIENT else MATH,
    ),
    "heads that do not fit": (attention(keys=2), HOPPER, MATH),
    "wide heads on small GPUs": (attention(size=224), Gpu((8, 9), 91900), EFFICIENT),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_kernel_is_that_of_the_gpu(case):
    given, gpu, wanted = CHOICES[case]
    assert backend_of(given, gpu) is wanted


def test_what_the_user_forbids_is_not_chosen(monkeypatch):
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert backend_of(attention(), HOPPER) is EFFICIENT
    with sdpa_kernel([EFFICIENT, CUDNN], set_priority=True):
        assert backend_of(attention(), HOPPER) is EFFICIENT
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="no kernel for scaled_dot_product"):
        backend_of(attention(torch.float32), HOPPER)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert backend_of(attention(), HOPPER) is FLASH
    monkeypatch.undo()
    torch.use_deterministic_algorithms(True)
    try:
        assert backend_of(attention(), HOPPER) is FLASH
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_gpu_of_a_profile():
    assert gpu_of(None) is None and gpu_of(generic()) is None
    hopper, ampere = (gpu_of(preset(name)) for name in ("h100-sxm", "a100-80gb"))
    assert hopper.capability == (9, 0) and ampere.capability == (8, 0)
    assert hopper.cudnn > 90000
    is_known = torch.backends.cuda.is_built()
    assert ("cuDNN" in hopper.assumed) == (not is_known)
    unknown = gpu_of(dataclasses.replace(preset("h200"), compute_capability=""))
    assert "compute capability 9.0" in unknown.assumed


def run(gpu: Gpu, fused: bool, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Results and gradients, by a kernel of the CPU under the name of the GPU's operator."""
    given = [one.detach().requires_grad_() for one in args[:3]]
    kept = gpu_attention.register()
    out = attend(gpu, lambda: fused, *given, *args[3:], **kwargs)
    out.square().sum().backward()
    del kept
    return out, *(one.grad for one in given)


def expected(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    given = [one.detach().requires_grad_() for one in args[:3]]
    out = F.scaled_dot_product_attention(*given, *args[3:], **kwargs)
    out.square().sum().backward()
    return out, *(one.grad for one in given)


CALLS = {
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "a mask": {"attn_mask": torch.ones(13, 13, dtype=torch.bool).tril()},
    "an added mask": {"attn_mask": torch.randn(2, 1, 13, 13)},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("size", [16, 20])
def test_it_computes_the_same(call, dtype, size):
    operands = [torch.randn(2, 4, 13, size).to(dtype) for _ in range(3)]
    kwargs = dict(CALLS[call])
    if call == "an added mask":
        kwargs["attn_mask"] = kwargs["attn_mask"].to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    for gpu in (HOPPER, AMPERE):
        ours, theirs = run(gpu, False, *operands, **kwargs), expected(*operands, **kwargs)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_float32_is_not_fused_where_products_may_not_use_tf32():
    operands = [torch.randn(2, 4, 16, 16) for _ in range(3)]
    calls: list[str] = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    kept = gpu_attention.register()
    with Calls():
        ours = attend(HOPPER, lambda: True, *operands)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*operands))
    assert "bmm" in calls and not any("efficient" in one for one in calls)
    calls.clear()
    with Calls():
        attend(HOPPER, lambda: False, *operands)
    assert "_scaled_dot_product_efficient_attention" in calls
    del kept


def test_heads_are_padded_by_the_scale_of_their_own_size():
    operands = [torch.randn(1, 1, 4, 20, dtype=BF16) for _ in range(3)]
    ours = run(AMPERE, False, *operands)[0]
    scaled = run(AMPERE, False, *operands, scale=1 / math.sqrt(20))[0]
    assert ours.shape[-1] == 20 and torch.equal(ours, scaled)

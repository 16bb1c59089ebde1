"""FLOPs of an operator: torch's registry, and formulas for operators that it lacks.

As in the registry, a multiply-add counts as two. Pointwise operators and reductions count as
zero: memory traffic determines their time.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from passes.graph.fx_utils import concrete, gives_nothing, numel_of

log = logging.getLogger("passes")

_aten = torch.ops.aten


def flops_of(node: fx.Node) -> int:
    """FLOPs of a call to an operator; 0 without a formula, which is logged once."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None or gives_nothing(node):
        return 0
    args = fx.node.map_arg(node.args, lambda source: _sized(source.meta["val"]))
    kwargs = fx.node.map_arg(node.kwargs, lambda source: _sized(source.meta["val"]))
    value = _sized(node.meta["val"])
    try:
        if packet in _LACKING:
            return _LACKING[packet](*args, **kwargs, out_val=value)
        if packet in flop_registry:
            return int(flop_registry[packet](*args, **kwargs, out_val=value))
    except (TypeError, ValueError, AssertionError) as error:
        _say(str(node.target), node.name, f"its FLOP formula fails ({error})")
        return 0
    _say(str(node.target), node.name, "no FLOP formula is known")
    return 0


def _sized(value: Any) -> Any:
    """A value with symbolic sizes replaced by their hints, so that a formula adds no guard."""
    if isinstance(value, list | tuple):
        return type(value)(_sized(item) for item in value)
    if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape):
        return torch.empty(concrete(value.shape), dtype=value.dtype, device="meta")
    return concrete([value])[0] if isinstance(value, torch.SymInt) else value


@functools.cache
def _say(operator: str, name: str, why: str) -> None:
    """Log once per node that its bytes alone determine its price."""
    log.debug("%s (%s) is priced by its bytes: %s", name, operator, why)


def _matrix_vector(matrix: Any, vector: Any, *, out_val: Any) -> int:
    return 2 * numel_of(matrix)


def _added_matrix_vector(bias: Any, matrix: Any, vector: Any, *, out_val: Any, **_: Any) -> int:
    return 2 * numel_of(matrix)


def _dot(one: Any, other: Any, *, out_val: Any) -> int:
    return 2 * numel_of(one)


def _added_batch(bias: Any, one: Any, other: Any, *, out_val: Any, **_: Any) -> int:
    """``bias + sum over b of one[b] @ other[b]``; shapes (b, n, m) and (b, m, p)."""
    return 2 * numel_of(one) * concrete(other.shape)[-1]


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Shapes (batch, heads, length, head size); a causal mask saves no FLOPs, as in torch."""
    shapes = (tuple(concrete(t.shape)) for t in (query, key, value))
    return int(sdpa_flop_count(*shapes))


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any, **__: Any
) -> int:
    shapes = (tuple(concrete(t.shape)) for t in (gradient, query, key, value))
    return int(sdpa_backward_flop_count(*shapes))


def _fourier(source: Any, dim: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """``5 n log2 n`` for each transform of length n, the standard count of a complex FFT."""
    larger = max(source, out_val, key=numel_of)
    length = math.prod(concrete(larger.shape)[axis] for axis in dim)
    return round(5 * numel_of(larger) * math.log2(max(length, 2)))


_LACKING: dict[Any, Callable[..., int]] = {
    _aten.mv: _matrix_vector,
    _aten.addmv: _added_matrix_vector,
    _aten.dot: _dot,
    _aten.vdot: _dot,
    _aten.addbmm: _added_batch,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    _aten._fft_c2c: _fourier,
    _aten._fft_r2c: _fourier,
    _aten._fft_c2r: _fourier,
}

"""Autocast as on a GPU: CPU tensors are cast as ``torch.autocast("cuda")`` casts CUDA tensors.

The lists of operators differ: on a GPU a softmax or a layer norm computes in float32, on a CPU in
the data type of its input. Inside the context the CPU's autocast has the GPU's lists, and a model
that enters ``torch.autocast("cuda")`` enters the CPU's. Without a GPU torch would turn it off.

The lists are those of ``torch/include/ATen/autocast_mode.h``, and 2.15's ``linalg_matrix_sqrth``.
torch knows which operators are in one, not in which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from osdp_compile import _torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: These compute in float32.
_WIDE = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
    """
)
#: These give float32, if no data type is asked for.
_WIDE_RESULT = _names(
    """
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int
    log_softmax.Dimname cumprod cumprod.dimname cumsum cumsum.dimname linalg_vector_norm
    linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList sum.dim_DimnameList
    """
)
#: These give float32, by another overload.
_WIDE_OVERLOAD = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}
#: These compute in the widest data type of their inputs.
_WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
#: An error on a GPU, whose text is torch's.
_BANNED = "binary_cross_entropy"


@contextmanager
def as_autocast_of_gpus() -> Iterator[None]:
    """Context: the CPU's autocast casts as the GPU's, and stands in for it."""
    with (
        _torch.operators.with_cpu_autocast(_kernels()),
        _torch.operators.with_entered_autocast(_enter),
    ):
        if not torch.is_autocast_enabled("cuda"):
            yield
            return
        with torch.autocast("cpu", torch.get_autocast_dtype("cuda")):  # entered by the caller
            yield


def _enter(device: str, dtype: torch.dtype | None, *rest: Any) -> tuple[Any, ...]:
    """The arguments of the autocast that a model enters."""
    if device != "cuda":
        return device, dtype, *rest
    return "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype, *rest


def _kernels() -> dict[str, Callable[..., Any] | None]:
    """Operator -> what autocast makes of a call; None: as without autocast."""
    of_cpu, of_gpu = (_torch.operators.autocast_operators(device) for device in ("CPU", "CUDA"))
    kernels: dict[str, Callable[..., Any] | None] = dict.fromkeys(of_cpu - of_gpu)
    for name in of_gpu:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernels[name] = functools.partial(_policy(name), operator)
    return kernels


def _policy(name: str) -> Callable[..., Any]:
    if name in _WIDE:
        return _wide
    if name in _WIDE_RESULT:
        return _wide_result
    if name in _WIDE_OVERLOAD:
        return functools.partial(_wide_overload, _WIDE_OVERLOAD[name])
    if name in _WIDEST:
        return _widest
    return _refused if name == _BANNED else _narrow


def _narrow(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(operator, torch.get_autocast_dtype("cpu"), args, kwargs)


def _wide(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(operator, torch.float32, args, kwargs)


def _widest(operator: Any, *args: Any, **kwargs: Any) -> Any:
    given = [one for one in _torch.tensors.tree_leaves((args, kwargs)) if _is_cast(one)]
    is_wide = any(one.dtype is torch.float32 for one in given)
    dtype = torch.float32 if is_wide else torch.get_autocast_dtype("cpu")
    return _called(operator, dtype, args, kwargs)


def _wide_result(operator: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    names = [one.name for one in operator._schema.arguments]
    place = names.index("dtype") - 1
    is_given = kwargs.get("dtype") is not None or any(
        one is not None for one in args[place : place + 1]
    )
    if _is_cast(first) and not is_given:
        args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
    return operator(first, *args, **kwargs)


def _wide_overload(overload: str, operator: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_cast(first):
        return operator(first, *args, **kwargs)
    rest = operator._schema.arguments[1:]
    given = {one.name: one.default_value for one in rest} | kwargs
    given |= zip((one.name for one in rest), args, strict=False)
    return getattr(operator.overloadpacket, overload)(first, **given, dtype=torch.float32)


def _refused(operator: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
        "binary_cross_entropy_with_logits"
    )


def _is_cast(value: object) -> bool:
    """Whether autocast changes a value's data type."""
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and value.dtype is not torch.float64


def _called(operator: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    cast = functools.partial(_torch.tensors.tree_map_only, Tensor, lambda one: _cast(one, dtype))
    return operator(*cast(args), **cast(kwargs))


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if _is_cast(value) else value

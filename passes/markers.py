"""The marker operators: where a parameter is read, and where its gradient leaves.

A sharded model reads every parameter through ``osdp::unshard``; its derivative is
``osdp::reduce_grad``. In a traced graph they say *that* a parameter is needed; the
passes decide how and when it comes. Their names and text are the same on every rank:
no operator carries a rank's own sizes.

===================  ======================================================================
``unshard``          local shard ``[rows/N, ...]`` -> full parameter ``[rows, ...]``
``reduce_grad``      this rank's full gradient -> the mean over ranks, laid out as the shard
``pad_rows``         local shard -> ``rows`` rows, zeros below (when N does not divide)
``trim_rows``        padded gradient shard -> as many rows as this rank's shard has
===================  ======================================================================

``sharded=False`` marks a replicated parameter: ``unshard`` is then the identity and
``reduce_grad`` an all-reduce. This file holds schemas, shapes and derivatives;
``osdp_compile/markers.py`` holds the eager implementation, which needs process groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("osdp", "DEF")
_LIBRARY.define(
    "unshard(Tensor shard, str name, SymInt[] shape, bool sharded, str group_name) -> Tensor"
)
_LIBRARY.define(
    "reduce_grad(Tensor grad, Tensor shard, str name, bool sharded, str group_name) -> Tensor"
)
_LIBRARY.define("pad_rows(Tensor shard, SymInt rows) -> Tensor")
_LIBRARY.define("trim_rows(Tensor padded, Tensor like) -> Tensor")


@torch.library.register_fake("osdp::unshard")
def _unshard_shape(
    shard: Tensor, name: str, shape: list[int], sharded: bool, group_name: str
) -> Tensor:
    # A replicated parameter may have any strides (channels_last); a gathered one is contiguous.
    return shard.new_empty(shape) if sharded else torch.empty_like(shard)


@torch.library.register_fake("osdp::reduce_grad")
def _reduce_grad_shape(
    grad: Tensor, shard: Tensor, name: str, sharded: bool, group_name: str
) -> Tensor:
    if sharded:
        return grad.new_empty(shard.shape)
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


@torch.library.register_fake("osdp::pad_rows")
def _pad_rows_shape(shard: Tensor, rows: int) -> Tensor:
    return shard.new_empty([rows, *shard.shape[1:]])


@torch.library.register_fake("osdp::trim_rows")
def _trim_rows_shape(padded: Tensor, like: Tensor) -> Tensor:
    return padded.new_empty([like.shape[0], *padded.shape[1:]])


@torch.library.impl("osdp::pad_rows", "CompositeExplicitAutograd")
def _pad_rows(shard: Tensor, rows: int) -> Tensor:
    padded = shard.new_zeros([rows, *shard.shape[1:]])
    padded[: shard.shape[0]] = shard
    return padded


@torch.library.impl("osdp::trim_rows", "CompositeExplicitAutograd")
def _trim_rows(padded: Tensor, like: Tensor) -> Tensor:
    return padded[: like.shape[0]].clone()


def _save_for_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, ctx.name, _, ctx.sharded, ctx.group_name = inputs
    ctx.save_for_backward(shard)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (shard,) = ctx.saved_tensors
    reduced = torch.ops.osdp.reduce_grad(grad, shard, ctx.name, ctx.sharded, ctx.group_name)
    return reduced, None, None, None, None


torch.library.register_autograd("osdp::unshard", _reduce, setup_context=_save_for_reduce)

UNSHARD = torch.ops.osdp.unshard.default
REDUCE_GRAD = torch.ops.osdp.reduce_grad.default
PAD_ROWS = torch.ops.osdp.pad_rows.default
TRIM_ROWS = torch.ops.osdp.trim_rows.default

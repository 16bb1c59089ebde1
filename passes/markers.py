"""The marker operators: where a parameter is read, and where its gradient leaves.

A sharded model reads every parameter through ``osdp::unshard``; its derivative is
``osdp::reduce_grad``. In a traced graph they say *that* a parameter is needed; the
passes decide how and when it comes. Their names and text are the same on every rank:
no operator carries a rank's own sizes.

===================  ======================================================================
``unshard``          local shard ``[rows/N, ...]`` -> full parameter ``[rows, ...]``
``reduce_grad``      this rank's full gradient -> the mean over ranks, laid out as the shard
===================  ======================================================================

``sharded=False`` marks a replicated parameter: ``unshard`` is then the identity and
``reduce_grad`` an all-reduce. ``group_name``, ``between`` and ``hosts`` say which ranks share
the rows, and how (:class:`passes.cuts.Cut`). This file holds schemas, shapes and derivatives;
``osdp_compile/markers.py`` holds the eager implementation, which needs process groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("osdp", "DEF")
_LIBRARY.define(
    "unshard(Tensor shard, str name, SymInt[] shape, bool sharded, str group_name,"
    " str between='', int hosts=1) -> Tensor"
)
_LIBRARY.define(
    "reduce_grad(Tensor grad, Tensor shard, str name, bool sharded, str group_name,"
    " str between='', int hosts=1) -> Tensor"
)


@torch.library.register_fake("osdp::unshard")
def _unshard_shape(
    shard: Tensor,
    name: str,
    shape: list[int],
    sharded: bool,
    group_name: str,
    between: str = "",
    hosts: int = 1,
) -> Tensor:
    # A replicated parameter may have any strides (channels_last); a gathered one is contiguous.
    return shard.new_empty(shape) if sharded else torch.empty_like(shard)


@torch.library.register_fake("osdp::reduce_grad")
def _reduce_grad_shape(
    grad: Tensor,
    shard: Tensor,
    name: str,
    sharded: bool,
    group_name: str,
    between: str = "",
    hosts: int = 1,
) -> Tensor:
    if sharded:
        return grad.new_empty(shard.shape)
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save_for_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, ctx.name, _, ctx.sharded, *ctx.marks = inputs
    ctx.save_for_backward(shard)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (shard,) = ctx.saved_tensors
    reduced = torch.ops.osdp.reduce_grad(grad, shard, ctx.name, ctx.sharded, *ctx.marks)
    return (reduced, None, None, None, *[None] * len(ctx.marks))


torch.library.register_autograd("osdp::unshard", _reduce, setup_context=_save_for_reduce)

UNSHARD = torch.ops.osdp.unshard.default
REDUCE_GRAD = torch.ops.osdp.reduce_grad.default


def left_out(*tensors: Tensor) -> Tensor:
    """Stands for layers that are not in a graph (``passes/fold.py``), which is only looked at."""
    raise RuntimeError("a folded graph cannot be run")


LEFT_OUT = left_out

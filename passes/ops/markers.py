"""The marker operators: reads of parameters and reductions of gradients.

A sharded model reads every parameter through ``osdp::unshard``; its derivative is
``osdp::reduce_grad``. In a traced graph the markers state that a parameter is needed; the
passes choose the collectives and their schedule. Their names and text are equal on all ranks:
no marker carries a rank's own sizes.

| operator        | result                                                              |
|-----------------|---------------------------------------------------------------------|
| ``unshard``     | local shard ``[rows/N, ...]`` -> full parameter ``[rows, ...]``     |
| ``reduce_grad`` | this rank's full gradient -> the mean over ranks, in the shard's shape |

``dtype`` is the dtype of the full parameter, if not the shard's; the shard is cast before the
gather. ``reduce_dtype`` is the dtype in which a gradient travels (default: its own). The result has
the shard's dtype.

``sharded=False`` marks a replicated parameter: ``unshard`` is then the identity and
``reduce_grad`` an all-reduce. ``group_name``, ``between``, ``hosts`` and ``dim`` describe the shard
layout (``passes.types.shard_layout.ShardLayout``); "rows" are along ``dim``. This file holds
schemas, shapes and derivatives; ``osdp_compile/runtime/eager_markers.py`` holds the eager
implementation, which needs process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("osdp", "DEF")
_LIBRARY.define(
    "unshard(Tensor shard, str name, SymInt[] shape, bool sharded, str group_name,"
    " str between='', int hosts=1, int dim=0, *, ScalarType? dtype=None,"
    " ScalarType? reduce_dtype=None) -> Tensor"
)
_LIBRARY.define(
    "reduce_grad(Tensor grad, Tensor shard, str name, bool sharded, str group_name,"
    " str between='', int hosts=1, int dim=0, *, ScalarType? reduce_dtype=None) -> Tensor"
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
    dim: int = 0,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    # A replicated parameter may have any strides (channels_last); a gathered one is contiguous.
    if sharded:
        return shard.new_empty(shape, dtype=dtype or shard.dtype)
    return torch.empty_like(shard, dtype=dtype)


@torch.library.register_fake("osdp::reduce_grad")
def _reduce_grad_shape(
    grad: Tensor,
    shard: Tensor,
    name: str,
    sharded: bool,
    group_name: str,
    between: str = "",
    hosts: int = 1,
    dim: int = 0,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    if sharded:
        return grad.new_empty(shard.shape, dtype=shard.dtype)
    return torch.empty_like(grad, dtype=shard.dtype, memory_format=torch.contiguous_format)


def _save_for_reduce(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    shard, ctx.name, _, ctx.sharded, *ctx.marks = inputs
    ctx.reduce_dtype = keyword_only_inputs["reduce_dtype"]
    ctx.save_for_backward(shard)


def _reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (shard,) = ctx.saved_tensors
    own = {} if ctx.reduce_dtype is None else {"reduce_dtype": ctx.reduce_dtype}
    reduced = torch.ops.osdp.reduce_grad(grad, shard, ctx.name, ctx.sharded, *ctx.marks, **own)
    return (reduced, None, None, None, *[None] * len(ctx.marks))


torch.library.register_autograd("osdp::unshard", _reduce, setup_context=_save_for_reduce)

UNSHARD = torch.ops.osdp.unshard.default
REDUCE_GRAD = torch.ops.osdp.reduce_grad.default


class Unshard(NamedTuple):
    """The arguments of an ``unshard`` node, by name."""

    shard: fx.Node
    name: str
    shape: Sequence[Any]
    sharded: bool
    group_name: str
    between: str = ""
    hosts: int = 1
    dim: int = 0


class ReduceGrad(NamedTuple):
    """The arguments of a ``reduce_grad`` node, by name."""

    gradient: fx.Node
    shard: fx.Node
    name: str
    sharded: bool
    group_name: str
    between: str = ""
    hosts: int = 1
    dim: int = 0


def unshard_of(node: fx.Node) -> Unshard:
    """The arguments of an ``unshard`` node."""
    given: Any = node.args
    return Unshard(*given)


def reduce_grad_of(node: fx.Node) -> ReduceGrad:
    """The arguments of a ``reduce_grad`` node."""
    given: Any = node.args
    return ReduceGrad(*given)


def set_args(node: fx.Node, marker: Unshard | ReduceGrad) -> None:
    """Give a marker node these arguments, without those that have their defaults."""
    is_flat = not marker.between and marker.hosts == 1
    args: Any = tuple(marker)
    if marker.dim:
        node.args = args
    else:
        node.args = args[:-3] if is_flat else args[:-1]


#: What a Dynamo graph calls for an ``unshard`` marker.
UNSHARD_CALLS = (UNSHARD, UNSHARD.overloadpacket)


def unshards(graph: fx.Graph) -> list[fx.Node]:
    """The ``unshard`` nodes of a graph, in order."""
    return list(graph.find_nodes(op="call_function", target=UNSHARD))


def left_out(*tensors: Tensor) -> Tensor:
    """A placeholder for the layers omitted from a folded graph (``passes/capture/fold_layers.py``).

    Raises:
        RuntimeError: always; a folded graph is only analysed.
    """
    raise RuntimeError("a folded graph cannot be run")


LEFT_OUT = left_out

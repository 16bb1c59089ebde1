"""A model's own collectives, as of tensor parallelism, each with its wait as one operator.

===============================  ==============================================
``osdp::model_all_reduce``       the sum (or another reduction) over the ranks
``osdp::model_all_gather``       every rank's part, in rank order, along dim 0
``osdp::model_reduce_scatter``   this rank's part of the sum, along dim 0
===============================  ==============================================

They run where the model has them, on the stream of their process group, and compute waits for them.
The plan orders its own collectives around them. This file holds
schemas and shapes; ``osdp_compile/runtime/model_collectives.py`` communicates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("osdp", "FRAGMENT")
_LIBRARY.define("model_all_reduce(Tensor input, str reduction, str group_name) -> Tensor")
_LIBRARY.define("model_all_gather(Tensor input, int ranks, str group_name) -> Tensor")
_LIBRARY.define(
    "model_reduce_scatter(Tensor input, str reduction, int ranks, str group_name) -> Tensor"
)


@torch.library.register_fake("osdp::model_all_reduce")
def _all_reduce_shape(input: Tensor, reduction: str, group_name: str) -> Tensor:
    return input.new_empty(input.shape)


@torch.library.register_fake("osdp::model_all_gather")
def _all_gather_shape(input: Tensor, ranks: int, group_name: str) -> Tensor:
    return input.new_empty([input.shape[0] * ranks, *input.shape[1:]])


@torch.library.register_fake("osdp::model_reduce_scatter")
def _reduce_scatter_shape(input: Tensor, reduction: str, ranks: int, group_name: str) -> Tensor:
    return input.new_empty([input.shape[0] // ranks, *input.shape[1:]])


_osdp, _c10d = torch.ops.osdp, torch.ops._c10d_functional
#: Functional collective -> its operator with the wait. Both take the same arguments.
AT_ONCE: dict[Any, Any] = {
    _c10d.all_reduce.default: _osdp.model_all_reduce.default,
    _c10d.all_gather_into_tensor.default: _osdp.model_all_gather.default,
    _c10d.reduce_scatter_tensor.default: _osdp.model_reduce_scatter.default,
}
_KINDS = {
    "osdp::model_all_reduce": "all_reduce",
    "osdp::model_all_gather": "all_gather",
    "osdp::model_reduce_scatter": "reduce_scatter",
    # Torch's operator for ``redistribute`` from one sharded dimension to another; it waits, too.
    "_dtensor::shard_dim_alltoall": "all_to_all",
}


def kind_of(target: Any) -> str | None:
    """The kind, in the hardware profile, of a model's own collective; None: it is none."""
    name = getattr(target, "name", None)
    return _KINDS.get(name()) if callable(name) else None


def kind_and_group(node: fx.Node) -> tuple[str, str]:
    """The kind of a model's own collective, and the name of its process group."""
    kind = kind_of(node.target)
    assert kind is not None
    return kind, str(node.args[-1])

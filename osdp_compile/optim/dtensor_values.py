"""Values of DTensors in training scripts: what torch gets wrong without a message.

* ``clip_grad_norm_(...).item()``: the norm is a partial sum on every rank, and ``item`` gives this
  part. So the total norm is made whole, which all ranks do together anyway.
* ``p.grad.norm().item()``, ``bool(p.grad.isnan().any())``: the same, in code that one rank alone
  may run, where a collective would wait for ever. So it is an error.
* ``p.data = value``: torch changes the wrapper and not the rank's rows. So the value is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from osdp_compile import _torch
from osdp_compile.errors import OsdpError


def handle_values() -> None:
    """Handle these three from now on."""
    _torch.optimizers.handle_total_norm(_whole)
    _torch.dtensor.handle_operator(torch.ops.aten._local_scalar_dense.default, item)
    _torch.dtensor.handle_data(_assign)


def _whole(norm: Tensor) -> Tensor:
    if isinstance(norm, DTensor) and any(one.is_partial() for one in norm.placements):
        return norm.redistribute(placements=[Replicate()] * norm.device_mesh.ndim)
    return norm


def item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of a DTensor that is whole on every rank.

    Raises:
        OsdpError: for a part of a number.
    """
    (tensor,) = args
    if not all(one.is_replicate() for one in tensor.placements):
        raise OsdpError(
            f"item() of a DTensor that is {tensor.placements} would give the part of this rank: "
            "call full_tensor() on every rank before, as in p.grad.norm().full_tensor().item()"
        )
    return operator(tensor.to_local())


def _assign(tensor: DTensor, value: Any) -> None:
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise OsdpError(
            f"data of a sharded parameter of shape {tuple(tensor.shape)} and {tensor.dtype}: "
            "assign a DTensor of the same shape and dtype, or write into it by copy_"
        )
    with torch.no_grad():
        tensor.detach().copy_(value)

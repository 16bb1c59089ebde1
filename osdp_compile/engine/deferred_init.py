"""Deferred initialisation: write into sharded parameters before the first call as into whole ones.

``torch.nn.init``, ``reset_parameters`` and ``load_state_dict`` know nothing of DTensors, and some
of their operations would fail silently. A random fill of a DTensor on CPUs uses each rank's own
generator: ranks with one seed then hold the same rows repeatedly. (On a GPU the numbers depend on
the number of ranks.) A part of a DTensor's rows is a copy: writes into it are lost. So these rules
hold for pending models:

* A random fill draws the whole tensor and keeps this rank's rows. Ranks with one seed together
  hold the same values as one process, and their generators stay in step. It takes the memory of
  one whole parameter for a moment.
* A plain tensor can be copied into a parameter. It is the whole value.
* One row, ``weight[padding_idx]``, is replicated to the ranks that share rows. Writes into it reach
  the parameter.
* Other parts of the rows are refused.

"Rows" are along any dimension that ranks share: ours, or columns of ``parallelize_module``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.optim.dtensor_values import item
from osdp_compile.optim.written_rows import VIEWS, part_of
from osdp_compile.runtime.meshes import cuts_of, own_rows, span_of
from osdp_compile.tracking.pending_model import any_waits, is_waiting

_aten = torch.ops.aten


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not _ours(tensor):
        return _torch.dtensor.without_handler(operator, args, kwargs)
    local = tensor.to_local()
    if all(one.is_replicate() for one in tensor.placements):
        operator(local, *args[1:], **kwargs)
    elif not local.is_meta:
        whole = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device
        )
        operator(whole, *args[1:], **kwargs)
        local.copy_(own_rows(whole, tensor))
    return tensor


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _ours(args[0]):
        return _torch.dtensor.without_handler(operator, args, kwargs)
    empty = torch.empty_like(args[0], **kwargs)
    return empty.normal_() if operator is _aten.randn_like.default else empty.uniform_()


def _copy(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, source = args[:2]
    if not _ours(tensor) or isinstance(source, DTensor):
        return _torch.dtensor.without_handler(operator, args, kwargs)
    tensor.to_local().copy_(own_rows(source.expand(tensor.shape), tensor))
    return tensor


def _row(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = args
    if not _is_cut(tensor, dim) or tensor.is_meta:
        return part_of(operator, args, kwargs)
    cuts = cuts_of(tensor)
    if cuts is None:
        raise _lost(tensor)
    dim, total = dim % tensor.dim(), tensor.shape[dim]
    if not -total <= index < total:
        raise IndexError(f"row {index} of a tensor of {total}")
    index %= total
    mesh, local = tensor.device_mesh, tensor.to_local()
    owner: dict[int, int] = {}  # place by mesh dimension
    for mesh_dim in (one for one, cut in cuts if cut == dim):
        spans = [span_of(tensor, mesh_dim, place, total) for place in range(mesh.size(mesh_dim))]
        place = next(p for p, (start, stop) in enumerate(spans) if start <= index < stop)
        start, stop = spans[place]
        owner[mesh_dim], index, total = place, index - start, stop - start
    here = all(mesh.get_local_rank(one) == place for one, place in owner.items())
    row = local.select(dim, index) if here else local.new_empty(_less(dim, local.shape))
    sent = row.contiguous()
    for mesh_dim, place in owner.items():
        group = mesh.get_group(mesh_dim)
        dist.broadcast(sent, src=dist.get_global_rank(group, place), group=group)
    return DTensor.from_local(
        row if here else sent,
        mesh,
        [_row_placement(one, dim) for one in tensor.placements],
        run_check=False,
        shape=torch.Size(_less(dim, tensor.shape)),
        stride=tuple(_less(dim, tensor.stride())),
    )


def _less(dim: int, sizes: Sequence[int]) -> list[int]:
    """Sizes or strides without those of one dimension."""
    return [*sizes[:dim], *sizes[dim + 1 :]]


def _row_placement(placement: Any, dim: int) -> Placement:
    """A row's placement on a mesh dimension, from its tensor's; ``dim`` counts the rows."""
    if placement.is_replicate() or placement.dim == dim:
        return Replicate()
    own, factor = placement.dim - (placement.dim > dim), _torch.dtensor.split_factor(placement)
    return Shard(own) if factor is None else _torch.dtensor.strided_shard(own, factor)


def _constant(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, value = args
    if not _ours(tensor) or isinstance(value, DTensor):
        return _torch.dtensor.without_handler(operator, args, kwargs)
    tensor.to_local().fill_(value)
    return tensor


def _out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = kwargs["out"]
    if not _ours(tensor):
        return _torch.dtensor.without_handler(operator, args, kwargs)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.copy_(operator(*args, **{**kwargs, "out": whole}))


def _scalar(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not (isinstance(tensor, DTensor) and is_waiting(tensor.device_mesh)):
        return item(operator, args, kwargs)
    return operator(tensor.full_tensor())  # torch 2.13 returns this rank's part of a sum


def _part(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = dict(zip(_names(operator), args, strict=False)).get("dim", 0)
    if not _is_cut(tensor, dim) or _is_all(operator, args):
        return part_of(operator, args, kwargs)
    raise _lost(tensor)


def _lost(tensor: Tensor) -> OsdpError:
    return OsdpError(
        f"rows of a parameter of shape {tuple(tensor.shape)} lie on other ranks: a write into "
        "a part of them would be lost. Copy a whole tensor into the parameter, or write this "
        "rank's rows into parameter.to_local()"
    )


def _names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def _is_all(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a slice is ``tensor[:]``, along any dimension."""
    if operator is not _aten.slice.Tensor:
        return False
    given = dict(zip(_names(operator), args, strict=False))
    end = given.get("end")
    to_the_end = end is None or end >= args[0].shape[given.get("dim", 0)]
    return not given.get("start") and to_the_end and given.get("step", 1) == 1


def _ours(tensor: Any) -> bool:
    """Whether a value is a parameter of a pending model, or made from one."""
    return (
        isinstance(tensor, DTensor)
        and not any(isinstance(one, Partial) for one in tensor.placements)
        and is_waiting(tensor.device_mesh)
    )


def _is_cut(tensor: Any, dim: int) -> bool:
    """Whether other ranks have some of the rows that ``dim`` counts."""
    if not _ours(tensor):
        return False
    cuts = cuts_of(tensor)
    return cuts is None or any(one == dim % tensor.dim() for _, one in cuts)


def _without_grad(handler: Any) -> Any:
    def handle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            result: Tensor = handler(operator, args, kwargs)
        return result

    return handle


_HANDLERS = {
    _fill: (
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.exponential_.default,
        _aten.log_normal_.default,
        _aten.cauchy_.default,
        _aten.bernoulli_.float,
        _aten.random_.default,
        _aten.random_.to,
        getattr(_aten.random_, "from"),
    ),
    _like: (_aten.randn_like.default, _aten.rand_like.default),
    _copy: (_aten.copy_.default,),
    _constant: (_aten.fill_.Tensor,),
    _out: (_aten.eye.out, _aten.eye.m_out),
    _scalar: (_aten._local_scalar_dense.default,),
    _row: (_aten.select.int,),
    _part: (
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.unbind.int,
    ),
}

#: The handlers of models that train.
_AFTER = {_aten._local_scalar_dense.default: item, **dict.fromkeys(VIEWS, part_of)}


def write_as_into_whole_ones() -> None:
    """Install the handlers if any model is pending, else remove them.

    Call it whenever the set of pending models changes. DTensors over meshes without a pending model
    are handled as without these handlers.
    """
    waits = any_waits()
    for handler, operators in _HANDLERS.items():
        for operator in operators:
            after = _AFTER.get(operator)
            _torch.dtensor.handle_operator(operator, _without_grad(handler) if waits else after)

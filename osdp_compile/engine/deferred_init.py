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
* One row, ``weight[padding_idx]``, is replicated to all ranks. Writes into it reach the parameter.
* Other parts of the rows are refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.tracking.pending_model import any_waits, is_waiting
from passes.types.shard_layout import ShardLayout

_aten = torch.ops.aten


def _cut_of(tensor: DTensor) -> tuple[int, ShardLayout] | None:
    """A tensor's sharded dimension and its :class:`ShardLayout`; None: it is replicated.

    On a mesh of two dimensions it is sharded over all ranks (over hosts first), or within each
    host.
    """
    mesh = tensor.device_mesh
    parts = [
        (placement.dim, mesh.size(along), mesh.get_local_rank(along))
        for along, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard)
    ]
    if not parts:
        return None
    dim, ranks, place = parts[-1]
    if len(parts) == 1:
        return dim, ShardLayout(ranks, place, "")
    _, hosts, host = parts[0]
    return dim, ShardLayout(hosts * ranks, host * ranks + place, "", hosts)


def _local_part(full: Tensor, tensor: DTensor) -> Tensor:
    """The view of ``full`` with this rank's rows, sharded as ``tensor`` is."""
    found = _cut_of(tensor)
    if found is None:
        return full
    dim, cut = found
    start, stop = cut.rows(full.shape[dim])
    return full.narrow(dim, start, stop - start)


def _fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not _ours(tensor):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    local = tensor.to_local()
    if _cut_of(tensor) is None:
        operator(local, *args[1:], **kwargs)
    elif not local.is_meta:
        whole = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device
        )
        operator(whole, *args[1:], **kwargs)
        local.copy_(_local_part(whole, tensor))
    return tensor


def _like(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _ours(args[0]):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    empty = torch.empty_like(args[0], **kwargs)
    return empty.normal_() if operator is _aten.randn_like.default else empty.uniform_()


def _copy(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, source = args[:2]
    if not _ours(tensor) or isinstance(source, DTensor):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    tensor.to_local().copy_(_local_part(source.expand(tensor.shape), tensor))
    return tensor


def _row(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = args
    if not _is_rows(tensor, dim) or tensor.is_meta:
        return _torch.without_dtensor_handler(operator, args, kwargs)
    if not -tensor.shape[0] <= index < tensor.shape[0]:
        raise IndexError(f"row {index} of a tensor of {tensor.shape[0]}")
    mesh, local = tensor.device_mesh, tensor.to_local()
    found = _cut_of(tensor)
    assert found is not None
    _, cut = found
    index %= tensor.shape[0]
    spans = [dataclasses.replace(cut, place=p).rows(tensor.shape[0]) for p in range(cut.ranks)]
    owner = next(p for p, (start, stop) in enumerate(spans) if start <= index < stop)
    here = cut.place == owner
    row = local[index - spans[owner][0]] if here else local.new_empty(local.shape[1:])
    for along in reversed(range(mesh.ndim)):  # within each host, then from the owner's host
        if isinstance(tensor.placements[along], Shard):
            owner, source = divmod(owner, mesh.size(along))
            group = mesh.get_group(along)
            dist.broadcast(row, src=dist.get_global_rank(group, source), group=group)
    return DTensor.from_local(row, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _constant(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, value = args
    if not _ours(tensor) or isinstance(value, DTensor):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    tensor.to_local().fill_(value)
    return tensor


def _out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = kwargs["out"]
    if not _ours(tensor):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.copy_(operator(*args, **{**kwargs, "out": whole}))


def _scalar(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not (isinstance(tensor, DTensor) and is_waiting(tensor.device_mesh)):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    return operator(tensor.full_tensor())  # torch 2.13 returns this rank's part of a sum


def _part(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = dict(zip(_names(operator), args, strict=False)).get("dim", 0)
    if not _is_rows(tensor, dim) or _is_all(operator, args):
        return _torch.without_dtensor_handler(operator, args, kwargs)
    raise OsdpError(
        f"rows of a parameter of shape {tuple(tensor.shape)} lie on other ranks: a write into "
        "a part of them would be lost. Copy a whole tensor into the parameter, or write this "
        "rank's rows into parameter.to_local()"
    )


def _names(operator: Any) -> list[str]:
    return [argument.name for argument in operator._schema.arguments]


def _is_all(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a slice is ``tensor[:]``."""
    if operator is not _aten.slice.Tensor:
        return False
    given = dict(zip(_names(operator), args, strict=False))
    end = given.get("end")
    to_the_end = end is None or end >= args[0].shape[0]
    return not given.get("start") and to_the_end and given.get("step", 1) == 1


def _ours(tensor: Any) -> bool:
    """Whether a value is a parameter of a pending model, or made from one."""
    return (
        isinstance(tensor, DTensor)
        and not any(isinstance(one, Partial) for one in tensor.placements)
        and is_waiting(tensor.device_mesh)
    )


def _is_rows(tensor: Any, dim: int) -> bool:
    """Whether ``dim`` is the first dimension, and the tensor is sharded along it."""
    if dim % tensor.dim() != 0 or not _ours(tensor):
        return False
    found = _cut_of(tensor)
    return found is not None and found[0] == 0


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


def write_as_into_whole_ones() -> None:
    """Install the handlers if any model is pending, else remove them.

    Call it whenever the set of pending models changes. torch still handles DTensors over meshes
    without a pending model.
    """
    waits = any_waits()
    for handler, operators in _HANDLERS.items():
        for operator in operators:
            _torch.handle_dtensor_operator(operator, _without_grad(handler) if waits else None)

"""Written rows: writes into parts of sharded parameters and gradients, such as ``weight[:4] = 0``.

Torch gathers such a part. A write changes the gathered copy and not the rows of the ranks. So each
rank copies its own rows out of the part after a write. All ranks make the same writes in the same
order.

Torch 2.11.0 does not dispatch to the class of the part. There handlers of all operators that write
or view take its place, from the first part on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.runtime.meshes import own_rows, placed_like

_aten = torch.ops.aten
#: Operators whose result is a view of any other tensor.
VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.diagonal.default,
)


def keep_writes() -> None:
    """Keep writes into parts of DTensors from now on."""
    for operator in VIEWS:
        _torch.dtensor.handle_operator(operator, part_of)


def part_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator; what it gathers is a :class:`Part`."""
    tensor = args[0]
    if type(tensor) is Part:
        return _run(operator, args, kwargs)
    result = _torch.dtensor.without_handler(operator, args, kwargs)
    # While torch traces, the local tensor is a fake one.
    if type(tensor.to_local()) is not Tensor:
        return result
    many = isinstance(result, list | tuple)
    for place, one in enumerate(result if many else [result]):
        if not _shares_memory(one, tensor):
            view = functools.partial(_view, operator, args[1:], kwargs, place if many else None)
            _make_part(one, functools.partial(_copy_back, tensor, view))
    return result


def _view(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int | None, whole: Tensor
) -> Tensor:
    """The part of a whole tensor. ``place``: which of several results."""
    result: Any = operator(whole, *args, **kwargs)
    view: Tensor = result if place is None else result[place]
    return view


@torch.no_grad()
def _copy_back(tensor: DTensor, view: Callable[[Tensor], Tensor], part: Tensor) -> None:
    """Copy this rank's rows out of a part, which is whole. Collective."""
    detached: Any = tensor.detach()
    whole: Tensor = detached.full_tensor()
    view(whole).copy_(part)
    tensor.to_local().copy_(own_rows(whole, tensor))


def _make_part(tensor: DTensor, copy_back: Callable[[Tensor], None]) -> None:
    if not _torch.dtensor.DISPATCHES_TO_SUBCLASSES:
        _handle_all()
    tensor.__class__ = Part
    tensor.__dict__["copy_back"] = copy_back


def _shares_memory(one: DTensor, other: DTensor) -> bool:
    pointers = (t.to_local().untyped_storage().data_ptr() for t in (one, other))
    return len(set(pointers)) == 1


class Part(DTensor):
    """A gathered part of a sharded tensor, whole on every rank. Writes reach the tensor.

    ``copy_back``: takes the local tensor after a write.
    """

    copy_back: Callable[[Tensor], None]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, kwargs or {})


@functools.cache
def _handle_all() -> None:
    """Let each operator that writes or views look for parts, if it has no handler."""
    for operator in _torch.operators.all_aten():
        aliases = any(one.alias_info for one in operator._schema.arguments)
        if aliases and not _torch.dtensor.has_handler(operator):
            _torch.dtensor.handle_operator(operator, _run_if_part)


def _run_if_part(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(type(one) is Part for one in _torch.tensors.tree_leaves((args, kwargs))):
        return _run(operator, args, kwargs)
    return _torch.dtensor.without_handler(operator, args, kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on parts and other tensors."""
    written = [one for one in _written(func, args, kwargs) if isinstance(one, Part)]
    if not written:
        return _read(func, args, kwargs)
    for part in written:
        _check(func, part)
    local = _torch.tensors.tree_map_only(DTensor, _whole, (args, kwargs))
    func(*local[0], **local[1])
    for part in written:
        part.copy_back(part.to_local())
    return written[0] if func._schema.returns else None


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes no part. A view of a part is written back with it."""
    given = _torch.tensors.tree_map_only(
        Part, lambda one: placed_like(one, one.to_local()), (args, kwargs)
    )
    result = func(*given[0], **given[1])
    part = args[0] if args else None
    for one in _torch.tensors.tree_leaves(result):
        if type(part) is Part and isinstance(one, DTensor) and _shares_memory(one, part):
            _make_part(one, lambda _: part.copy_back(part.to_local()))  # the part has the values
    return result


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operator writes."""
    schema = func._schema.arguments
    given = {**dict(zip((one.name for one in schema), args, strict=False)), **kwargs}
    writes = (one.name for one in schema if one.alias_info and one.alias_info.is_write)
    return [one for name in writes for one in _torch.tensors.tree_leaves(given.get(name))]


def _check(func: Any, part: Part) -> None:
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise OsdpError(
            f"{func} draws random numbers into a part of a sharded tensor, other ones on every "
            "rank: draw into a plain tensor on rank 0, broadcast it, and assign it to the part"
        )
    if not all(one.is_replicate() for one in part.placements):
        raise OsdpError(
            f"a write into a part of a sharded tensor that is {part.placements} would be lost: "
            "write this rank's rows into parameter.to_local()"
        )


def _whole(tensor: DTensor) -> Tensor:
    return tensor.to_local() if type(tensor) is Part else tensor.full_tensor()

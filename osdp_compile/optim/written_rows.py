"""Written rows: writes into parts of sharded parameters and gradients, such as ``weight[:4] = 0``.

Torch gathers the part, because its rows lie on several ranks. A write changes what was gathered and
is lost, without a message. So a part knows its tensor: after a write each rank copies its own rows
out of the part. The ranks have to write the same, in the same order.

2.11.0 asks the class of the part for no operator. There such a write is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.runtime.meshes import own_rows

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
        _torch.handle_dtensor_operator(operator, part_of)


def part_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator; what it gathers is a :class:`Part`."""
    tensor, result = args[0], _torch.without_dtensor_handler(operator, args, kwargs)
    # While torch traces, the local tensor is a fake one.
    if type(tensor.to_local()) is not Tensor:
        return result
    many = isinstance(result, list | tuple)
    for place, one in enumerate(result if many else [result]):
        if not _shares_memory(one, tensor):
            _make_part(one, Write(tensor, operator, args[1:], kwargs, place if many else None))
    return result


def _make_part(tensor: DTensor, write: Write | _Through) -> None:
    tensor.__class__ = Part
    tensor.__dict__["write"] = write


def _shares_memory(one: DTensor, other: DTensor) -> bool:
    pointers = (t.to_local().untyped_storage().data_ptr() for t in (one, other))
    return len(set(pointers)) == 1


class Write:
    """How a part is written back.

    ``tensor``: of which it is a part. ``operator``, ``args`` (after the tensor), ``kwargs``: the
    view. ``place``: which of several results.
    """

    def __init__(
        self,
        tensor: DTensor,
        operator: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        place: int | None,
    ) -> None:
        self._tensor, self._view, self._place = tensor, (operator, args, kwargs), place

    @torch.no_grad()
    def back(self, part: Tensor) -> None:
        """Copy this rank's rows out of the whole part. Collective."""
        operator, args, kwargs = self._view
        whole = self._tensor.full_tensor()
        view = operator(whole, *args, **kwargs)
        (view if self._place is None else view[self._place]).copy_(part)
        self._tensor.to_local().copy_(own_rows(whole, self._tensor))


class Part(DTensor):
    """A gathered part of a sharded tensor, whole on every rank. Writes reach the tensor."""

    write: Write | _Through

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = [one for one in _written(func, args, kwargs) if isinstance(one, Part)]
        if not written:
            return _read(func, args, kwargs)
        for part in written:
            _check(func, part)
        local = _torch.tree_map_only(DTensor, _whole, (args, kwargs))
        func(*local[0], **local[1])
        for part in written:
            part.write.back(part.to_local())
        return written[0] if func._schema.returns else None


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes no part. A view of a part is written back with it."""
    given = _torch.tree_map_only(Part, _plain, (args, kwargs))
    result = func(*given[0], **given[1])
    part = args[0] if args else None
    for one in _torch.tree_leaves(result):
        if type(part) is Part and isinstance(one, DTensor) and _shares_memory(one, part):
            _make_part(one, _Through(part))
    return result


class _Through:
    """The write of a view of a part: the part has the values already."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def back(self, _: Tensor) -> None:
        self._part.write.back(self._part.to_local())


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operator writes."""
    schema = func._schema.arguments
    given = {**dict(zip((one.name for one in schema), args, strict=False)), **kwargs}
    writes = (one.name for one in schema if one.alias_info and one.alias_info.is_write)
    return [one for name in writes for one in _torch.tree_leaves(given.get(name))]


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


def _plain(part: Part) -> DTensor:
    return DTensor.from_local(
        part.to_local(),
        part.device_mesh,
        part.placements,
        run_check=False,
        shape=part.shape,
        stride=part.stride(),
    )

"""DTensors: their handlers, their placements, and the local tensors that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

# 2.13.0, 2.15.0: the placement of FSDP2 after tensor parallelism.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard

from osdp_compile.torch_versions import release


def forget_placements() -> None:
    """Empty DTensor's caches of placements by operator.

    The output of a distributed embedding is a partial sum, whose placement holds a mask until the
    sum is complete. In a graph that ends before, this is a mask of the trace, and the next trace of
    such an embedding fails: it finds the placement in the cache.
    """
    _clear_sharding_prop_cache()  # 2.13.0, 2.15.0


def tensor_inside(tensor: DTensor) -> Tensor:
    """The local tensor that a DTensor holds; ``to_local()`` of a parameter is a view of it."""
    # 2.13.0, 2.15.0: DTensor._local_tensor
    local: Tensor = tensor._local_tensor
    return local


def strided_shard(dim: int, parts: int) -> Placement:
    """FSDP2's placement of rows that other mesh dimensions cut into ``parts`` before."""
    return _StridedShard(dim, split_factor=parts)


def split_factor(placement: Placement) -> int | None:
    """The parts before, of a placement of :func:`strided_shard`; None: it is another placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


# 2.13.0: DTensor's operator -> custom handler(operator, args, kwargs).
_handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers


#: Whether operators on a subclass of DTensor go to its ``__torch_dispatch__``. 2.11.0: they go to
#: DTensor's.
DISPATCHES_TO_SUBCLASSES = release(torch.__version__) > (2, 11)


def has_handler(operator: Any) -> bool:
    """Whether an operator on DTensors has a handler of ours, or one of torch's."""
    return operator in _handlers


def handle_operator(operator: Any, handler: Callable[..., Any] | None) -> None:
    """Set ``handler(operator, args, kwargs)`` for an operator on DTensors; None: torch's own."""
    if handler is None:
        _handlers.pop(operator, None)
    else:
        _handlers[operator] = handler


def handle_data(assign: Callable[[DTensor, Any], None]) -> None:
    """Make ``dtensor.data = value`` call ``assign(dtensor, value)``."""
    # 2.13.0: torch sets the wrapper's data. The local tensor stays the same.
    plain: Any = Tensor.data
    setattr(DTensor, "data", property(plain.__get__, assign))  # noqa: B010


def without_handler(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on DTensors without our handler."""
    handler = _handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        _handlers[operator] = handler

"""torch.distributed: DDP, FSDP, meshes, process groups, and handlers of operators on DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# 2.11.0 to 2.15.0: makes wait_tensor(tensor) wait for a Work; a tensor can have several.
from torch._C._distributed_c10d import _register_work as register_work

# TracingContext, 2.13.0: the fake tensor mode of the graph being compiled.
from torch._guards import TracingContext

# 2.11.0 to 2.15.0: a graph input that stands for an object, such as a DeviceMesh.
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# 2.13.0: Adafactor's functional step of a group, on lists.
from torch.optim import _adafactor

#: Torch's own names; others use them as they are.
__all__ = ["register_work"]


def reduced_by_ddp() -> list[nn.Parameter]:
    """The parameters of the DistributedDataParallel module being called, if any."""
    # 2.11.0 to 2.15.0: Dynamo itself calls this to split graphs at DDP's buckets.
    active = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return [] if active is None else list(active._module_parameters)


def is_marked_by_fsdp(module: nn.Module) -> bool:
    """Whether a module is inside one that FSDP1 or FSDP2 shards."""
    # 2.11.0 to 2.15.0: both mark modules for Dynamo with this attribute.
    return bool(module.__dict__.get("_is_fsdp_managed_module", False))


def fake_store() -> Any:
    """A store for the "fake" process group backend, whose collectives do nothing."""
    # 2.11.0 to 2.15.0: imported here, because the import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh over a named mesh's ranks, made once. Collective."""
    # 2.13.0: DeviceMesh._flatten; ``mesh["host_gpu"]`` finds it afterwards.
    return mesh._flatten()


def real_meshes(inputs: Sequence[Any]) -> list[Any]:
    """A graph's inputs with real meshes in place of fake ones.

    Inductor's cache key numbers real meshes. It pickles a fake mesh in a mode in which the key of
    equal graphs differs between processes (2.13.0 to 2.15.0).
    """
    return [_real_mesh(one) for one in inputs]


def _real_mesh(value: Any) -> Any:
    real = value.real_obj if isinstance(value, FakeScriptObject) else None
    return real if isinstance(real, DeviceMesh) else value


# 2.13.0: DTensor's operator -> custom handler(operator, args, kwargs).
_dtensor_handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers


def handle_dtensor_operator(operator: Any, handler: Callable[..., Any] | None) -> None:
    """Set ``handler(operator, args, kwargs)`` for an operator on DTensors; None: torch's own."""
    if handler is None:
        _dtensor_handlers.pop(operator, None)
    else:
        _dtensor_handlers[operator] = handler


def without_dtensor_handler(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on DTensors without our handler."""
    handler = _dtensor_handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        _dtensor_handlers[operator] = handler


def handle_adafactor(on_rows: Callable[..., None]) -> None:
    """Make Adafactor step each DTensor parameter with ``on_rows(parameter, ...)``."""
    # 2.13.0: Adafactor.step calls this for a group: lists of tensors, then options.
    plain: Callable[..., None] = _adafactor.adafactor

    @functools.wraps(plain)
    def adafactor(params: list[Tensor], *lists: Any, **options: Any) -> None:
        state, rest = lists[:5], lists[5:]
        of_params = list(zip(params, *state, strict=True))
        whole = [one for one in of_params if not isinstance(one[0], DTensor)]
        if whole:
            plain(*map(list, zip(*whole, strict=True)), *rest, **options)
        for one in of_params:
            if isinstance(one[0], DTensor):
                on_rows(*one, **options)

    _adafactor.adafactor = adafactor


def whole_stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A whole fake parameter in place of a DTensor parameter of the graph being compiled."""
    mode = TracingContext.get().fake_mode
    assert mode is not None  # a backend is called with one
    with mode:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)

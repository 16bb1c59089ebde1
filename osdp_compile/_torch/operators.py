"""Operators: the kernels of attention, what a trace calls in their place, and autocast."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

# 2.11.0 to 2.15.0: an operator for given types of arguments, and one for all types.
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.attention import SDPBackend

from osdp_compile._torch.replaced import replaced

__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "all_aten",
    "attention_order",
    "autocast_operators",
    "traced_as",
    "with_cpu_autocast",
    "with_entered_autocast",
]


def all_aten() -> Iterator[OpOverload]:
    """All operators of aten."""
    for name in torch._C._dispatch_get_all_op_names():  # 2.11.0, 2.13.0, 2.15.0
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def attention_order() -> list[SDPBackend]:
    """The kernels of ``scaled_dot_product_attention``, the preferred one first."""
    # 2.11.0 to 2.15.0
    named: Mapping[str, Any] = SDPBackend.__members__
    members = {int(one): one for one in named.values()}
    return [members[one] for one in torch._C._get_sdp_priority_order()]


@contextlib.contextmanager
def traced_as(operator: OpOverload, function: Callable[..., Any]) -> Iterator[None]:
    """Context: a trace calls a function in place of a composite operator; eager code does not."""
    # 2.11.0 to 2.15.0: py_kernels holds the functions that a trace calls, by dispatch key.
    # _dispatch_cache holds the functions of earlier calls, by dispatch key.
    own = dict(operator.py_kernels)
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    try:
        operator.py_kernels.update(dict.fromkeys(keys, function))
        operator._dispatch_cache.clear()
        yield
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(own)
        operator._dispatch_cache.clear()


def autocast_operators(device: str) -> set[str]:
    """Operators that autocast changes on a device, ``CPU`` or ``CUDA``, as ``softmax.int``."""
    # 2.11.0 to 2.15.0
    found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


@contextlib.contextmanager
def with_cpu_autocast(kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Context: the CPU's autocast runs these functions for these operators; None: it ignores them.

    Inside a function autocast is off.
    """
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def below(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):  # 2.11.0 to 2.15.0
                return function(*args, **kwargs)

        return call

    # 2.11.0 to 2.15.0: a library whose kernels go with its end.
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, function in kernels.items():
                kernel = torch.library.fallthrough_kernel if function is None else below(function)
                library.impl(name, kernel, "AutocastCPU")
        yield


def with_entered_autocast(changed: Callable[..., tuple[Any, ...]]) -> AbstractContextManager[None]:
    """A context in which a compiled ``torch.autocast(...)`` enters one of other arguments."""

    def entering(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: plain(*changed(*given))

    # 2.11.0 to 2.15.0: Dynamo calls it, and writes the call into the graph.
    return replaced(torch.amp, "_enter_autocast", entering)

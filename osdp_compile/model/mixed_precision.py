"""Precision: the data types in which parameters are gathered and computed with, and gradients sent.

With ``param_dtype`` every module that owns parameters reads them in it, and casts what it is
called with to it; the parameters themselves, their gradients and the optimizer's state keep their
type. The cast stands before the gather, so that the network carries the smaller type. With
``reduce_dtype`` gradients travel in it; without, in the type they were computed in. What the loss
is made of is in ``param_dtype`` too, as with FSDP2's ``MixedPrecisionPolicy``.

Before the first call nothing is laid out, and what is planned on must be the graph that will run:
so the model is traced once more, with its parameters cast where they are read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which types parameters are read, and gradients travel; None: in their own."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def casts(self, tensor: Tensor) -> bool:
        """Whether a parameter is another tensor in ``param_dtype``."""
        dtype = self.param_dtype
        return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype

    def gradient_dtype(self, parameter: Tensor) -> torch.dtype:
        """In which type a parameter's gradients travel."""
        marks = self.marks(parameter)
        return marks.get("reduce_dtype", marks.get("dtype", parameter.dtype))

    def marks(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """What the markers of a parameter say of it (``passes/ops/markers.py``)."""
        found: dict[str, torch.dtype] = {}
        if not parameter.is_floating_point():
            return found
        if self.casts(parameter):
            assert self.param_dtype is not None
            found["dtype"] = self.param_dtype
        if self.reduce_dtype is not None:
            found["reduce_dtype"] = self.reduce_dtype
        return found


#: All in their own types.
OWN_PRECISION = Precision()


def subclass(module: nn.Module, members: dict[str, Any]) -> None:
    """Give a module a class of its own: that which it has, and some members more."""
    cls = type(module)
    named = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
    module.__class__ = type(cls.__name__, (cls,), {**members, **named})


def cast_what_it_is_called_with(
    module: nn.Module, dtype: torch.dtype, cast: Callable[[], bool]
) -> None:
    """From now on a module casts the tensors that it is called with, where traced or ``cast()``."""
    cls = type(module)

    def as_read(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or cast():
            args = tuple([as_read(one) for one in args])
            kwargs = {name: as_read(one) for name, one in kwargs.items()}
        return cls.forward(self, *args, **kwargs)

    subclass(module, {"forward": forward})


#: Modules that are traced with cast parameters, with what their parameters are read in.
_cast: WeakKeyDictionary[nn.Module, tuple[Precision, type[nn.Module]]] = WeakKeyDictionary()


def is_cast(modules: Sequence[nn.Module], precision: Precision) -> bool:
    """Whether all that own parameters are traced so."""
    if precision.param_dtype is None:
        return not any(module in _cast for module in modules)
    return all(_cast.get(module, (None,))[0] == precision for module in owners(modules))


def cast_while_traced(modules: Sequence[nn.Module], precision: Precision) -> None:
    """Have modules read their parameters cast wherever Dynamo traces them, and only there."""
    end_casting(modules)
    if precision.param_dtype is None:
        return
    for module in owners(modules):
        _cast[module] = (precision, type(module))
        held = {name: one for name, one in module._parameters.items() if one is not None}
        cast = [name for name, one in held.items() if precision.casts(one)]
        subclass(module, {name: _cast_reader(name, precision.param_dtype) for name in cast})
        cast_what_it_is_called_with(module, precision.param_dtype, lambda: False)


def end_casting(modules: Sequence[nn.Module]) -> None:
    """Undo :func:`cast_while_traced`."""
    for module in modules:
        if module in _cast:
            _, module.__class__ = _cast.pop(module)


@contextmanager
def traced_cast(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Inside, a model is traced with cast parameters; then it is as it was."""
    modules = [*model.modules()]
    cast_while_traced(modules, precision)
    try:
        yield
    finally:
        end_casting(modules)


def owners(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that hold parameters themselves."""
    return [one for one in modules if any(p is not None for p in one._parameters.values())]


def _cast_reader(attribute: str, dtype: torch.dtype) -> property:
    def read(module: nn.Module) -> Any:
        parameter: Any = module._parameters[attribute]
        return parameter.to(dtype) if torch.compiler.is_compiling() else parameter

    return property(read)

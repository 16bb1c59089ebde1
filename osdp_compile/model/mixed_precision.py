"""Mixed precision: data types of gathered parameters, of compute, and of reduced gradients.

With ``param_dtype`` every module that owns parameters reads them in this type, and casts its
floating-point arguments to it. Stored parameters, their gradients and the optimizer's state keep
their type. The cast precedes the gather, so the network carries the smaller type. With
``reduce_dtype`` gradients are reduced in this type; without it, in their compute type. The inputs
of the loss are in ``param_dtype`` too, as with FSDP2's ``MixedPrecisionPolicy``.

Before the first call no parameter is laid out, but the planner needs the graph that will run. So
the model is traced once more, with casts at the reads of its parameters.
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
    """Data types of parameter reads and of gradient reductions; None: their own type."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def casts(self, tensor: Tensor) -> bool:
        """Whether the read of a parameter casts it to ``param_dtype``."""
        dtype = self.param_dtype
        return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype

    def gradient_dtype(self, parameter: Tensor) -> torch.dtype:
        """The data type of the reduction of a parameter's gradient."""
        marks = self.marks(parameter)
        return marks.get("reduce_dtype", marks.get("dtype", parameter.dtype))

    def marks(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """Data type arguments of the parameter's markers (``passes/ops/markers.py``)."""
        found: dict[str, torch.dtype] = {}
        if not parameter.is_floating_point():
            return found
        if self.casts(parameter):
            assert self.param_dtype is not None
            found["dtype"] = self.param_dtype
        if self.reduce_dtype is not None:
            found["reduce_dtype"] = self.reduce_dtype
        return found


#: No casts.
OWN_PRECISION = Precision()


def subclass(module: nn.Module, members: dict[str, Any]) -> None:
    """Give a module a subclass of its class, with extra members, for this instance only."""
    cls = type(module)
    named = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
    module.__class__ = type(cls.__name__, (cls,), {**members, **named})


def cast_what_it_is_called_with(
    module: nn.Module, dtype: torch.dtype, cast: Callable[[], bool]
) -> None:
    """Make a module cast its floating-point arguments, if traced or if ``cast()``."""
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


#: Modules traced with cast parameters -> their precision and their original class.
_cast: WeakKeyDictionary[nn.Module, tuple[Precision, type[nn.Module]]] = WeakKeyDictionary()


def is_cast(modules: Sequence[nn.Module], precision: Precision) -> bool:
    """Whether all modules with own parameters are traced with this precision."""
    if precision.param_dtype is None:
        return not any(module in _cast for module in modules)
    return all(_cast.get(module, (None,))[0] == precision for module in owners(modules))


def cast_while_traced(modules: Sequence[nn.Module], precision: Precision) -> None:
    """Make modules cast their parameters at the read, only while Dynamo traces them."""
    end_casting(modules)
    if precision.param_dtype is None:
        return
    for module in owners(modules):
        _cast[module] = (precision, type(module))
        held = {name: one for name, one in module._parameters.items() if one is not None}
        cast = [name for name, one in held.items() if precision.casts(one)]
        cls = type(module)
        subclass(module, {name: _cast_reader(cls, name, precision.param_dtype) for name in cast})
        cast_what_it_is_called_with(module, precision.param_dtype, lambda: False)


def end_casting(modules: Sequence[nn.Module]) -> None:
    """Undo :func:`cast_while_traced`."""
    for module in modules:
        if module in _cast:
            _, module.__class__ = _cast.pop(module)


@contextmanager
def traced_cast(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Context: trace a model with cast parameters; undone on exit."""
    modules = [*model.modules()]
    cast_while_traced(modules, precision)
    try:
        yield
    finally:
        end_casting(modules)


def owners(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with parameters of their own."""
    return [one for one in modules if any(p is not None for p in one._parameters.values())]


def _cast_reader(cls: type[nn.Module], attribute: str, dtype: torch.dtype) -> property:
    """``cls``: the module's class; it may read the parameter as a DTensor (``other_dims.py``)."""
    below = getattr(cls, attribute, None)
    as_read = getattr(below, "as_read", None)

    def read(module: nn.Module) -> Any:
        parameter: Any = module._parameters[attribute]
        if as_read is not None and torch.compiler.is_compiling():
            return as_read(parameter.to(dtype))
        return parameter.to(dtype) if torch.compiler.is_compiling() else parameter

    return property(read)

"""Reads of a sharded model's parameters.

Every module with own parameters gets a subclass of its class. Inside a forward
(:mod:`osdp_compile.runtime.inside_forward`) the attribute of the subclass gives the full parameter
through a marker. Elsewhere, and everywhere between ``osdp_compile.shard`` and the first compiled
call, the attribute gives the stored parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.model.alike_frames import AlikeFrames
from osdp_compile.model.mixed_precision import (
    OWN_PRECISION,
    Precision,
    cast_what_it_is_called_with,
    subclass,
)
from osdp_compile.model.model_parameters import ModelParameter
from osdp_compile.model.other_dims import OtherDims
from osdp_compile.runtime import eager_markers
from osdp_compile.runtime.inside_forward import is_inside_forward
from osdp_compile.sharding import gradient_leaves, state_dict
from osdp_compile.sharding.dtensor_layout import part_of_whole
from passes.types.context import Context

#: Module attributes, of modules that share a class: by attribute, the name and the leaf of a
#: parameter.
_NAMES, _LEAVES = "_osdp_names", "_osdp_leaves"


class Reading:
    """How the modules of one model read their parameters inside a forward.

    ``in_place``: parameters that are plain tensors now (``full_parameters``) read as they are.
    ``precision``: data types of reads and of gradient reductions.
    ``alike``: the frames that share compiled code.
    ``leaves``: by parameter name, the leaf that gets its whole gradient inside ``no_sync``
    (``osdp_compile/model/gradient_leaves.py``); None outside.
    ``assigned``: names of parameters whose ``data`` the forward assigns.
    """

    def __init__(self, precision: Precision = OWN_PRECISION) -> None:
        self.in_place = False
        self.precision = precision
        self.alike = AlikeFrames()
        self.leaves: dict[str, Tensor] | None = None
        self.assigned: set[str] = set()
        self._shared: list[weakref.ref[nn.Module]] = []
        #: Modules with readers, each with its class before and its class with them.
        self._classes: list[tuple[weakref.ref[nn.Module], type[nn.Module], type[nn.Module]]] = []

    def shares_class(self, module: nn.Module, names: dict[str, str]) -> None:
        """Note a module that shares its class. ``names``: by attribute, the parameters' names."""
        module.__dict__[_NAMES] = names
        self._shared.append(weakref.ref(module))

    def gives_class(self, module: nn.Module, before: type[nn.Module]) -> None:
        """Note a module that has its readers now. ``before``: its class without them."""
        self._classes.append((weakref.ref(module), before, type(module)))

    def take_back_classes(self) -> None:
        """Take the readers of all modules away. A class that other code changed since stays."""
        for reference, before, given in self._classes:
            module = reference()
            if module is not None and type(module) is given:
                module.__class__ = before
                module.__dict__.pop(_NAMES, None)
        self._classes.clear()
        self._shared.clear()

    def use_leaves(self, leaves: dict[str, Tensor] | None) -> None:
        """Begin (or with None end) to read parameters through leaves.

        Code that modules share finds the leaves at the module.
        """
        self.leaves = leaves
        for module in filter(None, (one() for one in self._shared)):
            module.__dict__.pop(_LEAVES, None)
            if leaves is not None:
                names = module.__dict__[_NAMES]
                module.__dict__[_LEAVES] = {at: leaves.get(name) for at, name in names.items()}

    def is_cast(self) -> bool:
        """Whether uncompiled code reads parameters in these types too."""
        return not self.in_place


def read_through_markers(
    parameters: Sequence[ModelParameter],
    ctx: Context,
    reading: Reading,
    mesh: DeviceMesh | None,
) -> None:
    """Give every module that owns one of the parameters its readers.

    ``mesh``: of the DTensor parameters; None: plain parameters.
    """
    places: dict[int, dict[str, ModelParameter]] = {}
    owners: dict[int, nn.Module] = {}
    for entry in parameters:
        for module, attribute in entry.places:
            owners[id(module)] = module
            places.setdefault(id(module), {})[attribute] = entry
    shared: dict[Hashable, type[nn.Module]] = {}
    for key, module in owners.items():
        kind = _kind(module, places[key], ctx, reading)
        before = type(module)
        if kind is not None:
            reading.shares_class(module, {at: one.name for at, one in places[key].items()})
        if kind in shared:
            module.__class__ = shared[kind]
        else:
            _read_through_markers(module, places[key], ctx, reading, mesh, kind is not None)
        if kind is not None:
            shared[kind] = type(module)
        reading.gives_class(module, before)


def _kind(
    module: nn.Module, parameters: Mapping[str, ModelParameter], ctx: Context, reading: Reading
) -> Hashable | None:
    """What the class of a module depends on; None: the module has a class of its own.

    ``parameters``: by attribute.
    """
    first_of = reading.alike.first_of
    if not all(one.name in first_of for one in parameters.values()):
        return None
    if any(one.others is not None for one in parameters.values()):
        return None
    read = (
        (
            attribute,
            first_of[one.name],
            tuple(one.parameter.shape),
            ctx.layout_of(one.name),
            *reading.precision.marks(one.parameter).items(),
        )
        for attribute, one in parameters.items()
    )
    return type(module), *read


def _read_through_markers(
    module: nn.Module,
    parameters: Mapping[str, ModelParameter],
    ctx: Context,
    reading: Reading,
    mesh: DeviceMesh | None,
    is_shared: bool,
) -> None:
    """Give a module its readers. ``parameters``: by attribute."""
    readers: dict[str, property] = {}
    parts: dict[str, Callable[[Tensor], DTensor]] = {}
    for attribute, entry in parameters.items():
        decision, cut = ctx.plan.decision(entry.name), ctx.layout_of(entry.name)
        readers[attribute] = _reader(
            reading.alike.first_of[entry.name] if is_shared else entry.name,
            attribute,
            tuple(entry.shape),
            decision.sharded,
            cut.marks,
            reading,
            mesh is None,
            reading.precision.marks(entry.parameter),
            entry.others,
            is_shared,
        )
        if mesh is not None:
            parts[attribute] = part_of_whole(mesh, decision, cut, entry.others)
    _swap_class(module, readers, parts)
    if reading.precision.param_dtype is not None:
        cast_what_it_is_called_with(module, reading.precision.param_dtype, reading.is_cast)


def _swap_class(
    module: nn.Module,
    readers: dict[str, property],
    parts: dict[str, Callable[[Tensor], DTensor]],
) -> None:
    """Give a module a class with readers; ``parts``: attribute -> layout of a whole parameter."""
    members: dict[str, Any] = dict(readers)
    if parts:
        members.update(state_dict.members(type(module), parts))
    if isinstance(module, nn.RNNBase):
        members["_flat_weights"] = property(_flat_weights, lambda module, value: None)
        # 2.13.0: references to the parameters of before, which Dynamo would guard on.
        module.__dict__["_flat_weight_refs"] = [None] * len(module._flat_weights_names)
    subclass(module, members)


def _flat_weights(module: Any) -> list[Tensor]:
    """nn.RNNBase's list of parameters, read through the markers."""
    return [getattr(module, name) for name in module._flat_weights_names]


def _reader(
    name: str,
    attribute: str,
    shape: tuple[int, ...],
    sharded: bool,
    marks: tuple[str | int, ...],
    reading: Reading,
    plain: bool,
    dtypes: dict[str, torch.dtype],
    others: OtherDims | None,
    is_shared: bool,
) -> property:
    """The property for a module's read of one of its parameters.

    ``plain``: the parameter is no DTensor. ``dtypes``: of its marker. ``others``: its placement on
    other mesh dimensions. ``is_shared``: alike modules read by this property, too.
    """
    as_read = None if others is None or others.reads_local else others.as_read

    def own_name(module: nn.Module) -> str:
        return getattr(module, _NAMES)[attribute] if is_shared else name

    def read(module: nn.Module) -> Any:
        parameter: Any = module._parameters[attribute]
        if not torch.compiler.is_compiling():
            in_place = reading.in_place and not isinstance(parameter, DTensor)
            if in_place or not is_inside_forward():
                return parameter
        local = parameter
        if not plain:
            if not isinstance(parameter, DTensor):
                raise_replaced(own_name(module))
            if parameter.device.type == "meta":
                raise_on_meta(f"parameter {own_name(module)!r}")
            local = parameter.to_local()
        full = eager_markers.read(local, name, shape, sharded, *marks, **dtypes)
        leaves = reading.leaves
        if leaves is not None and torch.is_grad_enabled():
            # A copy of the module has no leaves: its gradients are reduced.
            of_module = getattr(module, _LEAVES, {}) if is_shared else leaves
            leaf = of_module.get(attribute if is_shared else name)
            if leaf is not None:
                full = gradient_leaves.to_leaf(leaf, full.detach())
        return full if as_read is None else as_read(full)

    # A frame that Dynamo skips (an nn.Sequential around a graph break) may call ``read``. Dynamo
    # would compile it as a frame of its own, with dynamic sizes as arguments.
    _torch.dynamo.skip_code(read.__code__)
    return property(read)


# Dynamo calls these two during the trace and does not trace them, so their errors end the
# compilation. It would take traced errors for the model's own and run the model uncompiled.
@torch.compiler.assume_constant_result
def raise_replaced(name: str) -> NoReturn:
    """Refuse a model in which a plain tensor replaced a sharded parameter."""
    _torch.dynamo.raise_to_user(
        OsdpError(
            f"parameter {name!r} was replaced by a plain tensor after the model was sharded: write "
            "into the parameter instead (load_state_dict without assign=True, copy_). Inside "
            "osdp_compile.full_parameters call the model itself, not the result of torch.compile"
        )
    )


@torch.compiler.assume_constant_result
def raise_on_meta(what: str) -> NoReturn:
    """Refuse a parameter or buffer without memory."""
    _torch.dynamo.raise_to_user(
        OsdpError(
            f"{what} is still on the meta device: call model.to_empty(device=...) and initialise "
            "the model before the first compiled call"
        )
    )

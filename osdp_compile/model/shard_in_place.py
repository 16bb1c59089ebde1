"""In-place sharding: replace a model's parameters by DTensors as a plan says.

A ``DTensor`` parameter of the same name (``Shard`` or ``Replicate()``) replaces every parameter.
Every module with own parameters gets a subclass of its class. Inside a forward
(:mod:`osdp_compile.runtime.inside_forward`) the attribute of the subclass gives the full parameter
through a marker. Elsewhere, and everywhere between ``osdp_compile.shard`` and the first compiled
call, the attribute gives the stored parameter.

All parameters are DTensors on one mesh, because ``clip_grad_norm_`` supports no mix: on the flat
mesh over all ranks, or on the mesh of hosts and ranks if the plan shards within hosts. If a plan
shards nothing, all parameters stay plain tensors, as in DDP: an optimizer's step dispatches a dozen
operators for each parameter, and for a small DTensor the dispatch takes longer than the arithmetic.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from osdp_compile import _torch
from osdp_compile.errors import OsdpError, PlanMismatch
from osdp_compile.live_objects import living
from osdp_compile.model import gradient_leaves, state_dict
from osdp_compile.model.alike_frames import AlikeFrames
from osdp_compile.model.mixed_precision import (
    OWN_PRECISION,
    Precision,
    cast_what_it_is_called_with,
    subclass,
)
from osdp_compile.model.other_dims import OtherDims, local_before, other_dims_of
from osdp_compile.optim.checks import replaced
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.optim.replaced_parameter import stands_for
from osdp_compile.runtime import eager_markers
from osdp_compile.runtime.inside_forward import is_inside_forward
from osdp_compile.runtime.meshes import local_part, placed_like
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan
from passes.types.shard_layout import ShardLayout

#: Module attributes, of modules that share a class: by attribute, the name and the leaf of a
#: parameter.
_NAMES, _LEAVES = "_osdp_names", "_osdp_leaves"


@dataclasses.dataclass(frozen=True)
class ModelParameter:
    """A parameter and all (module, attribute) places that hold it; tied weights have several.

    ``others``: its placement on other mesh dimensions; None: the mesh has none.
    """

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]
    others: OtherDims | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape about which the plan decides: of the part on other mesh dimensions."""
        return self.parameter.shape if self.others is None else self.others.local_shape


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


def model_parameters(roots: Sequence[tuple[str, nn.Module]]) -> list[ModelParameter]:
    """All parameters of the root modules, in the order of ``named_parameters``.

    ``roots``: (prefix, module); the prefix of a single root is ``""``.

    Raises:
        OsdpError: for a lazy parameter without a shape.
    """
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, root in roots:
        for path, module in root.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = ".".join(part for part in (prefix, path, attribute) if part)
                if isinstance(parameter, nn.parameter.UninitializedParameter):
                    raise OsdpError(
                        f"parameter {name!r} is lazy and has no shape yet: run the model once "
                        "before compiling it with backend='osdp' or sharding it"
                    )
                entry = found.setdefault(id(parameter), (name, parameter, []))
                entry[2].append((module, attribute))
    return [
        ModelParameter(name, p, tuple(places), other_dims_of(p))
        for name, p, places in found.values()
    ]


def held_elsewhere(parameters: Sequence[ModelParameter]) -> list[ModelParameter]:
    """Add the places outside the roots that hold the same parameters.

    A head outside the roots may be tied to an embedding inside, for example behind a graph break.
    With the old parameter the head would no longer be tied.
    """
    places: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    for entry in parameters:
        known = {(id(module), attribute): (module, attribute) for module, attribute in entry.places}
        places[id(entry.parameter)] = known
    for module in living(nn.Module):
        for attribute, parameter in module.__dict__.get("_parameters", {}).items():
            if id(parameter) in places:
                places[id(parameter)].setdefault((id(module), attribute), (module, attribute))
    return [
        dataclasses.replace(entry, places=tuple(places[id(entry.parameter)].values()))
        for entry in parameters
    ]


def check_shardable(parameters: Sequence[ModelParameter]) -> None:
    """Refuse parameters that a replacement would silently break.

    Raises:
        OsdpError: naming the first parameter that has a gradient hook, gets sparse gradients, or is
            a DTensor already.
    """
    for entry in parameters:
        parameter = entry.parameter
        if isinstance(parameter, DTensor):
            raise OsdpError(
                f"parameter {entry.name!r} is a DTensor already: backend='osdp' shards plain "
                "parameters itself. Do not wrap the model in FSDP or shard it first, and add "
                "modules before its first call. Of a model that parallelize_module distributed "
                "over mesh['tp'], give the other dimension: "
                "options={'mesh': mesh['dp']}, or osdp_compile.shard(..., mesh=mesh['dp'])"
            )
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or hooks:
            raise OsdpError(
                f"parameter {entry.name!r} has a gradient hook, which would be lost: register it "
                "on the model's parameter after the first call"
            )
        if any(getattr(module, "sparse", False) is True for module, _ in entry.places):
            raise OsdpError(
                f"parameter {entry.name!r} is the table of an embedding with sparse=True: sparse "
                "gradients are not reduced, leave sparse out"
            )


def check_fits(
    plan: Plan,
    parameters: Sequence[ModelParameter],
    world_size: int,
    what: str = "plan",
    ranks_of_a_host: int | None = None,
) -> None:
    """Refuse a plan for another model or another number of ranks.

    Raises:
        PlanMismatch: naming the first difference.
    """
    rows = [
        (e.name, tuple(e.shape), str(e.parameter.dtype).removeprefix("torch.")) for e in parameters
    ]
    difference = plan.mismatch(rows, world_size, ranks_of_a_host)
    if difference is not None:
        if any(e.others is not None for e in parameters):
            difference += " (beside parallelize_module a plan has the shapes of local tensors)"
        raise PlanMismatch(f"the {what} does not fit: {difference}")


def _local_rows(full: Tensor, cut: ShardLayout) -> Tensor:
    """This rank's rows of a tensor; a copy, so that the whole can be freed."""
    start, stop = cut.rows(full.shape[cut.dim])
    rows = full.narrow(cut.dim, start, stop - start)
    return rows.clone(memory_format=torch.contiguous_format)


def placements_of(
    decision: Decision, ndim: int, dim: int = 0, others: OtherDims | None = None
) -> list[Placement]:
    """A parameter's placement on each mesh dimension: on ours, and then on others.

    ``ndim``: the number of dimensions. ``dim``: the parameter's sharded dimension.
    """
    if others is not None:
        return others.with_ours(placements_of(decision, ndim - others.mesh.ndim, dim))
    if decision.within_host:
        return [Replicate(), Shard(dim)]
    return [Shard(dim) if decision.sharded else Replicate()] * ndim


def lay_out(
    full: Tensor,
    mesh: DeviceMesh,
    decision: Decision,
    cut: ShardLayout,
    others: OtherDims | None = None,
) -> DTensor:
    """A DTensor; this rank holds its rows (sharded) or the whole value.

    Without communication: every rank must hold the same ``full``. With ``others``, it is the part
    of this rank in their mesh, and ``mesh`` has our dimensions and theirs.
    """
    placements = placements_of(decision, mesh.ndim, cut.dim, others)
    if others is not None:
        return DTensor.from_local(
            _local_rows(full, cut) if decision.sharded else full,
            mesh,
            placements,
            run_check=False,
            shape=others.shape,
            stride=others.stride,
        )
    if not decision.sharded:
        return DTensor.from_local(full, mesh, placements, run_check=False)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(
        _local_rows(full, cut), mesh, placements, run_check=False, shape=full.shape, stride=stride
    )


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


def _flat_weights(module: Any) -> list[Tensor]:
    """nn.RNNBase's list of parameters, read through the markers."""
    return [getattr(module, name) for name in module._flat_weights_names]


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


def shard_in_place(
    parameters: Sequence[ModelParameter],
    mesh: DeviceMesh,
    ctx: Context,
    optimizers: OptimizerIndex,
    reading: Reading,
) -> list[nn.Parameter]:
    """Replace every parameter by a DTensor parameter with the plan's layout.

    ``mesh``: over all ranks, with the two dimensions of ``ctx.mesh_dims`` if the plan shards within
    hosts; its groups must be registered in eager_markers. ``ctx``: with the plan.

    Optimizers that hold the old parameters get the new ones, and their state gets the same layout.
    Every rank must hold the same values (:mod:`osdp_compile.model.synchronize`). Meta tensors stay
    on the meta device. The old objects of sharded parameters lose their values.

    Returns the new parameters, in the order of ``parameters``.
    """
    renewed: list[nn.Parameter] = []
    for entry in parameters:
        old = entry.parameter
        decision = ctx.plan.decision(entry.name)
        cut = ctx.layout_of(entry.name)
        laid_out = lay_out(old.detach(), mesh, decision, cut, entry.others)
        new = nn.Parameter(laid_out, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)  # user attributes
        if old.grad is not None:
            local = laid_out.to_local().detach()
            new.grad = placed_like(laid_out, _mean_gradient(entry, local, decision, cut))
            old.grad = None
        for module, attribute in entry.places:
            module._parameters[attribute] = new
        optimizers.rebind(
            old, new, partial(lay_out, mesh=mesh, decision=decision, cut=cut, others=entry.others)
        )
        _hand_on_gradients(entry, new, decision, cut)
        replaced(old, entry.name)
        if decision.sharded and old.device.type != "meta":
            _free_whole(old)
        renewed.append(new)
    read_through_markers(parameters, ctx, reading, mesh)
    for entry, new in zip(parameters, renewed, strict=True):
        stands_for(entry.parameter, new)
    return renewed


def _free_whole(old: nn.Parameter) -> None:
    """Free the memory of a sharded parameter's old object, which the graph and its inputs hold.

    So at most one parameter has both whole and sharded memory at a time. Parameters that autograd
    saved, for example for a penalty computed before the first call, are kept.
    """
    before = local_before(old)
    if before is not None:
        _free(before)
    if not _torch.autograd.is_saved(old):
        _free(old)


def _free(whole: Tensor) -> None:
    """Free a tensor's memory.

    A later read gives no stale values: floating-point values are NaN.
    """
    single = torch.empty((), dtype=whole.dtype, device=whole.device)
    if whole.is_floating_point() and whole.element_size() > 1:  # not all 1-byte types have NaN
        single.fill_(float("nan"))
    whole.data = single.expand(whole.shape)


def keep_in_place(
    parameters: Sequence[ModelParameter],
    ctx: Context,
    reading: Reading,
    renewing: OptimizerIndex | None = None,
) -> list[nn.Parameter]:
    """Keep all parameters plain tensors, for a plan that shards nothing; read them by markers.

    ``renewing``: given if earlier code of the step may have read the parameters already. Then new
    parameter objects of the same memory replace them, in these optimizers too, and get the
    gradients of the old ones.

    Returns the parameters in the given order.
    """
    kept: list[nn.Parameter] = []
    for entry in parameters:
        parameter, decision = entry.parameter, ctx.plan.decision(entry.name)
        cut = ctx.layout_of(entry.name)
        mean = None
        if parameter.grad is not None:
            mean = _mean_gradient(entry, parameter.detach(), decision, cut)
        if renewing is not None:
            old = parameter
            parameter = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
            parameter.__dict__.update(old.__dict__)
            for module, attribute in entry.places:
                module._parameters[attribute] = parameter
            renewing.rebind(old, parameter, lambda value: value)
            _hand_on_gradients(entry, parameter, decision, cut)
            replaced(old, entry.name)
        parameter.grad = mean
        kept.append(parameter)
    read_through_markers(parameters, ctx, reading, None)
    if renewing is not None:
        for entry, new in zip(parameters, kept, strict=True):
            stands_for(entry.parameter, new)
    return kept


def _hand_on_gradients(
    entry: ModelParameter, new: nn.Parameter, decision: Decision, cut: ShardLayout
) -> None:
    """Reduce gradients that reach the old parameter, and add them to the new one.

    In the step of the first call, eager code may read the old parameter before any compilation.
    """
    name, held = entry.name, new.detach()
    local = local_part(held)

    def hand_on(old: Tensor) -> None:
        gradient = _torch.autograd.take_gradient(old)
        mean: Tensor = torch.ops.osdp.reduce_grad(
            gradient, local, name, decision.sharded, *cut.marks
        )
        add_gradient(new, mean)

    if entry.parameter.requires_grad:
        entry.parameter.register_post_accumulate_grad_hook(hand_on)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add this rank's part of a gradient to the parameter's gradient."""
    if parameter.grad is not None:
        there = parameter.grad
        local_part(there).add_(gradient)
    elif isinstance(parameter, DTensor):
        parameter.grad = placed_like(parameter, gradient)
    else:
        parameter.grad = gradient


def _mean_gradient(
    entry: ModelParameter, local: Tensor, decision: Decision, cut: ShardLayout
) -> Tensor:
    """The mean over ranks of the parameter's present gradients, in the layout of ``local``."""
    mean: Tensor = torch.ops.osdp.reduce_grad(
        entry.parameter.grad, local, entry.name, decision.sharded, *cut.marks
    )
    return mean


def _part_of_whole(
    mesh: DeviceMesh, decision: Decision, cut: ShardLayout, others: OtherDims | None
) -> Callable[[Tensor], DTensor]:
    """The layout of a parameter that is whole over all mesh dimensions."""

    def part(whole: Tensor) -> DTensor:
        local = whole if others is None else others.local_of(whole)
        return lay_out(local, mesh, decision, cut, others)

    return part


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
            parts[attribute] = _part_of_whole(mesh, decision, cut, entry.others)
    _swap_class(module, readers, parts)
    if reading.precision.param_dtype is not None:
        cast_what_it_is_called_with(module, reading.precision.param_dtype, reading.is_cast)


def buffers_of(roots: Sequence[tuple[str, nn.Module]]) -> Iterator[Tensor]:
    """The buffers of the root modules, each once."""
    seen: set[int] = set()
    for _, root in roots:
        for buffer in root.buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer

"""Parameters on other mesh dimensions: a model that ``parallelize_module`` distributed before.

Its parameters are DTensors on a dimension of the mesh that is not in ``options={"mesh": ...}``,
such as ``mesh["tp"]``. The backend plans for the local tensors and shards these over its own
dimensions, one or two. Modules read the gathered local tensor as a DTensor on the other dimensions,
as the model's own code expects. The sharded parameters are DTensors on all dimensions, with the
placements of FSDP2 after tensor parallelism.

The ranks along the other dimensions have the same batch, as with tensor parallelism; or, as with
expert parallelism, batches of their own: then ``options={"mesh": ...}`` names their dimension too.
A parameter that is sharded over it gets its gradient from all of these batches, divided by the
number of ranks. That of a plain parameter is averaged over these ranks, by an all-reduce of the
model itself.

From the first trace of such a model until it is sharded, its parameters are plain local tensors.
``osdp_compile.shard`` shards such a model without a trace.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.live_objects import living
from osdp_compile.model.find_modules import placeholders, plain_parameters
from osdp_compile.model.mixed_precision import subclass
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.runtime.meshes import groups_along, local_part
from passes.types.plan import Plan


@dataclasses.dataclass(frozen=True)
class OtherDims:
    """A parameter's placement on the mesh dimensions that the backend does not shard over.

    Attributes:
        mesh: of these dimensions.
        placements: on each of them.
        shape, stride: of the whole parameter.
        local_shape: of its part on each rank of ``mesh``, about which the plan decides.
        is_plain: the model's code reads a plain tensor, equal on the ranks of ``mesh``.
        own_data: the ranks of ``mesh`` have batches of their own.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    local_shape: torch.Size
    is_plain: bool
    own_data: bool = False

    @property
    def reads_local(self) -> bool:
        """Whether the model's code reads the local tensor, and not a DTensor."""
        return self.is_plain and not self.own_data

    def as_read(self, local: Tensor) -> Tensor:
        """The tensor that the model's code reads; ``local``: of this rank in ``mesh``."""
        if self.reads_local:
            return local
        if self.own_data:
            local = _shared_gradient(local, self.mesh.size())
        if self.is_plain:
            everywhere = [Replicate()] * self.mesh.ndim
            placed = DTensor.from_local(local, self.mesh, everywhere, run_check=False)
            return placed.to_local(grad_placements=[Partial()] * self.mesh.ndim)
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def local_of(self, whole: Tensor) -> Tensor:
        """This rank's part in ``mesh`` of a whole tensor that all ranks hold."""
        everywhere = [Replicate()] * self.mesh.ndim
        placed = DTensor.from_local(whole, self.mesh, everywhere, run_check=False)
        return placed.redistribute(placements=self.placements).to_local()

    def with_ours(self, ours: Sequence[Placement]) -> list[Placement]:
        """The placements on our dimensions, ``ours``, and then the others.

        Rows that the other dimensions have cut already are cut further by us: the placements are
        strided, as FSDP2's.
        """
        return [*map(self._strided, ours), *self.placements]

    def _strided(self, own: Placement) -> Placement:
        if not isinstance(own, Shard):
            return own
        parts = math.prod(
            self.mesh.size(dim) for dim, one in enumerate(self.placements) if one.is_shard(own.dim)
        )
        return _torch.dtensor.strided_shard(own.dim, parts) if parts > 1 else own


def _shared_gradient(local: Tensor, ranks: int) -> Tensor:
    """A tensor of which the gradient is divided by the number of ranks with data of their own."""
    shared: Tensor = _SharedGradient.apply(local, ranks)  # type: ignore[no-untyped-call, unused-ignore]
    return shared


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


#: Parameters of models on other dimensions too -> their placements there.
_known: Any = WeakTensorKeyDictionary()
#: Their local tensors of the time before they are sharded -> the DTensors before.
_before: Any = WeakTensorKeyDictionary()
#: Modules of which the parameters are local tensors now -> their class, and the parameters before.
_local: WeakKeyDictionary[nn.Module, tuple[type[nn.Module], dict[str, nn.Parameter]]]
_local = WeakKeyDictionary()


def other_dims_of(parameter: Tensor) -> OtherDims | None:
    """The placement of a parameter on other mesh dimensions; None: the mesh has none."""
    found: OtherDims | None = _known.get(parameter)
    return found


def keep_other_dims(parameter: Tensor, others: OtherDims) -> None:
    """Record the placement of a parameter that is sharded now.

    ``to_empty`` refuses a recorded parameter: record none before the model's first call.
    """
    _known[parameter] = others


def local_before(local: Tensor) -> Tensor | None:
    """The tensor in the DTensor that ``local`` took the place of, with the same memory.

    Python code may hold that DTensor for ever. None: there was none, or autograd saved it.
    """
    before: DTensor | None = _before.pop(local, None)
    if before is None or _torch.autograd.is_saved(before):
        return None
    return _torch.dtensor.tensor_inside(before)


def are_on_other_dims(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> bool:
    """Whether some of the parameters, which no plan has yet, are on other mesh dimensions.

    ``mesh``: the option.

    Raises:
        OsdpError: for such parameters if ``mesh`` has a dimension of theirs, or no names.
    """
    found = next((one for one in parameters if _is_distributed(one)), None)
    if found is None:
        return False
    theirs = found.device_mesh
    root = _torch.distributed.root_mesh(theirs)
    if mesh is None or mesh == theirs or _torch.distributed.root_mesh(mesh) != root:
        return False  # sharded by another means: refused later
    names = mesh.mesh_dim_names
    if not names or set(names) & set(theirs.mesh_dim_names or ()):
        raise OsdpError(
            f"the model's parameters are DTensors on {theirs}, and options={{'mesh'}} is {mesh}: "
            "give the dimensions beside theirs, such as mesh['dp'], or two of them: "
            "mesh['dp_replicate', 'dp_shard']; theirs too if its ranks have batches of their own, "
            "as with expert parallelism: mesh['dp', 'ep']"
        )
    if mesh.size() == 1:
        raise OsdpError(
            f"options={{'mesh'}} has one rank, {mesh}, and the model's parameters are DTensors on "
            f"{theirs}: nothing is planned there. Leave out memory_limit and plan, or the backend"
        )
    return True


def mesh_of(parameters: Iterable[nn.Parameter]) -> DeviceMesh | None:
    """The mesh of the parameters' other dimensions, before and after they are sharded by us."""
    for parameter in parameters:
        others = other_dims_of(parameter)
        if others is not None:
            return others.mesh
        if _is_distributed(parameter):
            return parameter.device_mesh
    return None


def others_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> OtherDims | None:
    """The placement of one of the graph's local parameters; None: they have no other dimensions."""
    for _, parameter in plain_parameters(gm, inputs):
        found = other_dims_of(parameter)
        if found is not None:
            return found
    return None


def whole_mesh(mesh: DeviceMesh, others: DeviceMesh) -> DeviceMesh:
    """The mesh of our dimensions and the others."""
    assert mesh.mesh_dim_names is not None and others.mesh_dim_names is not None
    return _torch.distributed.root_mesh(mesh)[(*mesh.mesh_dim_names, *others.mesh_dim_names)]


def group_of_everyone(mesh: DeviceMesh, others: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of our dimensions and the others. Collective."""
    return _torch.distributed.flattened(whole_mesh(mesh, others)).get_group()


def mesh_beside(flat: DeviceMesh, given: DeviceMesh, others: DeviceMesh, plan: Plan) -> DeviceMesh:
    """The mesh of a model's DTensors, on our dimensions and the others.

    Ours are two if the plan shards within hosts, else one.

    ``flat``: the mesh over all data-parallel ranks. ``given``: the user's option.
    """
    everyone = whole_mesh(given, others)
    if given.ndim == 1:
        return everyone
    assert others.mesh_dim_names is not None and flat.mesh_dim_names is not None
    ours = groups_along(given) if plan.within_hosts else {flat.mesh_dim_names[0]: flat.get_group()}
    theirs = {name: others.get_group(name) for name in others.mesh_dim_names}
    sizes = [one.size() for one in (*ours.values(), *theirs.values())]
    return DeviceMesh.from_group(
        [*ours.values(), *theirs.values()],
        given.device_type,
        everyone.mesh.reshape(sizes),
        mesh_dim_names=(*ours, *theirs),
    )


def distributed_modules(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[str, nn.Module]]:
    """All modules, with their names, of the models that own the graph's distributed parameters."""
    roots: dict[int, nn.Module] = {}
    for node, value in zip(placeholders(gm), inputs, strict=True):
        for _, owner in _torch.dynamo.evaluate_prefixes(node) if _is_distributed(value) else ():
            if isinstance(owner, nn.Module) and any(one is value for one in owner.parameters()):
                roots.setdefault(id(owner), owner)
                break
    named = (one for root in roots.values() for one in root.named_modules())
    return list({id(module): (name, module) for name, module in named}.values())


def _is_distributed(value: Any) -> TypeGuard[DTensor]:
    return (
        isinstance(value, nn.Parameter)
        and isinstance(value, DTensor)
        and other_dims_of(value) is None
    )


def take_local(modules: Sequence[tuple[str, nn.Module]], own_data: bool) -> None:
    """Make all parameters of some modules plain local tensors, read as before while traced.

    Optimizers get the new parameters. :func:`give_back` undoes it.

    ``modules``: with their names. ``own_data``: as in :class:`OtherDims`.

    Raises:
        OsdpError: for parameters that cannot be taken, with what to do.
    """
    named = {
        id(p): (f"{name}.{attribute}".removeprefix("."), p)
        for name, module in modules
        for attribute, p in module._parameters.items()
        if p is not None
    }
    mesh = next(p.device_mesh for _, p in named.values() if _is_distributed(p))
    renewed = {key: local_form(name, p, mesh, own_data) for key, (name, p) in named.items()}
    optimizers = OptimizerIndex(p for _, p in named.values())
    for key, (new, others) in renewed.items():
        _known[new] = others
        optimizers.rebind(named[key][1], new, local_part)
    inside = {id(module) for _, module in modules}
    tied = [m for m in living(nn.Module) if id(m) not in inside and _holds(m, named)]
    for module in [*(one for _, one in modules), *tied]:
        own = module._parameters.items()
        before = {name: p for name, p in own if p is not None and id(p) in named}
        if not before:
            continue
        _local[module] = type(module), before
        readers = {}
        for attribute, parameter in before.items():
            new, others = renewed[id(parameter)]
            module._parameters[attribute] = new
            readers[attribute] = _reader(attribute, parameter, others)
        subclass(module, readers)


def _holds(module: nn.Module, parameters: Mapping[int, Any]) -> bool:
    own = module.__dict__.get("_parameters", {})
    return any(one is not None and id(one) in parameters for one in own.values())


def local_form(
    name: str, parameter: nn.Parameter, mesh: DeviceMesh, own_data: bool
) -> tuple[nn.Parameter, OtherDims]:
    """The plain local parameter in place of a model's, and its placement; a plain one itself.

    ``mesh``: of the distributed parameters. ``own_data``: as in :class:`OtherDims`.

    Raises:
        OsdpError: naming the parameter, with what to do.
    """
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise OsdpError(
            f"parameter {name!r} has a gradient hook, which would be lost: register it on the "
            "model's parameter after the first call"
        )
    shape, stride = parameter.shape, parameter.stride()
    if not isinstance(parameter, DTensor):
        everywhere = (Replicate(),) * mesh.ndim
        return parameter, OtherDims(
            mesh, everywhere, shape, stride, local_shape=shape, is_plain=True, own_data=own_data
        )
    _check_placements(name, parameter, mesh, own_data)
    local = local_part(parameter.detach())
    new = nn.Parameter(local, requires_grad=parameter.requires_grad)
    own = ("_local_tensor", "_spec")
    new.__dict__.update({key: one for key, one in parameter.__dict__.items() if key not in own})
    if parameter.grad is not None:
        new.grad = local_part(parameter.grad)
    _before[new] = parameter
    placements = parameter.placements
    return new, OtherDims(
        mesh, placements, shape, stride, local_shape=new.shape, is_plain=False, own_data=own_data
    )


def _check_placements(name: str, parameter: DTensor, mesh: DeviceMesh, own_data: bool) -> None:
    """Refuse a distributed parameter that is not in equal parts on ``mesh``."""
    if parameter.device_mesh != mesh:
        raise OsdpError(
            f"the model's parameters are DTensors on several meshes, {name!r} on "
            f"{parameter.device_mesh}: distribute all of them over the same dimensions, such as "
            f"{mesh}"
        )
    if own_data and not all(isinstance(one, Shard) for one in parameter.placements):
        raise OsdpError(
            f"parameter {name!r} is {parameter.placements} on {mesh}, of which the ranks have "
            "batches of their own: shard it there, or leave it a plain parameter. Beside tensor "
            "parallelism leave its dimension out of the mesh, such as mesh['dp']"
        )
    parts = [1] * parameter.dim()
    for dim, one in enumerate(parameter.placements):
        if isinstance(one, Shard):
            parts[one.dim] *= mesh.size(dim)
    usual = [p for p in parameter.placements if isinstance(p, Shard | Replicate)]
    strided = any(_torch.dtensor.split_factor(one) is not None for one in parameter.placements)
    if len(usual) < mesh.ndim or strided or any(map(operator.mod, parameter.shape, parts)):
        raise OsdpError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} is {parameter.placements} on "
            f"{mesh}: the ranks there must hold equal parts of it, by Shard or Replicate. Pad it "
            "to a multiple of these ranks, or leave it a plain parameter"
        )


class OtherDimsRead(property):
    """A module's read of a local parameter; a cast goes between the parameter and ``others``."""

    def __init__(self, read: Callable[[nn.Module], Any], others: OtherDims) -> None:
        super().__init__(read)
        self.as_read = others.as_read


def _reader(attribute: str, before: nn.Parameter, others: OtherDims) -> property:
    """``before``: what uncompiled code reads."""

    def read(module: nn.Module) -> Any:
        if not torch.compiler.is_compiling():
            return before
        parameter: Any = module._parameters[attribute]
        return others.as_read(parameter)

    return OtherDimsRead(read, others)


def end_local() -> None:
    """End the reading of :func:`take_local`: the model is sharded now."""
    for module in list(_local):
        module.__class__, _ = _local.pop(module)


def give_back() -> None:
    """Undo :func:`take_local`."""
    for module in list(_local):
        module.__class__, before = _local.pop(module)
        for attribute, old in before.items():
            new = module._parameters[attribute]
            module._parameters[attribute] = old
            others = None if new is None else _known.pop(new, None)
            if new is not None and new is not old and others is not None:
                _before.pop(new, None)
                OptimizerIndex([new]).rebind(new, old, others.as_read)

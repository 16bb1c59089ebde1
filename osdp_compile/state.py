"""The model's parameters, before and after they are laid out as a plan says.

Sharding is in place: every parameter is replaced by a ``DTensor`` parameter of the same
name (``Shard(0)`` or ``Replicate()``), and every module that owns one gets a subclass of
its class in which reading the attribute gives the full parameter through a marker.

All are DTensors on one mesh, for ``clip_grad_norm_`` takes no others: over all ranks, or, if
anything is sharded within hosts, on the mesh of two levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from osdp_compile import markers
from osdp_compile.errors import OsdpError
from osdp_compile.optimizers import OptimizerIndex
from passes.context import Context
from passes.cuts import Cut
from passes.decisions import Decision


@dataclasses.dataclass(frozen=True)
class ModelParameter:
    """A parameter and every place that holds it (several if weights are tied)."""

    name: str
    parameter: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]


def model_parameters(roots: Sequence[tuple[str, nn.Module]]) -> list[ModelParameter]:
    """All parameters of the root modules, in the order of ``named_parameters``.

    ``roots``: (prefix, module); the prefix is ``""`` where there is one root.

    Raises:
        OsdpError: for a lazy parameter that has no shape yet.
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
                        "before compiling it with backend='osdp'"
                    )
                entry = found.setdefault(id(parameter), (name, parameter, []))
                entry[2].append((module, attribute))
    return [ModelParameter(name, p, tuple(places)) for name, p, places in found.values()]


def check_shardable(parameters: Sequence[ModelParameter]) -> None:
    """Refuse what replacing the parameter object would silently break.

    Raises:
        OsdpError: naming the first parameter with a gradient hook, or that is a DTensor already.
    """
    for entry in parameters:
        parameter = entry.parameter
        if isinstance(parameter, DTensor):
            raise OsdpError(
                f"parameter {entry.name!r} is a DTensor already: backend='osdp' lays out plain "
                "parameters itself; do not wrap the model in FSDP or distribute it first"
            )
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or hooks:
            raise OsdpError(
                f"parameter {entry.name!r} has a gradient hook, which would be lost: register it "
                "on the model's parameter after the first call"
            )


def synchronize(
    parameters: Sequence[ModelParameter], buffers: Sequence[Tensor], mesh: DeviceMesh
) -> None:
    """Give every rank rank 0's parameters and buffers, in place, as DDP does."""
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [entry.parameter.detach() for entry in parameters] + list(buffers):
            if tensor.is_contiguous():
                dist.broadcast(tensor, src=source, group=group)
            else:
                whole = tensor.contiguous()
                dist.broadcast(whole, src=source, group=group)
                tensor.copy_(whole)


def _local_rows(full: Tensor, cut: Cut) -> Tensor:
    """This rank's rows of a tensor, copied so that the whole can be freed."""
    start, stop = cut.rows(full.shape[0])
    return full[start:stop].clone(memory_format=torch.contiguous_format)


def _placements(decision: Decision, mesh: DeviceMesh) -> list[Shard | Replicate]:
    """How a parameter lies along each dimension of the mesh."""
    if decision.within_host:
        return [Replicate(), Shard(0)]
    return [Shard(0) if decision.sharded else Replicate()] * mesh.ndim


def lay_out(full: Tensor, mesh: DeviceMesh, decision: Decision, cut: Cut) -> DTensor:
    """A DTensor of which this rank holds its rows (sharded) or everything.

    No communication: every rank must hold the same ``full``.
    """
    placements = _placements(decision, mesh)
    if not decision.sharded:
        return DTensor.from_local(full, mesh, placements, run_check=False)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(
        _local_rows(full, cut), mesh, placements, run_check=False, shape=full.shape, stride=stride
    )


def _reader(
    name: str, attribute: str, shape: tuple[int, ...], sharded: bool, marks: tuple[str | int, ...]
) -> property:
    """The property through which a module reads one of its parameters."""

    def read(module: nn.Module) -> Tensor:
        parameter = module._parameters[attribute]
        local = parameter.to_local()  # type: ignore[union-attr]
        return markers.read(local, name, shape, sharded, *marks)

    return property(read)


def _flat_weights(module: Any) -> list[Tensor]:
    """What nn.RNNBase keeps as a list of parameters, read through the markers instead."""
    return [getattr(module, name) for name in module._flat_weights_names]


def _swap_class(module: nn.Module, readers: dict[str, property]) -> None:
    cls = type(module)
    namespace: dict[str, Any] = dict(readers)
    if isinstance(module, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda module, value: None)
    namespace["__module__"] = cls.__module__
    namespace["__qualname__"] = cls.__qualname__
    namespace["__doc__"] = cls.__doc__
    module.__class__ = type(cls.__name__, (cls,), namespace)


def shard_in_place(
    parameters: Sequence[ModelParameter], mesh: DeviceMesh, ctx: Context, optimizers: OptimizerIndex
) -> list[nn.Parameter]:
    """Replace every parameter by a DTensor parameter laid out as the plan says.

    ``mesh``: over all ranks, with the two dimensions of ``ctx.levels`` if the plan shards within
    hosts; its groups must be known to the markers. ``ctx``: with the plan.

    Optimizers that hold the old parameters get the new ones, and their state is laid
    out likewise. Every rank must hold the same values (see :func:`synchronize`).

    Returns the new parameters, in the order of ``parameters``.
    """
    readers: dict[int, tuple[nn.Module, dict[str, property]]] = {}
    renewed: list[nn.Parameter] = []
    for entry in parameters:
        old = entry.parameter
        decision = ctx.plan.decision(entry.name)
        cut, sharded = ctx.cut(decision), decision.sharded
        shape = tuple(old.shape)
        laid_out = lay_out(old.detach(), mesh, decision, cut)
        new = nn.Parameter(laid_out, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)  # people hang attributes on parameters
        if old.grad is not None:
            reduced = torch.ops.osdp.reduce_grad(
                old.grad, laid_out.to_local().detach(), entry.name, sharded, *cut.marks
            )
            new.grad = DTensor.from_local(
                reduced,
                mesh,
                laid_out.placements,
                run_check=False,
                shape=new.shape,
                stride=new.stride(),
            )
        for module, attribute in entry.places:
            module._parameters[attribute] = new
            owned = readers.setdefault(id(module), (module, {}))[1]
            owned[attribute] = _reader(entry.name, attribute, shape, sharded, cut.marks)
        optimizers.rebind(old, new, partial(lay_out, mesh=mesh, decision=decision, cut=cut))
        renewed.append(new)
    for module, owned in readers.values():
        _swap_class(module, owned)
    return renewed


def buffers_of(roots: Sequence[tuple[str, nn.Module]]) -> Iterator[Tensor]:
    """The root modules' buffers, each once."""
    seen: set[int] = set()
    for _, root in roots:
        for buffer in root.buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer

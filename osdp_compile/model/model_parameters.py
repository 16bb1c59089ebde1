"""The parameters and buffers of a model, all places that hold them, and what cannot be sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError, PlanMismatch
from osdp_compile.live_objects import living
from osdp_compile.model.other_dims import OtherDims, other_dims_of
from passes.types.plan import Plan


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


def buffers_of(roots: Sequence[tuple[str, nn.Module]]) -> Iterator[Tensor]:
    """The buffers of the root modules, each once."""
    seen: set[int] = set()
    for _, root in roots:
        for buffer in root.buffers():
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer

"""Pending models: sharded by ``osdp_compile.shard``, before their first compiled call.

The records are keyed by module, not by parameter. ``model.to_empty`` swaps the contents of
parameters, and torch refuses this for a parameter that has a weak reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.model.alike_frames import AlikeFrames, alike_parts
from osdp_compile.model.mixed_precision import Precision
from osdp_compile.model.model_parameters import ModelParameter, check_fits, model_parameters
from osdp_compile.model.other_dims import OtherDims
from osdp_compile.options import CheckedOptions
from osdp_compile.runtime.collectives import Group
from osdp_compile.sharding.dtensor_layout import placements_of
from osdp_compile.sharding.parameter_reads import (
    Reading,
    raise_on_meta,
    raise_replaced,
    read_through_markers,
)
from passes.types.context import Context
from passes.types.plan import Plan

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class PendingModel:
    """How ``osdp_compile.shard`` placed a model.

    ``mesh``: the flat mesh. ``given_mesh``: the user's mesh; None: all ranks. ``ours``: its
    dimensions to shard over, one or two. ``own_mesh``: the mesh of the DTensors. ``context``: the
    context of the call. ``everyone``: the ranks that must agree. ``others``: by name, the
    parameters' placements on other mesh dimensions; empty: the mesh has none.
    """

    context: Context
    mesh: DeviceMesh
    given_mesh: DeviceMesh | None
    ours: DeviceMesh | None
    own_mesh: DeviceMesh
    reading: Reading
    everyone: Group
    others: Mapping[str, OtherDims]

    @property
    def any_others(self) -> OtherDims | None:
        """The placement of one of the parameters on other mesh dimensions; None: there are none."""
        return next(iter(self.others.values()), None)

    @property
    def plan(self) -> Plan:
        return self.context.plan

    def options(self, options: CheckedOptions) -> CheckedOptions:
        """The backend's options, completed by the arguments of ``shard``.

        Raises:
            OsdpError: if an option contradicts these arguments.
        """
        if options.mesh not in (None, self.given_mesh or self.mesh, self.ours):
            raise OsdpError(
                f"the model was sharded over {self.given_mesh or self.mesh} and options={{'mesh'}} "
                f"is {options.mesh}: leave the option out"
            )
        if options.plan is not None and options.plan != self.plan:
            raise OsdpError(
                "the model was sharded by a plan already, and options={'plan'} is another one: "
                "leave the option out, or give that plan to osdp_compile.shard"
            )
        if options.slices is not None:
            raise OsdpError(
                "the model was sharded by a plan already, which says what runs in slices: leave "
                "out options={'slices'}, or use Plan.split on the plan before"
            )
        if options.tensor_parallel:
            raise OsdpError(
                "the model was sharded by a plan already, which says which weights stay: leave out "
                "options={'tensor_parallel'}, or use Plan.tensor_parallel on the plan before"
            )
        if options.search != "quick":
            raise OsdpError(
                "the model was sharded by a plan already, none is searched for: leave out "
                "options={'search'}, or give it to osdp_compile.plan"
            )
        return dataclasses.replace(options, mesh=self.ours).with_plan(self.plan)

    def read_in(
        self,
        root: nn.Module,
        precision: Precision,
        inputs: Sequence[Any],
        parts: Iterable[nn.Module],
    ) -> bool:
        """Read the model's parameters in these dtypes, and as alike parts; True if that changed.

        ``inputs``: of the graph that reads them. ``parts``: the compiled modules. Those in ``root``
        share code, unless one graph reads several of them.
        """
        entries = self._entries(root)
        if {entry.name for entry in entries} != {row.name for row in self.plan.parameters}:
            return False  # another model: it is refused next, on every rank
        inside = {id(module) for module in root.modules()}
        own = [part for part in parts if id(part) in inside]
        alike = alike_parts(root, own, self.plan)
        if _meet(root, inputs, alike):
            alike = AlikeFrames()
        if (self.reading.precision, self.reading.alike) == (precision, alike):
            return False
        self.reading.precision, self.reading.alike = precision, alike
        self.reading.take_back_classes()
        read_through_markers(entries, self.context, self.reading, self.own_mesh)
        return True

    def parameters(self, root: nn.Module) -> list[ModelParameter]:
        """The model's parameters, ready for training.

        Raises:
            OsdpError: naming a parameter that is not ready, or that has another placement.
            PlanMismatch: if the model has other parameters now.
        """
        found = self._entries(root)
        check_fits(
            self.plan,
            found,
            self.mesh.size(),
            "plan that the model was sharded by",
            self.plan.ranks_of_a_host,
        )
        for entry in found:
            _check(entry, self)
        for name, buffer in root.named_buffers():
            if buffer.is_meta:
                raise_on_meta(f"buffer {name!r}")
        return found

    def _entries(self, root: nn.Module) -> list[ModelParameter]:
        entries = model_parameters([("", root)])
        return [dataclasses.replace(one, others=self.others.get(one.name)) for one in entries]


def _meet(root: nn.Module, inputs: Sequence[Any], alike: AlikeFrames) -> bool:
    """Whether parameters with one name in shared code are inputs of one graph."""
    given = {id(one) for one in inputs if isinstance(one, nn.Parameter)}
    read = [name for name, one in root.named_parameters() if id(one) in given]
    return len({alike.first_of.get(name, name) for name in read}) < len(read)


def _check(entry: ModelParameter, laid_out: PendingModel) -> None:
    name, parameter = entry.name, cast(DTensor, entry.parameter)
    if not isinstance(parameter, DTensor):
        raise_replaced(name)
    if parameter.device.type == "meta":
        raise_on_meta(f"parameter {name!r}")
    mesh = laid_out.own_mesh
    decision, dim = laid_out.plan.decision(name), laid_out.plan[name].dim
    placements = tuple(placements_of(decision, mesh.ndim, dim, entry.others))
    if parameter.device_mesh != mesh or parameter.placements != placements:
        raise OsdpError(
            f"parameter {name!r} was distributed after the model was sharded: as "
            f"{parameter.placements} over {parameter.device_mesh}, not as {placements} over {mesh}"
        )
    if parameter.device.type != mesh.device_type:
        raise OsdpError(
            f"parameter {name!r} is on {parameter.device}, and the model was sharded over ranks of "
            f"{mesh.device_type}: give osdp_compile.shard a mesh, "
            f"init_device_mesh({parameter.device.type!r}, {mesh.shape})"
        )


_of_root: WeakKeyDictionary[nn.Module, PendingModel] = WeakKeyDictionary()


#: One rank's plans of ``osdp_compile.shard``, by root.
_plans_of_one_rank: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


def keep_for_one_rank(root: nn.Module, plan: Plan) -> None:
    """Remember a plan for a model that trains on one rank: nothing of it is sharded."""
    _plans_of_one_rank[root] = plan


def plan_for_one_rank(parameters: Iterable[Any]) -> Plan | None:
    """The plan that ``osdp_compile.shard`` got for the model of some of these parameters."""
    return next((plan for _, plan in _owning(parameters, _plans_of_one_rank)), None)


def wait_for_first_call(root: nn.Module, laid_out: PendingModel) -> None:
    """Remember a model's placement until its first call."""
    _of_root[root] = laid_out


def end_waiting(root: nn.Module) -> None:
    """Forget a model that is trained now: its session replaces the record."""
    del _of_root[root]


def any_waits() -> bool:
    """Whether any model is pending."""
    return bool(_of_root)


def is_waiting(mesh: DeviceMesh) -> bool:
    """Whether a model is pending on an equal mesh.

    Meshes are compared by value: torch gives a DTensor another mesh object that is equal.
    """
    return any(laid_out.own_mesh == mesh for laid_out in list(_of_root.values()))


def waiting(parameters: Iterable[Any]) -> list[tuple[nn.Module, PendingModel]]:
    """The pending models that own some of these parameters, each with its record."""
    return _owning(parameters, _of_root)


def _owning(
    parameters: Iterable[Any], records: WeakKeyDictionary[nn.Module, T]
) -> list[tuple[nn.Module, T]]:
    """The roots of records that own some of these parameters, each with its record."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        (root, record)
        for root, record in list(records.items())
        if any(id(parameter) in wanted for parameter in root.parameters())
    ]

"""The context of a pass: parameters, plan, hardware and ranks.

Passes keep no state of their own. Data travels between passes in the graph's metadata or here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping

import torch

from passes.types.decision import Decision
from passes.types.hardware import Hardware
from passes.types.plan import Plan
from passes.types.shard_layout import ShardLayout


class Phase(str, enum.Enum):
    """The kind of graph that a pass receives."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclasses.dataclass(frozen=True)
class StepTensors:
    """What an optimizer's step allocates and frees, in tensors of a parameter's size.

    Attributes:
        one_by_one: of a step that takes one parameter after the other. The loop holds one of them
            until the next parameter's replaces it.
        at_once: of all parameters, in a step that takes them together (torch's ``foreach``).
        foreach: whether the step takes them together. None: as torch does by itself, everywhere but
            on CPUs.
    """

    one_by_one: int = 3
    at_once: int = 1
    foreach: bool | None = None


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A full parameter, before sharding.

    Attributes:
        optimizer_bytes: bytes of optimizer state for the full parameter.
        orthogonalized: a matrix whose update Muon orthogonalizes (``passes/annotate/owner_ranks``).
        step_tensors: of its optimizer; AdamW's by default.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    element_bytes: int
    requires_grad: bool
    optimizer_bytes: int
    orthogonalized: bool = False
    step_tensors: StepTensors = StepTensors()

    @property
    def full_bytes(self) -> int:
        return self.numel * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        return self.full_bytes if self.requires_grad else 0

    def shard_bytes(self, ranks: int, dim: int = 0) -> int:
        """Bytes of the largest shard: ``ceil(rows / ranks)`` rows along ``dim``."""
        if not self.shape or self.numel == 0:
            return self.full_bytes
        rows = -(-self.shape[dim] // ranks)
        return rows * (self.numel // self.shape[dim]) * self.element_bytes

    def state_bytes(self, ranks: int, dim: int = 0) -> int:
        """Bytes of parameter, gradient and optimizer state on the rank with the largest shard.

        ``ranks``: ranks that share the parameter along ``dim``; 1: it is replicated.
        """
        if ranks == 1 or self.full_bytes == 0:
            return self.full_bytes + self.gradient_bytes + self.optimizer_bytes
        share = self.shard_bytes(ranks, dim) / self.full_bytes
        return self.shard_bytes(ranks, dim) * (2 if self.requires_grad else 1) + round(
            self.optimizer_bytes * share
        )


@dataclasses.dataclass(frozen=True)
class MeshDim:
    """One dimension of a two-dimensional mesh of the ranks.

    Attributes:
        name: name in the profile (``Hardware.dimensions``).
        size: ranks along it.
        group_name: this rank's process group along it.
    """

    name: str
    size: int
    group_name: str


@dataclasses.dataclass(frozen=True)
class ModelGroup:
    """A process group of the model's own collectives.

    Attributes:
        name: of its mesh dimension in the profile (``Hardware.dimensions``).
        size: number of ranks.
        beside: our process groups whose collectives use the same links.
    """

    name: str
    size: int
    beside: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Context:
    """The input of every pass beside the graph.

    Attributes:
        plan: the plan in force, or the candidate that the planner lowers.
        hardware: the rates of this rank's device and of the network.
        parameters: the model's parameters, before sharding.
        world_size: number of ranks.
        rank: this rank. No decision may follow from it.
        group_name: the process group of all ranks.
        phase: the kind of the graph.
        base_bytes: bytes that this rank holds during the whole graph and that the graph does not
            allocate: parameters, optimizer state, buffers, the batch, gradients of earlier
            backwards, other models. The planner's input leaves out the state between steps and adds
            it for each plan (``passes.annotate.training_state.held_between_steps``).
        accumulated_bytes: the part of ``base_bytes`` for unsharded gradients that accumulate over
            several backwards.
        adds_gradients: reduced gradients of earlier backwards are alive in both graphs. The new
            gradients are added to them after the backward.
        other_models_bytes: the part of ``base_bytes`` that other models of the process hold.
        calls_in_flight: forwards whose backward is still to come when the next one ends, this one
            among them: the microbatches that a pipeline stage holds.
        gradient_buffers: buffers of the size of a forward's outputs, in which a pipeline's schedule
            receives the gradients of other microbatches.
        between_bytes: extra bytes of another model while it runs. It may run between the forward
            and the backward.
        limit_bytes: memory limit for everything on this rank; None: no limit.
        deciding: the planner runs and searches for the best order of collectives. Otherwise the
            order follows from the plan and the parameters, equally on all ranks.
        uses_p2p: gather and reduce with P2P collectives (gloo; see ``passes/ops/p2p.py``).
        staged: kinds of collective for which the backend holds a copy of the whole tensor in
            flight, beside input and output (gloo's own gathers and scatters).
        slices: user-forced slices: (parameter, slices, kept slices). All other operators run whole.
            None: the planner decides.
        model_groups: the process groups of the model's own collectives on other mesh dimensions, by
            name. The profile's rates along the dimension price them, or else those over our ranks.
        tensor_parallel: the weights to which activations may move: False: none; True: the planner
            decides; or names of parameters whose groups stay, whatever the search finds.
        param_dtype: the dtype in which a graph without markers reads parameters; None: their own.
        reduce_dtype: the dtype in which its gradients travel; None: their own.
        mesh_dims: the mesh dimensions of hierarchical collectives: outer (between hosts) and inner
            (within a host). Rank ``h * inner.size + g`` is the g-th rank of host h. None: the ranks
            are one flat group, or the profile has no rates along the dimensions.
        workspaces: measured workspace bytes of kernels, by ``passes.annotate.kernel_key``. Other
            kernels have those of a formula (``passes/annotate/workspace.py``).
        moves_activations: activations move to the weights that stay (``Plan.moved``); False: this
            graph gathers these weights, because the ranks' batches differ.
    """

    plan: Plan
    hardware: Hardware
    parameters: tuple[Parameter, ...]
    world_size: int
    rank: int
    group_name: str
    phase: Phase = Phase.FORWARD
    base_bytes: int = 0
    accumulated_bytes: int = 0
    adds_gradients: bool = False
    calls_in_flight: int = 1
    gradient_buffers: int = 0
    other_models_bytes: int = 0
    between_bytes: int = 0
    limit_bytes: int | None = None
    uses_p2p: bool = False
    staged: frozenset[str] = frozenset()
    deciding: bool = False
    slices: tuple[tuple[str, int, int], ...] | None = None
    tensor_parallel: bool | tuple[str, ...] = False
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    mesh_dims: tuple[MeshDim, MeshDim] | None = None
    workspaces: Mapping[str, int] = dataclasses.field(default_factory=dict)
    moves_activations: bool = True
    model_groups: Mapping[str, ModelGroup] = dataclasses.field(default_factory=dict)

    def network(self, group_name: str) -> tuple[Hardware, int]:
        """Rates of collectives on a process group, and its number of ranks."""
        own = self.model_groups.get(group_name)
        if own is not None:
            known = self.hardware.dimensions.get(own.name, {})
            rates = {**self.hardware.collectives, **known}
            return dataclasses.replace(self.hardware, collectives=rates), own.size
        for dim in self.mesh_dims or ():
            if dim.group_name == group_name:
                return self.along(dim)
        return self.hardware, self.world_size

    def beside(self, group_name: str) -> frozenset[str]:
        """Our process groups that use the links of a group of the model's own collectives.

        Of a group that nothing is known of: the group of all ranks.
        """
        own = self.model_groups.get(group_name)
        if own is not None:
            return own.beside
        is_ours = any(dim.group_name == group_name for dim in self.mesh_dims or ())
        return frozenset() if is_ours else frozenset({self.group_name})

    def along(self, dim: MeshDim) -> tuple[Hardware, int]:
        """Rates of collectives along a mesh dimension, and its number of ranks."""
        return self.hardware.along(dim.name), dim.size

    @property
    def ranks_of_a_host(self) -> int | None:
        """Ranks along the inner mesh dimension; None: the ranks are one flat group."""
        return None if self.mesh_dims is None else self.mesh_dims[1].size

    def layout_of(self, name: str) -> ShardLayout:
        """The shard layout of a parameter in the plan."""
        row = self.plan[name]
        return dataclasses.replace(self.cut(row.decision), dim=row.dim)

    def cut(self, decision: Decision) -> ShardLayout:
        """The shard layout of a parameter with this decision, along its first dimension.

        If the plan shards any parameter within hosts, rows that are sharded over all ranks are
        divided among the hosts first. So all layouts follow the dimensions of one mesh.

        Raises:
            ValueError: if the decision is within hosts and ``mesh_dims`` is None.
        """
        found = self._cuts.get(decision)
        if found is None:
            found = self._cuts[decision] = self._cut(decision)
        return found

    @functools.cached_property
    def _cuts(self) -> dict[Decision, ShardLayout]:
        return {}

    def _cut(self, decision: Decision) -> ShardLayout:
        if not decision.sharded:
            return ShardLayout(1, 0, self.group_name)
        if decision.within_host:
            if self.mesh_dims is None:
                raise ValueError(
                    f"{decision.name!r} needs a two-dimensional mesh (options={{'mesh': ...}}) and "
                    "a hardware profile with rates along both of them"
                )
            outer, inner = self.mesh_dims
            place, names = self.rank % inner.size, (inner.group_name, outer.group_name)
            return ShardLayout(inner.size, place, names[0], between=names[1], copies=outer.size)
        hosts = self.mesh_dims[0].size if self.mesh_dims and self.plan.within_hosts else 1
        return ShardLayout(self.world_size, self.rank, self.group_name, hosts=hosts)

    def cut_by(self, group_name: str) -> ShardLayout:
        """The shard layout of tensors gathered and scattered on a process group."""
        within = self.mesh_dims is not None and group_name == self.mesh_dims[1].group_name
        return self.cut(Decision.SHARD_HOST_REGATHER if within else Decision.SHARD_REGATHER)

    def parameter(self, name: str) -> Parameter:
        """The parameter of this name; KeyError if the model has none."""
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def replace(self, **changes: object) -> Context:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

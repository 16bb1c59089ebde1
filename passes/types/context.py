"""What a pass is told besides the graph: parameters, plan, hardware, ranks.

A pass keeps no state of its own; whatever travels from one pass to the next is in the
graph's metadata or here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import torch

from passes.types.hardware import Hardware
from passes.types.plan import Decision, Plan
from passes.types.shard_layout import ShardLayout


class Phase(str, enum.Enum):
    """Which graph a pass is looking at."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter as the passes see it: whole, before any sharding.

    ``optimizer_bytes``: optimizer state for the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int
    element_bytes: int
    requires_grad: bool
    optimizer_bytes: int

    @property
    def full_bytes(self) -> int:
        return self.numel * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        return self.full_bytes if self.requires_grad else 0

    def shard_bytes(self, ranks: int) -> int:
        """Bytes of the largest shard: the first rank's, ``ceil(rows / ranks)`` rows."""
        if not self.shape or self.numel == 0:
            return self.full_bytes
        rows = -(-self.shape[0] // ranks)
        return rows * (self.numel // self.shape[0]) * self.element_bytes

    def state_bytes(self, ranks: int) -> int:
        """Parameter, gradient and optimizer state that one rank holds for it.

        ``ranks``: over how many it is cut; 1: it is replicated.
        """
        if ranks == 1 or self.full_bytes == 0:
            return self.full_bytes + self.gradient_bytes + self.optimizer_bytes
        share = self.shard_bytes(ranks) / self.full_bytes
        return self.shard_bytes(ranks) * (2 if self.requires_grad else 1) + round(
            self.optimizer_bytes * share
        )


@dataclasses.dataclass(frozen=True)
class MeshDim:
    """One dimension of a two-level mesh of the ranks.

    ``name``: as the profile has it (``Hardware.dimensions``).
    ``size``: ranks along it. ``group_name``: of this rank's process group along it.
    """

    name: str
    size: int
    group_name: str


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything a pass may ask for.

    ``base_bytes``: what this rank holds during the whole graph and the graph does not
    allocate: parameters, optimizer state, buffers, the batch, gradients of earlier backwards,
    other models.
    ``accumulated_bytes``: what of it is for whole gradients that add up over several backwards.
    ``adds_gradients``: reduced gradients of earlier backwards are there in both graphs; the
    backward's own are added to them after it.
    ``other_models_bytes``: what of ``base_bytes`` other models of the process hold.
    ``between_bytes``: what one of them takes besides while it runs, which may be between the
    forward and the backward.
    ``limit_bytes``: the memory limit of the whole, None for no limit.
    ``deciding``: the planner is at work: the best order of collectives is searched for.
    Otherwise it follows from the plan and the parameters, for all ranks alike.
    ``by_exchange``: gather and reduce by messages (gloo; see ``passes/ops/p2p.py``).
    ``staged``: the kinds of collective for which the backend holds a copy of the whole tensor
    while one is in flight, besides its input and output (gloo's own gathers and scatters).
    ``slices``: by name, in how many slices the operators of some parameters must run, and how many
    of these are kept; all others' as a whole. None: the planner decides.
    ``param_dtype``, ``reduce_dtype``: in which the parameters of a graph without markers are
    read, and its gradients are to travel; None: in their own.
    ``levels``: the dimensions along which a collective may run leg by leg, the outer (between
    hosts) and the inner (within one): rank ``h * inner.size + g`` is the g-th of host h. None:
    the ranks are one flat group, or the profile has no rates along the dimensions.
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
    other_models_bytes: int = 0
    between_bytes: int = 0
    limit_bytes: int | None = None
    by_exchange: bool = False
    staged: frozenset[str] = frozenset()
    deciding: bool = False
    slices: tuple[tuple[str, int, int], ...] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    levels: tuple[MeshDim, MeshDim] | None = None

    def network(self, group_name: str) -> tuple[Hardware, int]:
        """What collectives on a group cost, and how many ranks it has."""
        for level in self.levels or ():
            if level.group_name == group_name:
                return self.along(level)
        return self.hardware, self.world_size

    def along(self, level: MeshDim) -> tuple[Hardware, int]:
        """What collectives along a level cost, and how many ranks it has."""
        return self.hardware.along(level.name), level.size

    @property
    def ranks_of_a_host(self) -> int | None:
        """Ranks along the inner level; None: the mesh has no levels."""
        return None if self.levels is None else self.levels[1].size

    def cut(self, decision: Decision) -> ShardLayout:
        """How a parameter with this decision lies on the ranks.

        In a plan that shards within hosts, what is sharded over all ranks is cut for the hosts
        first: so all lies along the dimensions of one mesh.

        Raises:
            ValueError: if it is to lie within hosts, and the mesh has no levels.
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
            if self.levels is None:
                raise ValueError(
                    f"{decision.value!r} needs a mesh of two levels (options={{'mesh': ...}}) and "
                    "a hardware profile with rates along both of them"
                )
            outer, inner = self.levels
            place, names = self.rank % inner.size, (inner.group_name, outer.group_name)
            return ShardLayout(inner.size, place, names[0], between=names[1], copies=outer.size)
        hosts = self.levels[0].size if self.levels and self.plan.within_hosts else 1
        return ShardLayout(self.world_size, self.rank, self.group_name, hosts=hosts)

    def cut_by(self, group_name: str) -> ShardLayout:
        """How what is gathered and scattered on a process group lies on the ranks."""
        within = self.levels is not None and group_name == self.levels[1].group_name
        return self.cut(Decision.SHARD_HOST_AGAIN if within else Decision.SHARD_AGAIN)

    def parameter(self, name: str) -> Parameter:
        """The parameter of that name; KeyError if the model has none."""
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    def replace(self, **changes: object) -> Context:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

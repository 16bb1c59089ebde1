"""Small FX graphs made by hand, with fake values, and contexts to run passes on them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes._torch import FakeTensorMode
from passes.graph.fx_utils import set_value
from passes.graph.metadata import COST, PARAMETER, STATIC
from passes.types.annotations import Cost
from passes.types.context import Context, MeshDim, Parameter
from passes.types.decision import Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import ParameterPlan, Plan

#: A process group that does not exist: no pass may look it up.
GROUP = "no-such-group"
#: Process groups of a mesh of two dimensions, which do not exist either.
OUTER, INNER = "no-such-group-between-hosts", "no-such-group-within-a-host"


class GraphBuilder:
    """Append nodes to a graph; each gets its ``meta["val"]``."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        **meta: Any,
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(list(shape), dtype=dtype)
        node.meta.update(meta)
        return node

    def parameter(
        self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        """A placeholder of a parameter or a shard; the graph does not allocate its memory."""
        return self.input(name, shape, dtype, **{STATIC.name: True, PARAMETER.name: name})

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        set_value(node)
        return node

    def finish(self, *outputs: fx.Node | None) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        return fx.GraphModule({}, self.graph)


def hardware(**changes: Any) -> Hardware:
    """A profile of round numbers: 1 ns for a FLOP or a byte of memory, 10 ns for a network byte.

    A collective has a latency of 1 us. A kernel launch takes no time. Sizes are not rounded.
    """
    rate = LinkRate(latency_seconds=1e-6, seconds_per_byte=1e-8)
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    fields: dict[str, Any] = {
        "name": "round",
        "flops_per_second": {"default": 1e9},
        "memory_bytes_per_second": 1e9,
        "launch_seconds": 0.0,
        "collectives": dict.fromkeys(kinds, rate),
        "allocator_alignment_bytes": 1,
    }
    return Hardware(**{**fields, **changes})


def two_dimensions(hosts: int, world_size: int) -> tuple[MeshDim, MeshDim]:
    """The mesh dimensions of hosts with equal numbers of ranks."""
    return MeshDim("host", hosts, OUTER), MeshDim("gpu", world_size // hosts, INNER)


def ranks_along(hosts: int, world_size: int) -> dict[str, list[list[int]]]:
    """The ranks of the process groups along each mesh dimension."""
    each = world_size // hosts
    within = [list(range(h * each, (h + 1) * each)) for h in range(hosts)]
    return {INNER: within, OUTER: [list(ranks) for ranks in zip(*within, strict=True)]}


def with_mesh_dims(given: Hardware, outer: LinkRate, inner: LinkRate) -> Hardware:
    """A profile with one rate for all collectives between hosts, and one within a host."""
    dimensions = {
        name: dict.fromkeys(given.collectives, rate)
        for name, rate in (("host", outer), ("gpu", inner))
    }
    return dataclasses.replace(given, dimensions=dimensions)


def parameter(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = True,
) -> Parameter:
    """A parameter with Adam's state: two elements for each element of the parameter."""
    numel = 1
    for size in shape:
        numel *= size
    return Parameter(
        name=name,
        shape=tuple(shape),
        dtype=str(dtype).removeprefix("torch."),
        numel=numel,
        element_bytes=dtype.itemsize,
        requires_grad=requires_grad,
        optimizer_bytes=2 * numel * dtype.itemsize if requires_grad else 0,
    )


def plan_of(
    parameters: Sequence[Parameter],
    decisions: Mapping[str, Decision] | Decision,
    world_size: int,
    **changes: Any,
) -> Plan:
    rows = tuple(
        ParameterPlan(
            p.name,
            p.shape,
            p.dtype,
            decisions if isinstance(decisions, Decision) else decisions[p.name],
        )
        for p in parameters
    )
    return Plan(rows, world_size=world_size, **changes)


def context(
    parameters: Sequence[Parameter] = (),
    decisions: Mapping[str, Decision] | Decision = Decision.SHARD_REGATHER,
    *,
    world_size: int = 2,
    rank: int = 0,
    bucket_bytes: int = 0,
    in_flight_bytes: int | None = None,
    **changes: Any,
) -> Context:
    """A context with the profile of :func:`hardware`; without buckets by default."""
    plan = plan_of(
        parameters,
        decisions,
        world_size,
        bucket_bytes=bucket_bytes,
        in_flight_bytes=in_flight_bytes,
    )
    fields: dict[str, Any] = {
        "plan": plan,
        "hardware": hardware(),
        "parameters": tuple(parameters),
        "world_size": world_size,
        "rank": rank,
        "group_name": GROUP,
    }
    return Context(**{**fields, **changes})


def local_shape(shape: Sequence[int], world_size: int, rank: int, hosts: int = 1) -> list[int]:
    """The shape of a rank's shard: ``ceil(rows / world_size)`` rows, fewer on the last ranks."""
    start, stop = local_rows(shape[0], world_size, rank, hosts)
    return [stop - start, *shape[1:]]


def local_rows(rows: int, world_size: int, rank: int, hosts: int = 1) -> tuple[int, int]:
    """First and last (exclusive) row of a rank's shard.

    ``hosts``: rows are divided among hosts first, as by a DTensor on a mesh of hosts and ranks.
    """
    spans = [(0, rows)]
    for parts in (hosts, world_size // hosts):
        cut = []
        for start, stop in spans:
            each = -(-(stop - start) // parts)
            edges = [min(start + index * each, stop) for index in range(parts + 1)]
            cut += itertools.pairwise(edges)
        spans = cut
    return spans[rank]


def price(
    node: fx.Node,
    seconds: float = 0.0,
    memory_bytes: int = 0,
    start_delay_seconds: float = 0.0,
    in_function: bool = False,
) -> fx.Node:
    """Set a node's cost by hand, in the form that ``annotate`` sets."""
    cost = Cost(
        memory_bytes=memory_bytes,
        seconds=seconds,
        start_delay_seconds=start_delay_seconds,
        in_function=in_function,
    )
    COST.set(node, cost)
    return node

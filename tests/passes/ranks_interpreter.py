"""Interpreter for the graphs of N ranks in one process: real tensors, no process group, no threads.

A generator runs each rank's graph and stops at every collective (or marker). When all ranks have
stopped, the interpreter exchanges the data and all ranks continue. Ranks must agree on the next
collective, its splits and its parameters, and the ranks of its process group on its shape. A
difference is an error at once; real ranks would hang.

A collective runs in its process group: all ranks, unless ``groups`` gives other members.

Between a collective's start and its wait the interpreter assumes the worst of a network: the
output holds garbage until the wait, and the input must not change before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.fx_utils import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    WAIT,
)
from passes.graph.metadata import COLLECTIVE
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.ops.p2p import EXCHANGE, GATHER_PARTS
from tests.passes.graphs import local_rows


class RanksError(AssertionError):
    """The ranks' graphs cannot run together, or a graph misuses a collective."""


@dataclasses.dataclass
class _Request:
    """A rank's call of a collective: node, operator, input tensor, other arguments."""

    node: fx.Node
    target: Any
    tensor: Tensor
    rest: tuple[Any, ...]

    def must_agree(self) -> tuple[Any, ...]:
        """The values that must be equal on the ranks of a group."""
        purpose = COLLECTIVE.get(self.node)
        if self.target is REDUCE_GRAD:
            rest, shape = self.rest[1:], tuple(self.tensor.shape)  # [0] is the rank's own shard
        elif self.target is UNSHARD:
            rest, shape = self.rest, None  # shards differ in rows
        else:
            rest, shape = self.rest, tuple(self.tensor.shape)
        return (self.target, shape, self.tensor.dtype, repr(rest), purpose)

    def of_any_shape(self) -> tuple[Any, ...]:
        """The values that must be equal on all ranks."""
        target, _, *rest = self.must_agree()
        return target, *rest

    @property
    def group(self) -> str:
        """The process group; for a marker, the group of the ranks that share the rows."""
        return str(self.rest[3] if self.target in (UNSHARD, REDUCE_GRAD) else self.rest[-1])

    @property
    def hosts(self) -> int:
        """For a marker: the number of hosts that the rows are divided among first."""
        return self.rest[5] if len(self.rest) > 5 else 1


@dataclasses.dataclass
class _InFlight:
    result: Tensor
    source: Tensor
    as_started: Tensor


def run_ranks(
    graphs: Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> list[tuple[Any, ...]]:
    """Run the graphs; the outputs by rank.

    ``groups``: by the name of a process group, the ranks of each group of that name.

    Raises:
        RanksError: if the ranks disagree, a value contradicts its ``meta["val"]``, an input of
            a collective is not contiguous or changes in flight, or a wait is missing.
    """
    runs = [_walk(gm, values) for gm, values in zip(graphs, inputs, strict=True)]
    replies: list[Tensor | None] = [None] * len(runs)
    outputs: dict[int, tuple[Any, ...]] = {}
    while True:
        requests: list[_Request] = []
        for rank, run in enumerate(runs):
            try:
                requests.append(run.send(replies[rank]))
            except StopIteration as stop:
                outputs[rank] = stop.value
        if len(outputs) == len(runs):
            return [outputs[rank] for rank in range(len(runs))]
        if outputs:
            raise RanksError(f"ranks {sorted(outputs)} are done, others wait in {requests[0].node}")
        everyone = [range(len(runs))]
        members = (groups or {}).get(requests[0].group, everyone)
        _check_agreement(requests, members)
        for together in members:
            exchanged = _exchange([requests[rank] for rank in together], requests)
            for rank, reply in zip(together, exchanged, strict=True):
                replies[rank] = reply


def _check_agreement(requests: Sequence[_Request], members: Sequence[Sequence[int]]) -> None:
    """All ranks start one collective; the ranks of a group give it tensors of one shape."""
    firsts = {rank: together[0] for together in members for rank in together}
    for rank, request in enumerate(requests):
        first = firsts[rank]
        alike = request.must_agree() == requests[first].must_agree()
        if not alike or request.of_any_shape() != requests[0].of_any_shape():
            other = 0 if alike else first
            raise RanksError(
                f"rank {other} starts {requests[other].must_agree()}, "
                f"rank {rank} {request.must_agree()}"
            )


def _walk(
    gm: fx.GraphModule, inputs: Sequence[Any]
) -> Generator[_Request, Tensor | None, tuple[Any, ...]]:
    values: dict[fx.Node, Any] = {}
    flying: dict[fx.Node, _InFlight] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = getattr(gm, node.target)
        elif node.op == "output":
            if flying:
                raise RanksError(f"never waited for: {list(flying)}")
            return tuple(args[0])
        elif node.target in COLLECTIVES or node.target in (UNSHARD, REDUCE_GRAD):
            reply = yield _Request(node, node.target, args[0], args[1:])
            assert reply is not None
            values[node] = reply
            if node.target in COLLECTIVES:
                if not args[0].is_contiguous():
                    raise RanksError(f"{node}: its input is not contiguous")
                flying[node] = _InFlight(reply, args[0], args[0].clone())
                values[node] = _garbage_like(reply)
        elif node.target is WAIT:
            values[node] = args[0].copy_(_landed(node.args[0], flying.pop(node.args[0])))
        else:
            values[node] = node.target(*args, **kwargs)
        _compare_with_meta(node, values[node])
    raise AssertionError("a graph without an output")


def _landed(start: fx.Node, flight: _InFlight) -> Tensor:
    """The result of a collective at its wait."""
    if not torch.equal(flight.source, flight.as_started):
        raise RanksError(f"{start}: its input changed before the wait")
    return flight.result


def _garbage_like(value: Tensor) -> Tensor:
    return torch.full_like(value, float("nan") if value.is_floating_point() else 99)


def _compare_with_meta(node: fx.Node, value: Any) -> None:
    said = node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(said, Tensor):
        return
    if value.shape != said.shape or value.dtype != said.dtype:
        raise RanksError(
            f"{node} says {said.dtype}{list(said.shape)} in meta['val'] and is "
            f"{value.dtype}{list(value.shape)}"
        )


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order of the ranks: equal inputs give equal bits."""
    return functools.reduce(torch.add, tensors)


def _exchange(requests: Sequence[_Request], of_all: Sequence[_Request]) -> Sequence[Tensor]:
    """The results of the ranks of one group; ``of_all``: the requests of all groups."""
    target, world_size = requests[0].target, len(requests)
    tensors = [request.tensor for request in requests]
    if target is UNSHARD:
        _, shape, sharded = requests[0].rest[:3]
        wholes = [torch.cat(tensors)] * world_size if sharded else tensors
        assert all(list(whole.shape) == list(shape) for whole in wholes)
        return wholes
    if target is REDUCE_GRAD:
        mean = _sum([one.tensor * (1.0 / len(of_all)) for one in of_all]).contiguous()
        if not requests[0].rest[2]:
            return [mean.clone() for _ in requests]
        hosts = requests[0].hosts
        spans = [local_rows(mean.shape[0], world_size, rank, hosts) for rank in range(world_size)]
        return [mean[start:stop].clone() for start, stop in spans]
    if target in (ALL_GATHER, GATHER_PARTS):
        assert requests[0].rest[0] == world_size
        return [torch.cat(tensors) for _ in requests]
    if target is ALL_REDUCE:
        return [_sum(tensors).clone() for _ in requests]
    if target is REDUCE_SCATTER:
        assert requests[0].rest[1] == world_size
        return [part.clone() for part in _sum(tensors).chunk(world_size)]
    if target is EXCHANGE:
        assert requests[0].rest[0] == world_size
        rows = [tensor.view(world_size, -1) for tensor in tensors]
        return [torch.cat([table[rank] for table in rows]) for rank in range(world_size)]
    assert target is ALL_TO_ALL
    received, sent, _ = requests[0].rest
    assert received == sent and sum(sent) == len(tensors[0])
    pieces = [tensor.split(sent) for tensor in tensors]
    return [torch.cat([piece[rank] for piece in pieces]) for rank in range(world_size)]

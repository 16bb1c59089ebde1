"""Simulate: timelines and memory worked out by hand, and a brute-force reference."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence

import networkx as nx
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, WAIT
from passes.graph.metadata import COLLECTIVE, COST, REGION
from passes.simulate.simulator import Simulation, simulate
from passes.types.annotations import Cost
from passes.types.plan import Collective
from tests.passes.examples import examples
from tests.passes.graphs import GROUP, GraphBuilder, price

aten = torch.ops.aten


class Priced(GraphBuilder):
    """Nodes that cost what the test says; all tensors are 2 by 2, whatever bytes they have."""

    def tensor(self, name: str, memory_bytes: int = 0, **meta: object) -> fx.Node:
        return price(self.input(name, [2, 2], **meta), 0.0, memory_bytes)

    def kernel(self, *inputs: fx.Node, seconds: float = 0.0, memory_bytes: int = 0) -> fx.Node:
        """A kernel that nothing fuses with."""
        first, last = inputs[0], inputs[-1]
        return price(self.call(aten.mm.default, first, last), seconds, memory_bytes)

    def view(self, source: fx.Node) -> fx.Node:
        return price(self.call(aten.t.default, source))

    def pointwise(self, source: fx.Node, memory_bytes: int = 0) -> fx.Node:
        return price(self.call(aten.sin.default, source), 0.0, memory_bytes)

    def gather(
        self, source: fx.Node, seconds: float = 0.0, memory_bytes: int = 0, group: str = GROUP
    ) -> fx.Node:
        node = price(self.call(ALL_GATHER, source, 1, group), seconds, memory_bytes)
        COLLECTIVE.set(node, Collective(("w",), gathers=True))
        return node

    def reduce(self, source: fx.Node, seconds: float = 0.0) -> fx.Node:
        """An all-reduce, which works in place."""
        node = price(self.call(ALL_REDUCE, source, "sum", GROUP), seconds)
        COLLECTIVE.set(node, Collective(("w",), gathers=False))
        return node

    def wait(self, start: fx.Node) -> fx.Node:
        return price(self.call(WAIT, start))

    def of_model(
        self, source: fx.Node, seconds: float, group: str = "model", beside: Sequence[str] = ()
    ) -> fx.Node:
        """An all-reduce of the model itself. ``beside``: groups that use its links."""
        node = self.call(torch.ops.osdp.model_all_reduce.default, source, "sum", group)
        COST.set(node, Cost(seconds=seconds, beside=frozenset(beside)))
        return node

    def simulated(self, *outputs: fx.Node) -> Simulation:
        return simulate(self.finish(*outputs).graph)


def test_kernels_run_one_after_another():
    b = Priced()
    first = b.kernel(b.tensor("x"), seconds=2.0)
    second = b.kernel(first, seconds=3.0)
    found = b.simulated(second)
    assert (found.start[second], found.end[second]) == (2.0, 5.0)
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (5.0, 5.0, 0.0)


def test_what_outlasts_the_compute_beside_it_is_exposed():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=10.0)
    beside = b.kernel(x, seconds=4.0)
    last = b.kernel(b.wait(start), beside, seconds=1.0)
    found = b.simulated(last)
    assert found.start[beside] == 0.0
    assert found.start[last] == 10.0
    assert found.step_seconds == 11.0
    assert found.compute_seconds == 5.0
    assert found.exposed_seconds == 6.0
    assert found.exposed == {start: 6.0}


def test_what_ends_before_its_wait_costs_nothing():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    beside = b.kernel(x, seconds=4.0)
    found = b.simulated(b.kernel(b.wait(start), beside, seconds=1.0))
    assert (found.step_seconds, found.exposed_seconds) == (5.0, 0.0)
    assert found.exposed == {start: 0.0}


def test_a_collective_waited_for_on_the_spot_is_exposed_whole():
    b = Priced()
    before = b.kernel(b.tensor("x"), seconds=4.0)
    found = b.simulated(b.kernel(b.wait(b.gather(before, seconds=3.0)), seconds=1.0))
    assert (found.step_seconds, found.exposed_seconds) == (8.0, 3.0)


def test_collectives_queue_on_one_network():
    b = Priced()
    x = b.tensor("x")
    first, second = b.gather(x, seconds=3.0), b.gather(x, seconds=2.0)
    found = b.simulated(b.kernel(b.wait(first), b.wait(second), seconds=1.0))
    assert (found.start[first], found.end[first]) == (0.0, 3.0)
    assert (found.start[second], found.end[second]) == (3.0, 5.0)
    assert found.exposed == {first: 3.0, second: 2.0}


def test_each_process_group_has_a_stream_of_its_own():
    b = Priced()
    x = b.tensor("x")
    first, other = b.gather(x, seconds=3.0), b.gather(x, seconds=2.0, group="another")
    last = b.gather(x, seconds=2.0, group="another")
    found = b.simulated(b.kernel(b.wait(first), b.wait(other), seconds=1.0), b.wait(last))
    assert (found.start[first], found.end[first]) == (0.0, 3.0)
    assert (found.start[other], found.end[other]) == (0.0, 2.0)
    assert (found.start[last], found.end[last]) == (2.0, 4.0)
    assert found.exposed == {first: 3.0, other: 0.0, last: 0.0}


def test_a_collective_that_is_waited_for_twice_stalls_once():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    found = b.simulated(b.kernel(b.wait(start), b.wait(start), seconds=1.0))
    assert found.exposed == {start: 3.0}
    assert found.step_seconds == 4.0


def test_a_collective_starts_no_earlier_than_the_kernel_before_it_ends():
    b = Priced()
    before = b.kernel(b.tensor("x"), seconds=4.0)
    start = b.gather(before, seconds=3.0)
    found = b.simulated(b.wait(start))
    assert (found.start[start], found.end[start]) == (4.0, 7.0)


def test_the_step_ends_when_both_streams_have():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=9.0)
    kernel = b.kernel(x, seconds=1.0)
    found = b.simulated(b.wait(start), kernel)
    assert (found.step_seconds, found.exposed_seconds) == (9.0, 8.0)


def test_a_models_own_collective_runs_on_its_stream_and_compute_waits_for_it():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    reduced = b.of_model(b.kernel(x, seconds=1.0), seconds=4.0)
    last = b.kernel(b.wait(start), reduced, seconds=1.0)
    found = b.simulated(last)
    assert (found.start[reduced], found.end[reduced]) == (1.0, 5.0)
    assert (found.start[start], found.end[start]) == (0.0, 3.0)  # other links: at its full rate
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (6.0, 2.0, 4.0)
    assert found.exposed == {start: 0.0}
    assert found.of_model == {reduced: 4.0} and found.model_seconds == 4.0


def test_on_the_same_links_it_shares_the_bandwidth():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    reduced = b.of_model(b.kernel(x, seconds=1.0), seconds=4.0, beside=[GROUP])
    found = b.simulated(b.kernel(b.wait(start), reduced, seconds=1.0))
    # The gather's last 2 s take 4 s beside as much of the other; 2 s are left of that then.
    assert (found.end[start], found.end[reduced]) == (5.0, 7.0)
    assert (found.step_seconds, found.exposed_seconds) == (8.0, 6.0)
    assert found.of_model == {reduced: 6.0}


def test_ten_thousand_nodes_take_less_than_a_second():
    b = Priced()
    x = b.tensor("x", 10)
    node = x
    for region in range(2500):
        whole = b.wait(b.gather(x, seconds=1.0, memory_bytes=4))
        node = b.pointwise(b.kernel(node, whole, seconds=2.0, memory_bytes=8), 8)
        REGION.set(node, region)
    graph = b.finish(node).graph
    assert len(graph.nodes) > 10_000
    # The thread's own time, without walks over the objects of other tests; the least of three, for
    # a core that is shared with another process is slower.
    taken_seconds = []
    gc.disable()
    try:
        for _ in range(3):
            begin = time.thread_time()
            simulate(graph)
            taken_seconds.append(time.thread_time() - begin)
    finally:
        gc.enable()
    assert min(taken_seconds) < 1.0  # 0.12 s on one core


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction of a random program; ``inputs`` are indices of earlier ones."""

    kind: str  # input, kernel, view, start, wait
    inputs: tuple[int, ...] = ()
    seconds: int = 0
    memory_bytes: int = 0


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Some inputs, then kernels, views, and collectives that are waited for at a random time."""
    ops = [
        Op("input", memory_bytes=draw(st.integers(0, 9))) for _ in range(draw(st.integers(1, 3)))
    ]
    in_flight: list[int] = []

    def readable() -> list[int]:
        return [index for index, op in enumerate(ops) if op.kind != "start"]

    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["kernel", "kernel", "view", "start", "wait"]))
        source = draw(st.sampled_from(readable()))
        seconds, size = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        if kind == "kernel":
            ops.append(Op(kind, (source, draw(st.sampled_from(readable()))), seconds, size))
        elif kind == "view":
            ops.append(Op(kind, (source,)))
        elif kind == "start":
            in_flight.append(len(ops))
            ops.append(Op(kind, (source,), seconds, size))
        elif in_flight:
            ops.append(Op(kind, (in_flight.pop(draw(st.integers(0, len(in_flight) - 1))),)))
    ops.extend(Op("wait", (start,)) for start in in_flight)
    return ops


def build(ops: Sequence[Op], returned: Sequence[int]) -> fx.Graph:
    b = Priced()
    nodes: list[fx.Node] = []
    for index, op in enumerate(ops):
        sources = [nodes[i] for i in op.inputs]
        if op.kind == "input":
            nodes.append(b.tensor(f"x{index}", op.memory_bytes))
        elif op.kind == "kernel":
            nodes.append(b.kernel(*sources, seconds=op.seconds, memory_bytes=op.memory_bytes))
        elif op.kind == "view":
            nodes.append(b.view(*sources))
        elif op.kind == "start":
            nodes.append(b.gather(*sources, seconds=op.seconds, memory_bytes=op.memory_bytes))
        else:
            nodes.append(b.wait(*sources))
    return b.finish(*[nodes[i] for i in returned]).graph


def longest_path_seconds(ops: Sequence[Op]) -> float:
    """When everything has ended: the longest path through what must wait for what."""
    follows = nx.DiGraph()
    compute, network = ("begin", 0), ("begin", 0)
    ended: dict[int, tuple[str, int]] = {}
    for index, op in enumerate(ops):
        mine = ("end", index)
        if op.kind == "start":
            follows.add_edge(compute, mine, seconds=op.seconds)
            follows.add_edge(network, mine, seconds=op.seconds)
            network = ended[index] = mine
        else:
            follows.add_edge(compute, mine, seconds=op.seconds)
            if op.kind == "wait":
                follows.add_edge(ended[op.inputs[0]], mine, seconds=0)
            compute = mine
    return float(nx.dag_longest_path_length(follows, weight="seconds"))


def alive_bytes(ops: Sequence[Op], returned: Sequence[int]) -> list[int]:
    """Bytes alive at every instruction and at the return, by asking for each buffer each time."""

    def owner(index: int) -> int:
        while ops[index].kind in ("view", "wait"):
            index = ops[index].inputs[0]
        return index

    needed: dict[int, set[int]] = {i: {i} for i in range(len(ops)) if owner(i) == i}
    for index, op in enumerate(ops):
        for source in op.inputs:
            if op.kind in ("kernel", "start"):
                needed[owner(source)].add(index)
            elif op.kind == "wait":  # what the collective reads and what it writes
                needed[owner(ops[source].inputs[0])].add(index)
                needed[source].add(index)
    for source in returned:
        needed[owner(source)].add(len(ops))
    return [
        sum(ops[i].memory_bytes for i, times in needed.items() if i <= now <= max(times))
        for now in range(len(ops) + 1)
    ]


@examples(150)
@given(programs(), st.data())
def test_time_and_memory_are_those_of_a_brute_force_reference(ops: list[Op], data: st.DataObject):
    readable = [index for index, op in enumerate(ops) if op.kind != "start"]
    returned = data.draw(st.lists(st.sampled_from(readable), min_size=1, max_size=2))
    found = simulate(build(ops, returned))
    assert found.step_seconds == longest_path_seconds(ops)
    assert found.memory.curve == alive_bytes(ops, returned)
    assert found.peak_bytes == max(found.memory.curve)
    assert sum(found.memory.peak.values()) == found.peak_bytes
    assert found.memory.kept_bytes == found.memory.curve[-1]

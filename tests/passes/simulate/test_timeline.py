"""Timeline: worked out by hand, the simulator's sums on random programs, and the size it holds."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from passes.graph.metadata import COST, REGION
from passes.simulate.simulator import simulate
from passes.simulate.timeline import (
    COMPUTE,
    NETWORK,
    Buffer,
    Event,
    Stall,
    Timeline,
    label_of,
    timeline_of,
)
from passes.types.annotations import Cost, Reason
from tests.passes.examples import examples
from tests.passes.graphs import price
from tests.passes.simulate.test_simulator import Op, Priced, build, programs

ALL_ALONG = Reason.NO_COMPUTE.value


def timeline(b: Priced, *outputs: fx.Node, **base_bytes: int) -> Timeline:
    graph = b.finish(*outputs).graph
    return timeline_of(graph, simulate(graph), phase="forward", base=base_bytes)


def test_kernels_and_collectives_are_events_on_their_streams_and_waiting_is_a_stall():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=10.0)
    beside = b.kernel(x, seconds=4.0)
    last = b.kernel(b.wait(start), beside, seconds=1.0)
    found = timeline(b, last)
    assert found.events == (
        Event(start.name, "gather w", NETWORK, 0.0, 10.0, 6.0, reason=ALL_ALONG),
        Event("mm_default", "mm", COMPUTE, 0.0, 4.0),
        Event("mm_default_1", "mm", COMPUTE, 10.0, 11.0),
    )
    assert found.stalls == (Stall(start.name, "gather w", 4.0, 10.0),)
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (11.0, 5.0, 6.0)


def test_a_models_own_collective_is_on_a_stream_of_its_own_and_compute_is_idle_meanwhile():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=2.0)
    reduced = b.of_model(b.kernel(x, seconds=1.0), seconds=4.0)
    found = timeline(b, b.kernel(b.wait(start), reduced, seconds=1.0))
    label = "model_all_reduce"
    assert found.events == (
        Event(start.name, "gather w", NETWORK, 0.0, 2.0),
        Event("mm_default", "mm", COMPUTE, 0.0, 1.0),
        Event(reduced.name, label, "network 2", 1.0, 5.0, 4.0, reason=Reason.OF_MODEL.value),
        Event("mm_default_1", "mm", COMPUTE, 5.0, 6.0),
    )
    assert found.stalls == (Stall(reduced.name, label, 1.0, 5.0),)
    assert (found.step_seconds, found.compute_seconds, found.exposed_seconds) == (6.0, 2.0, 4.0)


def test_every_further_process_group_is_a_stream():
    b = Priced()
    x = b.tensor("x")
    gathers = [b.gather(x, seconds=1.0, group=group) for group in ("a", "b", "a", "c")]
    found = timeline(b, *[b.wait(gather) for gather in gathers])
    streams = [event.stream for event in found.events]
    assert streams == ["network", "network 2", "network", "network 3"]


def test_beside_what_others_hold_the_same_graph_needs_more():
    b = Priced()
    first = b.kernel(b.tensor("x"), memory_bytes=100)
    alone = timeline(b, b.kernel(first, memory_bytes=10), parameters=1000)
    found = alone.beside({"parameters": 5, "saved": 300, "nothing": 0})
    assert found.base == {"parameters": 1005, "saved": 300}
    assert found.peak_bytes == alone.peak_bytes + 305
    assert sum(buffer.size_bytes for buffer in found.peak_buffers) == found.peak_bytes
    assert found.kept_bytes == alone.kept_bytes == 10
    assert max(alive for _, alive in found.memory) == found.peak_bytes


def test_hidden_communication_stalls_nothing():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=3.0)
    beside = b.kernel(x, seconds=4.0)
    found = timeline(b, b.kernel(b.wait(start), beside, seconds=1.0))
    assert found.stalls == ()
    assert [event.exposed_seconds for event in found.events] == [0.0, 0.0, 0.0]


def test_the_end_is_waited_for_where_the_network_outlasts_everything():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x, seconds=9.0)
    found = timeline(b, b.kernel(x, seconds=1.0))  # nobody waits for the gather
    assert found.stalls == (Stall(start.name, "gather w", 1.0, 9.0),)
    assert found.events[0].exposed_seconds == found.exposed_seconds == 8.0


def test_what_a_collective_takes_of_the_processor_is_compute():
    b = Priced()
    x = b.tensor("x")
    start = b.gather(x)
    COST.set(start, Cost(seconds=5.0, compute_overhead_seconds=2.0))
    beside = b.kernel(x, seconds=1.0)
    found = timeline(b, b.kernel(b.wait(start), beside, seconds=1.0))
    assert found.events[:3] == (
        Event(start.name, "gather w", NETWORK, 0.0, 5.0, 2.0, reason=ALL_ALONG),
        Event(start.name, "processor's share of gather w", COMPUTE, 0.0, 2.0),
        Event("mm_default", "mm", COMPUTE, 2.0, 3.0),
    )
    assert (found.compute_seconds, found.exposed_seconds) == (4.0, 2.0)


def test_the_memory_is_told_by_the_second_with_the_base():
    b = Priced()
    x = b.tensor("x", 100)
    first = b.kernel(x, seconds=2.0, memory_bytes=10)
    second = b.kernel(first, seconds=3.0, memory_bytes=20)
    found = timeline(b, second, parameters=1000, inputs=0)
    assert found.memory == ((0.0, 1100), (0.0, 1110), (2.0, 1030), (5.0, 1020))
    assert (found.peak_bytes, found.peak_seconds, found.peak_at) == (1110, 0.0, first.name)
    assert found.base == {"parameters": 1000}


def test_inputs_are_there_from_the_start():
    b = Priced()
    x, y = b.tensor("x", 100), b.tensor("y", 50)
    found = timeline(b, b.kernel(x, y, seconds=1.0, memory_bytes=1))
    assert found.memory == ((0.0, 150), (0.0, 151), (1.0, 1))


def test_memory_is_taken_when_a_collective_is_issued_not_when_the_network_is_free():
    b = Priced()
    x = b.tensor("x")
    first = b.gather(x, seconds=5.0, memory_bytes=10)
    second = b.gather(x, seconds=5.0, memory_bytes=20)
    last = b.kernel(b.wait(first), b.wait(second), seconds=1.0)
    assert timeline(b, last).memory[:3] == ((0.0, 0), (0.0, 10), (0.0, 30))


def test_what_is_alive_at_the_peak_is_listed_largest_first_and_adds_up():
    b = Priced()
    kept = b.tensor("kept", 4, saved=True, gathered="w.2")
    gathered = b.wait(b.gather(b.tensor("x", 1, input="batch"), memory_bytes=8))
    activation = b.kernel(gathered, kept, memory_bytes=16)
    last = b.kernel(gathered, activation, memory_bytes=32)
    found = timeline(b, b.kernel(last, kept), parameters=5)
    assert found.peak_buffers == (
        Buffer("mm_default_1", "mm", "activations", 32),
        Buffer("mm_default", "mm", "activations", 16),
        Buffer("all_gather_into_tensor_default", "gather w", "gathered", 8),
        Buffer("parameters", "all parameters", "parameters", 5, is_part=True),
        Buffer("kept", "kept w.2", "gathered", 4),
    )
    assert sum(buffer.size_bytes for buffer in found.peak_buffers) == found.peak_bytes


def test_what_is_written_over_at_the_peak_is_not_listed_twice():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    result = b.pointwise(source, memory_bytes=10)
    other = b.kernel(b.tensor("y"), memory_bytes=1)
    found = timeline(b, b.kernel(result, other))
    assert sum(buffer.size_bytes for buffer in found.peak_buffers) == found.peak_bytes == 11

    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    second = b.pointwise(source, memory_bytes=5)
    first = price(b.call(torch.ops.aten.mul.Tensor, source, second), memory_bytes=10)
    for node in (first, second):
        REGION.set(node, 0)  # one kernel writes both, the first over the source
    found = timeline(b, first, second)
    assert found.peak_bytes == 15
    assert [buffer.name for buffer in found.peak_buffers] == [first.name, second.name]


@pytest.mark.parametrize(
    ("meta", "label"),
    [
        ({"nn_module_stack": {"a": ("L['self'].blocks.0.up", object)}}, "mm in blocks.0.up"),
        ({"fwd_nn_module_stack": {"a": ("L['model'].head", object)}}, "mm in head"),
        ({"nn_module_stack": {"a": ("", object)}}, "mm"),
        ({}, "mm"),
    ],
)
def test_a_kernel_is_called_by_its_operator_and_its_module(meta, label):
    b = Priced()
    node = b.kernel(b.tensor("x"))
    node.meta.update(meta)
    assert label_of(node) == label


@pytest.mark.parametrize(
    ("meta", "label"),
    [
        ({"parameter": "up.weight"}, "up.weight"),
        ({"input": "batch"}, "batch"),
        ({"saved": True}, "saved for the backward"),
        ({"saved": True, "gathered": "up.weight"}, "kept up.weight"),
    ],
)
def test_an_input_is_called_by_what_it_is(meta, label):
    assert label_of(Priced().tensor("x", **meta)) == label


def test_a_timeline_holds_no_graph():
    def plain(value: object) -> bool:
        if dataclasses.is_dataclass(value):
            return all(plain(getattr(value, f.name)) for f in dataclasses.fields(value))
        if isinstance(value, dict):
            return all(map(plain, value.values()))
        if isinstance(value, tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, str | int | float)

    b = Priced()
    x = b.tensor("x", 3)
    assert plain(timeline(b, b.kernel(b.wait(b.gather(x, 2.0)), x, seconds=1.0), parameters=1))


@examples(100)
@given(programs(), st.data())
def test_it_adds_up_to_what_the_simulator_says(ops: list[Op], data: st.DataObject):
    readable = [index for index, op in enumerate(ops) if op.kind != "start"]
    returned = data.draw(st.lists(st.sampled_from(readable), min_size=1, max_size=2))
    graph = build(ops, returned)
    simulation = simulate(graph)
    found = timeline_of(graph, simulation, phase="forward", base={"parameters": 7, "inputs": 5})
    alive = [0] * len(simulation.memory.curve)
    for life in found.lives:
        for place in range(life.first, life.last + 1):
            alive[place] += life.buffer.size_bytes
    assert alive == simulation.memory.curve and len(found.places_seconds) == len(alive)
    assert found.compute_seconds == simulation.compute_seconds
    assert found.exposed_seconds == simulation.exposed_seconds
    assert found.compute_seconds + found.exposed_seconds == found.step_seconds
    for stream in (COMPUTE, NETWORK):
        spans: list[Event | Stall] = [event for event in found.events if event.stream == stream]
        if stream == COMPUTE:
            spans += found.stalls
        spans.sort(key=lambda span: span.start_seconds)
        assert all(span.seconds > 0 for span in spans)
        assert all(a.end_seconds <= b.start_seconds for a, b in itertools.pairwise(spans))
    moments = [seconds for seconds, _ in found.memory]
    assert moments == sorted(moments) and moments[-1] == found.step_seconds
    assert max(size_bytes for _, size_bytes in found.memory) == found.peak_bytes
    assert found.peak_bytes == 12 + simulation.peak_bytes
    assert (found.peak_seconds, found.peak_bytes) in found.memory
    sizes = [buffer.size_bytes for buffer in found.peak_buffers]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == found.peak_bytes


@pytest.mark.thorough
def test_ten_thousand_nodes_take_under_a_second():
    b = Priced()
    weights = [b.tensor(f"w{index}", 8) for index in range(50)]
    value, in_flight = b.tensor("x", 8), []
    for index in range(1100):  # nine nodes a turn: as in a deep network that gathers ahead
        in_flight.append(b.gather(weights[index % 50], seconds=1.0, memory_bytes=16))
        value = b.kernel(b.view(value), b.wait(in_flight[0]), seconds=1.0, memory_bytes=8)
        if len(in_flight) > 2:
            in_flight.pop(0)
        value = b.pointwise(b.pointwise(value), 8)
        residual = b.kernel(b.view(value), value, seconds=1.0, memory_bytes=8)
        value = price(b.call(torch.ops.aten.add.Tensor, residual, value), 0.1, 8)
    graph = b.finish(value).graph
    assert len(graph.nodes) >= 9_900

    def seconds_of(function):
        """The thread's own, the least of three: other programs run on the machine."""
        taken = []
        for _ in range(3):
            begun = time.thread_time()
            result = function()
            taken.append(time.thread_time() - begun)
        return min(taken), result

    simulating, simulation = seconds_of(lambda: simulate(graph))
    assert simulating < 1.0
    looking, _ = seconds_of(lambda: timeline_of(graph, simulation, phase="forward"))
    assert looking < 1.0

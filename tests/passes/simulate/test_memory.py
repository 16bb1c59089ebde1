"""Memory: births, deaths and reuse of buffers."""

from __future__ import annotations

import pytest

from passes.graph.metadata import COST, GRADIENT_OF, REGION
from tests.passes.graphs import price
from tests.passes.simulate.test_simulator import Priced, aten


def test_a_tensor_lives_from_the_kernel_that_writes_it_to_the_last_that_reads_it():
    b = Priced()
    first = b.kernel(b.tensor("x", 100), memory_bytes=10)
    second = b.kernel(first, memory_bytes=20)
    found = b.simulated(second)
    # x alone; x and first; first and second; second, which is returned.
    assert found.memory.curve == [100, 110, 30, 20]
    assert (found.peak_bytes, found.memory.peak_node, found.memory.kept_bytes) == (110, first, 20)


def test_parameters_are_not_counted():
    b = Priced()
    parameter = price(b.parameter("w", [2, 2]), 0.0, 1000)
    assert b.simulated(b.kernel(parameter, memory_bytes=10)).memory.curve == [0, 10, 10]


def test_a_view_is_its_base_seen_again_and_keeps_it_alive():
    b = Priced()
    base = b.kernel(b.tensor("x"), memory_bytes=100)
    view = b.view(base)
    other = b.kernel(b.tensor("y"), memory_bytes=10)
    last = b.kernel(view, other, memory_bytes=1)
    assert b.simulated(last).memory.curve == [0, 100, 100, 100, 110, 111, 1]


def test_a_returned_view_keeps_all_of_its_base():
    b = Priced()
    base = b.kernel(b.tensor("x"), memory_bytes=100)
    assert b.simulated(b.view(base)).memory.kept_bytes == 100


def test_a_collectives_input_and_output_live_until_its_wait():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    start = b.gather(source, memory_bytes=40)
    beside = b.kernel(b.tensor("y"), memory_bytes=100)
    wait = b.wait(start)
    last = b.kernel(wait, beside, memory_bytes=1)
    # The input's last reader is the collective: without the rule it would die there.
    assert b.simulated(last).memory.curve == [0, 10, 50, 50, 150, 150, 141, 1]


def test_an_all_reduce_works_in_the_memory_of_its_input():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    reduced = b.wait(b.reduce(source))
    other = b.kernel(b.tensor("y"), memory_bytes=5)
    found = b.simulated(reduced, other)
    assert found.memory.curve == [0, 10, 10, 10, 10, 15, 15]
    assert found.memory.kept_bytes == 15


def test_a_pointwise_result_is_written_over_an_input_that_dies():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    result = b.pointwise(source, memory_bytes=10)
    assert b.simulated(b.kernel(result, memory_bytes=1)).memory.curve == [0, 10, 10, 11, 1]


@pytest.mark.parametrize("why", ["it is read later", "it has another size", "it is an input"])
def test_a_pointwise_result_is_not_written_over_an_input_when(why: str):
    b = Priced()
    x = b.tensor("x", 10 if why == "it is an input" else 0)
    source = x if why == "it is an input" else b.kernel(x, memory_bytes=10)
    size = 9 if why == "it has another size" else 10
    result = b.pointwise(source, memory_bytes=size)
    also = source if why == "it is read later" else result
    assert b.simulated(b.kernel(result, also)).peak_bytes == 10 + size


def test_what_a_fused_kernel_reads_lives_until_that_kernel_runs():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    inside = b.pointwise(source)  # takes no memory: it only lives inside the kernel of the next
    other = b.kernel(b.tensor("y"), memory_bytes=100)
    result = price(b.call(aten.add.Tensor, inside, other), 0.0, 7)
    assert b.simulated(result).memory.curve == [0, 10, 10, 10, 110, 117, 7]


@pytest.mark.parametrize("in_function", [True, False])
def test_what_a_part_of_a_function_reads_is_freed_with_the_function(in_function: bool):
    b = Priced()
    last = b.tensor("z")
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    other = b.kernel(b.tensor("y"), memory_bytes=10)
    read = [b.pointwise(source, 2), b.pointwise(other, 10)]  # the second is written over other
    read.append(b.pointwise(last, 3))
    for number, node in enumerate(read):
        price(node, memory_bytes=COST.of(node).memory_bytes, in_function=in_function)
        REGION.set(node, number)
    after = b.kernel(read[1], read[2], memory_bytes=1)
    found = b.simulated(read[0], after)
    parts = [22, 22, 25] if in_function else [22, 12, 15]
    assert found.memory.curve == [0, 0, 10, 10, 20, *parts, 16, 3]
    assert found.peak_bytes == sum(found.memory.peak.values())


def test_a_concatenation_is_there_from_its_first_part_to_the_last_reader_of_a_part():
    b = Priced()
    parts = []
    for name in ("x", "y"):
        source = b.kernel(b.tensor(name), memory_bytes=10)
        parts.append(b.pointwise(source, 10))
    whole = price(b.call(aten.cat.default, parts), 0.0, 20)
    used = b.kernel(b.tensor("z"), memory_bytes=5)
    last = price(b.call(aten.add.Tensor, parts[0], used), 0.0, 1)
    for number, node in enumerate([*parts, whole, last]):
        price(node, memory_bytes=COST.of(node).memory_bytes, in_function=True)
        REGION.set(node, number)
    found = b.simulated(used, last)
    assert found.memory.curve == [0, 10, 30, 20, 30, 30, 30, 20, 25, 26, 6]


def test_an_operator_that_is_not_fused_ends_a_function():
    b = Priced()
    source = b.kernel(b.tensor("x"), memory_bytes=10)
    first = price(b.call(aten.sin.default, source), memory_bytes=2, in_function=True)
    between = b.kernel(first, memory_bytes=1)
    last = price(b.call(aten.cos.default, between), memory_bytes=2, in_function=True)
    for number, node in enumerate((first, last)):
        REGION.set(node, number)
    assert b.simulated(last).memory.curve == [0, 10, 12, 3, 3, 2]


def test_the_peak_is_told_by_kind():
    b = Priced()
    batch = b.tensor("x", 1)
    saved = b.tensor("saved", 2, saved=True)
    kept = b.tensor("kept", 4, saved=True, gathered=True)
    gathered = b.wait(b.gather(batch, memory_bytes=8))
    activation = b.kernel(saved, kept, memory_bytes=16)
    gradient = b.kernel(gathered, activation, memory_bytes=32)
    GRADIENT_OF.set(gradient, "w")
    sent = b.reduce(b.kernel(activation, memory_bytes=64))
    last = b.kernel(batch, saved, memory_bytes=128)
    last = b.kernel(last, kept)
    last = b.kernel(last, gathered)
    found = b.simulated(gradient, b.wait(sent), last)
    assert found.memory.peak == {
        "inputs": 1,
        "activations": 2 + 128,
        "gathered": 4 + 8,
        "gradients": 32,
        "communication": 64,
    }
    assert sum(found.memory.peak.values()) == found.peak_bytes

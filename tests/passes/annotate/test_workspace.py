"""Workspace: what a convolution takes beside its result, against what it really takes."""

from __future__ import annotations

import pytest
import torch

from osdp_compile import PeakMemory
from passes.annotate.annotate_costs import annotate, cost_of
from passes.annotate.workspace import workspace_bytes
from passes.simulate.simulator import simulate
from passes.simulate.timeline import timeline_of
from tests.passes.graphs import GraphBuilder, context

aten = torch.ops.aten
PLACE = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)

#: Rows, channels in and out, height and width: large weights, large inputs, large results.
SHAPES = [(16, 256, 512, 4), (16, 64, 128, 32), (4, 8, 256, 64)]
#: An input lower than the kernel.
LOW = (4, 256, 256, 2)


def convolution(rows, channels, out, size):
    b = GraphBuilder()
    x = b.input("x", [rows, channels, size, size])
    weight = b.input("w", [out, channels, 3, 3])
    forward = b.call(aten.convolution.default, x, weight, None, *PLACE)
    gradient = b.input("g", list(forward.meta["val"].shape))
    backward = b.call(
        aten.convolution_backward.default, gradient, x, weight, None, *PLACE, [True, True, False]
    )
    return b, forward, backward


def run(node):
    """The most bytes the operator really holds at once, its inputs left out."""
    made = {n: torch.ones(n.meta["val"].shape) for n in node.all_input_nodes}
    args = torch.fx.node.map_arg(node.args, lambda source: made[source])
    node.target(*args)
    with PeakMemory() as memory:
        node.target(*args)
    return memory.peak_bytes


def measured_and_predicted(node):
    """Bytes of all that is alive at the kernel's peak, inputs and results included."""
    value = node.meta["val"]
    results = [v for v in (value if isinstance(value, tuple | list) else [value]) if v is not None]
    inputs_bytes = sum(n.meta["val"].nbytes for n in node.all_input_nodes)
    results_bytes = sum(v.nbytes for v in results)
    return run(node) + inputs_bytes, results_bytes + workspace_bytes(node) + inputs_bytes


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_convolution_takes_what_is_predicted(shape):
    torch.set_num_threads(1)
    _, forward, backward = convolution(*shape)
    for node in (forward, backward):
        measured_bytes, predicted_bytes = measured_and_predicted(node)
        assert measured_bytes == pytest.approx(predicted_bytes, rel=0.15)


@needs_onednn
def test_a_low_input_takes_in_the_backward_what_some_cpus_take_or_the_usual():
    torch.set_num_threads(1)
    _, forward, backward = convolution(*LOW)
    measured_bytes, predicted_bytes = measured_and_predicted(forward)
    assert measured_bytes == pytest.approx(predicted_bytes, rel=0.15)
    measured_bytes, most_bytes = measured_and_predicted(backward)
    gradient, source, weight = (n.meta["val"].nbytes for n in backward.args[:3])
    usual_bytes = most_bytes - workspace_bytes(backward) + max(weight, source + gradient)
    assert 0.85 * usual_bytes <= measured_bytes <= 1.15 * most_bytes


def test_other_operators_take_none():
    b = GraphBuilder()
    assert workspace_bytes(b.call(aten.mm.default, b.input("x", [4, 4]), b.input("y", [4, 4]))) == 0


def test_the_peak_holds_it_while_the_kernel_runs_and_not_after():
    b, forward, _ = convolution(*SHAPES[0])
    b.graph.erase_node(
        next(n for n in b.graph.nodes if n.target is aten.convolution_backward.default)
    )
    b.graph.erase_node(next(n for n in b.graph.nodes if n.name == "g"))
    after = b.call(aten.mm.default, b.input("p", [4, 4]), b.input("q", [4, 4]))
    graph = annotate(b.finish(forward, after), context()).graph
    found = simulate(graph)
    own_bytes = cost_of(forward).workspace_bytes
    assert own_bytes > 0 and found.memory.peak_node is forward
    assert found.memory.peak["workspace"] == own_bytes
    assert sum(found.memory.peak.values()) == found.peak_bytes
    place = list(graph.nodes).index(forward)
    assert found.memory.curve[place + 1] < found.memory.curve[place] - own_bytes // 2
    buffers = timeline_of(graph, found, phase="forward").peak_buffers
    assert sum(buffer.size_bytes for buffer in buffers) == found.peak_bytes
    assert [b.size_bytes for b in buffers if b.kind == "workspace"] == [own_bytes]

"""Serves: every kernel, gather and reduction of a step is there for the parameters it should be."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from passes.annotate.annotate_costs import cost_of
from passes.graph.attribution import attribution
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, WAIT, is_collective
from passes.graph.metadata import COLLECTIVE, PHASE
from passes.pipeline import default_passes
from passes.pricing.predict import predict
from passes.types.decision import FLAT_DECISIONS, Decision
from passes.types.plan import Collective
from tests.passes.captures import capture_step
from tests.passes.graphs import GROUP, GraphBuilder, plan_of

aten = torch.ops.aten


def served(graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """What each node serves, but for those that serve nothing."""
    dataflow = Dataflow(graph)
    return {
        node: names
        for node, names in zip(dataflow.nodes, attribution(dataflow), strict=True)
        if names
    }


def test_a_gather_serves_its_parameter_and_the_kernel_the_weight_it_reads():
    b = GraphBuilder()
    shard, x = b.parameter("w", [2, 8]), b.input("x", [3, 8])
    start = b.call(ALL_GATHER, shard, 4, GROUP)
    COLLECTIVE.set(start, Collective(("w",), gathers=True))
    wait = b.call(WAIT, start)
    turned = b.call(aten.t.default, wait)
    product = b.call(aten.mm.default, x, turned)
    after = b.call(aten.sin.default, product)
    found = served(b.finish(after).graph)
    assert {n for n, names in found.items() if names == ("w",)} == {
        *(shard, start, wait, turned, product)
    }
    assert x not in found and after not in found


def test_a_weight_in_another_dtype_is_still_that_weight():
    b = GraphBuilder()
    weight, x = b.parameter("w", [8, 8]), b.input("x", [3, 8], torch.bfloat16)
    cast = b.call(torch.ops.prims.convert_element_type.default, weight, torch.bfloat16)
    product = b.call(aten.mm.default, x, cast)
    assert served(b.finish(product).graph)[product] == ("w",)


def test_what_makes_a_gradient_serves_its_parameter():
    b = GraphBuilder()
    x, y = b.input("x", [8, 3]), b.input("y", [3, 8])
    before = b.call(aten.sin.default, x)
    gradient = b.call(aten.mm.default, before, y)
    mean = b.call(aten.mul.Tensor, gradient, 0.25)
    start = b.call(ALL_REDUCE, mean, "sum", GROUP)
    COLLECTIVE.set(start, Collective(("w",), gathers=False))
    wait = b.call(WAIT, start)
    found = served(b.finish(wait).graph)
    assert all(found[node] == ("w",) for node in (gradient, mean, start, wait))
    assert before not in found


@pytest.mark.parametrize("decision", list(FLAT_DECISIONS))
def test_in_a_real_step_products_and_collectives_serve_what_they_should(decision: Decision):
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    captured, ctx = capture_step(model, torch.randn(16, 64))
    plan = plan_of(ctx.parameters, decision, ctx.world_size, bucket_bytes=1 << 20)
    step = predict(captured, plan, ctx, default_passes())
    for gm, phase in ((step.forward, "forward"), (step.backward, "backward")):
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        assert {PHASE.of(node) for node in nodes} == {phase}
        for node in filter(is_collective, nodes):
            assert cost_of(node).serves == COLLECTIVE.of(node).names
        products = [n for n in nodes if n.target in (aten.mm.default, aten.addmm.default)]
        served = sorted(name for node in products for name in cost_of(node).serves)
        weights = ["0.weight", "2.weight"]
        # Forward: bias and weight of each. Backward: two gradients of weights, one of an input.
        assert set(weights) <= set(served)
        assert all(cost_of(node).serves for node in products)

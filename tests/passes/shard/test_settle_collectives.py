"""Settle: a model's own collectives become single operators, with the price of a collective."""

from __future__ import annotations

import pytest
import torch

from passes.annotate.annotate_costs import annotate, cost_of
from passes.graph.fx_utils import WAIT
from passes.graph.verifier import check
from passes.ops.model_collectives import AT_ONCE, kind_of
from passes.shard.settle_collectives import UnknownCollective, settle
from passes.types.context import ModelGroup
from passes.types.hardware import LinkRate
from tests.passes.graphs import GROUP as OURS
from tests.passes.graphs import GraphBuilder, context, hardware

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
GROUP = "model"
#: Of each collective: its arguments behind the input, and the rows of its result for four.
KINDS = {
    c10d.all_reduce.default: (("sum", GROUP), 4),
    c10d.all_gather_into_tensor.default: ((2, GROUP), 8),
    c10d.reduce_scatter_tensor.default: (("sum", 2, GROUP), 2),
}


def graph_of(collective, waits=1):
    builder = GraphBuilder()
    x = builder.call(aten.sin.default, builder.input("x", [4, 8]))
    started = builder.call(collective, x, *KINDS[collective][0])
    results = [builder.call(WAIT, started) for _ in range(waits)] or [started]
    return builder.finish(*[builder.call(aten.cos.default, one) for one in results])


@pytest.mark.parametrize("waits", [1, 2])
@pytest.mark.parametrize("collective", KINDS)
def test_a_collective_and_its_waits_are_one_operator(collective, waits):
    gm = settle(graph_of(collective, waits), context())
    check(gm, "settle")
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert targets == [aten.sin.default, AT_ONCE[collective], *[aten.cos.default] * waits]
    (settled,) = gm.graph.find_nodes(op="call_function", target=AT_ONCE[collective])
    assert list(settled.meta["val"].shape) == [KINDS[collective][1], 8]


@pytest.mark.parametrize("collective", KINDS)
def test_it_takes_the_time_of_the_collective_on_its_group(collective):
    ctx = context(model_groups={GROUP: ModelGroup("tp", 2, frozenset({OURS}))})
    gm = annotate(settle(graph_of(collective), ctx), ctx)
    (settled,) = gm.graph.find_nodes(op="call_function", target=AT_ONCE[collective])
    full_bytes = 4 * 8 * max(4, KINDS[collective][1])
    kind = kind_of(AT_ONCE[collective])
    expected = ctx.hardware.collective_seconds(kind, full_bytes, 2)
    assert cost_of(settled).seconds == pytest.approx(expected)
    assert cost_of(settled).memory_bytes == KINDS[collective][1] * 8 * 4
    assert cost_of(settled).beside == {OURS}


def test_rates_along_its_dimension_price_it():
    """The others are those over our ranks; messages carry out a reduce-scatter."""
    slow = {"all_reduce": LinkRate(1.0, 0.0), "all_to_all": LinkRate(2.0, 0.0)}
    ctx = context(
        model_groups={GROUP: ModelGroup("tp", 2)}, hardware=hardware(dimensions={"tp": slow})
    )
    seconds = {}
    for collective in KINDS:
        for uses_p2p in (False, True):
            own = ctx.replace(uses_p2p=uses_p2p)
            gm = annotate(settle(graph_of(collective), own), own)
            (settled,) = gm.graph.find_nodes(op="call_function", target=AT_ONCE[collective])
            seconds[kind_of(settled.target), uses_p2p] = cost_of(settled).seconds
    assert seconds["all_reduce", False] == seconds["all_reduce", True] == 1.0
    assert seconds["reduce_scatter", True] == 2.0
    ours = ctx.hardware.collective_seconds("all_gather", 8 * 8 * 4, 2)
    assert seconds["all_gather", False] == pytest.approx(ours)


def test_a_group_that_nothing_is_known_of_shares_the_links_of_all_ranks():
    ctx = context()
    gm = annotate(settle(graph_of(c10d.all_reduce.default), ctx), ctx)
    (settled,) = gm.graph.find_nodes(op="call_function", target=AT_ONCE[c10d.all_reduce.default])
    assert cost_of(settled).beside == {OURS}


def test_what_is_not_waited_for_or_unknown_is_refused_by_name():
    with pytest.raises(UnknownCollective, match=r"node 'all_reduce_default'.*not supported"):
        settle(graph_of(c10d.all_reduce.default, waits=0), context())
    builder = GraphBuilder()
    x = builder.input("x", [4, 8])
    started = builder.call(c10d.broadcast.default, x, 0, GROUP)
    gm = builder.finish(builder.call(WAIT, started))
    with pytest.raises(UnknownCollective, match=r"_c10d_functional\.broadcast"):
        settle(gm, context())


def test_a_graph_without_any_stays_as_it_is():
    builder = GraphBuilder()
    gm = builder.finish(builder.call(aten.sin.default, builder.input("x", [4])))
    before = str(gm.graph)
    assert str(settle(gm, context()).graph) == before

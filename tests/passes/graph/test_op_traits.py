"""Operator traits: fusible operators, and readers through views."""

from __future__ import annotations

from passes.graph.op_traits import effective_users, is_fusible
from tests.passes.annotate.test_fusion_regions import Model, aten


def test_views_are_looked_through():
    m = Model()
    a = m.sin(m.x)
    view = m.call(aten.view.default, a, [16])
    b = m.sin(view)
    region, real = m.analysed(b)
    assert region[a] == region[b]
    assert view not in region
    assert not {a, view} & real
    assert effective_users(a) == [b]


def test_what_is_fusible_goes_by_what_inductor_fuses():
    m = Model()
    found = {
        "pointwise": m.sin(m.x),
        "reduction": m.call(aten.sum.dim_IntList, m.x, [0]),
        "cat": m.call(aten.cat.default, [m.x, m.x]),
        "mm": m.mm(m.x),
        "input": m.x,
        "view": m.call(aten.t.default, m.x),
        "sort": m.call(aten.sort.default, m.x),
    }
    assert {name for name, node in found.items() if is_fusible(node)} == {
        "pointwise",
        "reduction",
        "cat",
    }

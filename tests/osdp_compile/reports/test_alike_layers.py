"""Alike layers: ranges that cover exactly their names; figures as ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from osdp_compile.reports.alike_layers import expanded, grouped_names, joined, ranged


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0], "b.0.w"),
        ([0, 1], "b.{0..1}.w"),
        ([0, 2], "b.{0,2}.w"),
        ([0, 1, 3, 4, 5], "b.{0,1,3..5}.w"),
    ],
)
def test_a_range_is_complete(numbers, expected):
    assert joined([f"b.{number}.w" for number in numbers]) == expected


def test_names_are_grouped_by_all_but_their_numbers_and_by_kind():
    names = ["b.0.w", "b.0.v", "b.1.w", "b.2.w", "b.1.v", "c.1.w"]
    groups = grouped_names(names, kind=lambda name: name == "b.1.w")
    assert list(groups) == [["b.0.w", "b.2.w"], ["b.0.v", "b.1.v"], ["b.1.w"], ["c.1.w"]]


def test_a_grid_with_a_gap_is_two_groups():
    assert list(grouped_names(["s.0.b.0.w", "s.0.b.1.w", "s.1.b.0.w"])) == [
        ["s.0.b.0.w", "s.0.b.1.w"],
        ["s.1.b.0.w"],
    ]


def test_the_least_and_the_most_of_each_figure():
    reasons = ["gather 900 us, hidden", "gather 2.0 ms, hidden", "gather 1.5 ms, hidden"]
    assert ranged(reasons) == "gather 900 us to 2.0 ms, hidden"


@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1))
def test_names_with_ranges_read_back(pairs):
    names = [f"stages.{a}.blocks.{b}: mm" for a, b in sorted(pairs)]
    found = [name for group in grouped_names(names) for name in expanded(joined(group))]
    assert sorted(found) == sorted(names)


def test_a_name_without_ranges_is_itself():
    for name in ("head.weight", "up", "blocks.3.up.weight", "odd.{name}.weight", "{0..2}.weight"):
        assert expanded(name) == [name]

"""Alike layers: ranges that cover exactly their names; figures as ranges."""

from __future__ import annotations

import pytest

from osdp_compile.reports.alike_layers import grouped_names, joined, ranged


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

"""Shard layouts: the rows of each rank, on one host and on several."""

from __future__ import annotations

import dataclasses

import pytest

from passes.types.shard_layout import ShardLayout


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("total", range(1, 40))
def test_the_rows_of_all_ranks_are_all_rows(hosts: int, total: int) -> None:
    ranks = [ShardLayout(8, place, "", hosts) for place in range(8)]
    spans = [one.rows(total) for one in ranks]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(total))
    sizes = [one.own_rows(total) for one in ranks]
    assert {one.most_rows(total) for one in ranks} == {max(sizes)}
    assert {one.fewest_rows(total) for one in ranks} == {min(sizes)}


def test_the_last_rank_of_the_first_host_may_have_the_fewest() -> None:
    """Of nine rows the hosts have five and four."""
    layout = ShardLayout(8, 0, "", hosts=2)
    sizes = [dataclasses.replace(layout, place=place).own_rows(9) for place in range(8)]
    assert sizes == [2, 2, 1, 0, 1, 1, 1, 1] and layout.fewest_rows(9) == 0

"""Activations that move in one graph for all sizes."""

from __future__ import annotations

import pytest

from tests.chosen import more
from tests.end_to_end.moving import Gated, Language, Mlp, Words, train_dynamic


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Language, *more(Gated, Mlp, Words)])
def test_one_graph_for_all_sizes_moves_activations(two_ranks, make):
    for apart, travel, differ in two_ranks.run(train_dynamic, make, False):
        assert apart < 1e-11
        assert not travel and not differ


@pytest.mark.thorough
def test_one_graph_for_all_sizes_has_no_chunks(two_ranks):
    """The first graph has chunks. Those of symbolic sizes have none, and say so."""
    for apart, travel, differ, whole in two_ranks.run(train_dynamic, Mlp, False, 2):
        assert apart < 1e-11
        assert not travel and not differ and whole


@pytest.mark.thorough
def test_one_graph_for_all_sizes_on_ranks_that_differ(two_ranks):
    for apart, travel, differ in two_ranks.run(train_dynamic, Mlp, True):
        assert apart < 1e-11
        assert not travel and differ

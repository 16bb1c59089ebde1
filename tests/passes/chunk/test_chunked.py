"""Chunked: chunks of sequences become the whole tensor, in the memory layout that it had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from passes._torch import FakeTensorMode
from passes.chunk.chunked import is_static, joined
from passes.graph.fx_utils import call

_aten = torch.ops.aten


def joined_of(whole: Tensor, parts: list[Tensor]) -> tuple[fx.Node, list[fx.Node]]:
    """The node of a whole tensor of these chunks, and their nodes."""
    graph = fx.Graph()
    nodes = []
    for place, value in enumerate((whole, *parts)):
        nodes.append(graph.placeholder(f"x{place}"))
        nodes[-1].meta["val"] = value
    return joined(lambda target, args: call(graph, target, args), nodes[0], nodes[1:]), nodes[1:]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_the_memory_layout_is_the_same_where_sequences_are_outermost(order) -> None:
    with FakeTensorMode():
        whole = torch.empty(4, 3, 5, 2).permute(order)
        found, _ = joined_of(whole, list(whole.split([2, whole.shape[0] - 2])))
    assert is_static(found) and found.meta["val"].shape == whole.shape
    assert (found.meta["val"].stride() == whole.stride()) == (order[0] == 0)


def test_a_state_without_sequences_is_the_first_ones() -> None:
    with FakeTensorMode():
        for state in (torch.empty(()), torch.empty(2)):
            found, nodes = joined_of(state, [state, state])
            assert found is nodes[0]

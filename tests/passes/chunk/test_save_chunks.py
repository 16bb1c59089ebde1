"""Save chunks: no graph of a step has a saved tensor's chunks and the whole tensor at once."""

from __future__ import annotations

import torch

from passes.capture.captured_step import lay_out
from passes.graph.metadata import PARAMETER
from passes.pipeline import default_passes
from passes.types.decision import Decision
from tests.passes.capture.test_captured_step import decided
from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import GATED
from tests.passes.split.test_split_operators import Gated


def shapes_saved(chunks: int) -> list[tuple[int, ...]]:
    """The shapes of the tensors of features that the backward reads."""
    captured, ctx = capture_step(Gated(), torch.randn(4, 2, 6), world_size=2)
    plan = decided(ctx, Decision.REPLICATE).tensor_parallel(GATED, chunks=chunks)
    laid = lay_out(captured, plan, ctx, default_passes())
    inputs = laid.backward.graph.find_nodes(op="placeholder")
    assert all(node.target == node.name for node in inputs)  # generated code has both names
    shapes = [tuple(n.meta["val"].shape) for n in inputs if not PARAMETER.is_set(n)]
    return sorted(shape for shape in shapes if shape[-1] == 8)


def test_what_both_graphs_have_in_chunks_is_saved_in_chunks() -> None:
    """Both first products are. The product of both is read whole, by a weight's gradient."""
    assert shapes_saved(1) == [(16, 8)] * 3
    assert shapes_saved(4) == [(4, 8)] * 8 + [(16, 8)]

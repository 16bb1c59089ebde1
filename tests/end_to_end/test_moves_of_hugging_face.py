"""Activations move in BERT and in T5 of Hugging Face."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

from tests.end_to_end.moving import train_by_name

pytest.importorskip("transformers")

from tests.end_to_end.test_hugging_face import batch_for, made

_LAYER = "bert.encoder.layer.0"
#: By model: the names given, and the modules whose parameters stay with them.
STAY = {
    "BERT": (
        ["*word_embeddings*", "*query.weight", "*intermediate.dense.weight"],
        {
            "bert.embeddings.word_embeddings",
            "cls.predictions",  # the bias of the tied head
            *(f"{_LAYER}.attention.self.{one}" for one in ("query", "key", "value")),
            f"{_LAYER}.attention.output.dense",
            f"{_LAYER}.intermediate.dense",
            f"{_LAYER}.output.dense",
        },
    ),
    # In attention, a bias for each head and distance is added to the scores. Its table moves.
    "T5": (
        ["*shared.weight", "*.wi.weight", "*.q.weight"],
        {
            "shared",
            *(
                f"{attention}.{one}"
                for attention in (
                    "encoder.block.0.layer.0.SelfAttention",
                    "decoder.block.0.layer.0.SelfAttention",
                    "decoder.block.0.layer.1.EncDecAttention",
                )
                for one in "qkvo"
            ),
            *(f"encoder.block.0.layer.1.DenseReluDense.{one}" for one in ("wi", "wo")),
            *(f"decoder.block.0.layer.2.DenseReluDense.{one}" for one in ("wi", "wo")),
        },
    ),
}


class Loss(nn.Module):
    """A model that returns its loss alone: logits that are returned are whole."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = made(name)

    def forward(self, given: dict[str, Tensor]) -> Any:
        return self.model(**given).loss


def trained(rank, world_size, name):
    """Distance from one process in float32, and the modules whose parameters stay."""
    batch, named = functools.partial(batch_for, name), STAY[name][0]
    apart, plan = train_by_name(Loss(name), named, batch, rank, world_size)
    return apart, {one.removeprefix("model.").rsplit(".", 1)[0] for one in plan.moved}


@pytest.mark.thorough
@pytest.mark.parametrize("name", STAY)
def test_trains_like_one_process(two_ranks, name):
    for apart, modules in two_ranks.run(trained, name):
        assert apart < 1e-5
        assert modules == STAY[name][1]

"""Activations move in BERT and in T5 of Hugging Face."""

from __future__ import annotations

import copy
import functools

import pytest
from torch import Tensor, nn

from tests.training import SLOW, Recipe, Reference, adamw, plan_in_force, train_osdp

pytest.importorskip("transformers")

from tests.end_to_end.test_hugging_face import batch_for, made

#: By model: the names given, and the modules whose parameters move with them.
MOVED = {
    "BERT": (
        ["*word_embeddings*", "*query.weight", "*intermediate.dense.weight"],
        {
            *("word_embeddings", "predictions"),  # the bias of the tied head is in the latter
            *("query", "key", "value", "attention.output.dense"),
            *("intermediate.dense", "output.dense"),
        },
    ),
    # Encoder and decoder. In attention, a bias for each head and distance is added to the scores.
    "T5": (["*shared.weight", "*.wi.weight"], {"shared", "wi", "wo"}),
}


class Loss(nn.Module):
    """A model that returns its loss alone: logits that are returned are whole."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = made(name)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


def loss_of(model, batch):
    return model(**batch)


def trained(rank, world_size, name):
    """The distance from one process in float32, and the parameters that stay where they are."""
    model = Loss(name)
    batch = functools.partial(batch_for, name)
    recipe = Recipe(step=loss_of, batch=batch, optimizer=adamw, steps=5, max_norm=1.0)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": MOVED[name][0], "debug": True}
    apart = train_osdp(model, options, recipe, rank).distance(reference.train(rank))
    return apart, plan_in_force(model).moved


@pytest.mark.thorough
@pytest.mark.parametrize("name", MOVED)
def test_trains_like_one_process(two_ranks, name):
    for apart, moved in two_ranks.run(trained, name):
        assert apart < 1e-5
        modules = {one.rsplit(".", 1)[0] for one in moved}
        for wanted in MOVED[name][1]:
            assert any(module.endswith(wanted) for module in modules), wanted
        assert all(any(one.endswith(wanted) for wanted in MOVED[name][1]) for one in modules)

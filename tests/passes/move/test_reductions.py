"""Reductions: a head and its cross-entropy by vocabulary compute what whole logits do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.candidates.move_groups import find_move_groups
from passes.ops.packing import MAX_RANKS
from passes.ops.tables import TAKE_COLUMNS
from tests.chosen import core, more, thorough
from tests.passes.captures import capture_step
from tests.passes.move.test_move_activations import check_training, collectives

WORDS = 12


class Language(nn.Module):
    """An embedding, a norm, a head, and a loss; ids: [batch, length]."""

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        tied: bool = False,
        bias: bool = False,
        words: int = WORDS,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.words = nn.Embedding(words, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, words, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(self.norm(self.words(ids))), ids)


def of_all(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def of_next(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def upcast(logits: Tensor, ids: Tensor) -> Tensor:
    """As Hugging Face's models: in float32, padded labels, the mean of those that count."""
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    flat = logits.float().view(-1, logits.shape[-1])
    return F.cross_entropy(flat, labels.view(-1), ignore_index=-100)


def with_ignored(logits: Tensor, ids: Tensor) -> Tensor:
    """Every rank ignores another number of tokens."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=3, reduction="sum") / 7


def smoothed(logits: Tensor, ids: Tensor) -> Tensor:
    capped = 5 * torch.tanh(logits / 5)
    return F.cross_entropy(capped.flatten(0, 1), ids.flatten(), label_smoothing=0.1)


def each(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


CASES = {
    "mean": (of_all, {}),
    "mean, tied, bias": (of_all, {"tied": True, "bias": True}),
    "next": (of_next, {"tied": True}),
    "float32": (upcast, {"bias": True}),
    "sum": (with_ignored, {}),
    "smoothed": (smoothed, {}),
    "none": (each, {}),
}


@pytest.mark.parametrize("case", core(CASES, "mean, tied, bias", "none"))
def test_a_head_by_vocabulary_computes_what_whole_logits_do(case: str) -> None:
    loss, options = CASES[case]
    model = Language(loss, **options)
    world_size, uses_p2p = (4, False) if case in ("sum", "next") else (2, True)
    given = [torch.randint(0, WORDS, (3, 5)) for _ in range(world_size)]
    captured, ctx = capture_step(model, given[0], world_size=world_size, uses_p2p=uses_p2p)
    dims = find_move_groups(captured, ctx).by_weights[-1][0].dims
    names = {"words.weight"} if options.get("tied") else {"head.weight"}
    assert dims == dict.fromkeys(names | ({"head.bias"} if options.get("bias") else set()), 0)
    plan = check_training(model, given, dims, uses_p2p)
    if case == "mean":
        # Tokens, labels and maxima are gathered; maxima, sums and the labels' logits are combined.
        assert collectives(captured, plan, ctx)[0] == ["gather"] * 3 + ["reduce"] * 3


@pytest.mark.parametrize(
    ("case", "world_size", "words"),
    [
        ("mean, tied, bias", 2, 13),
        *thorough(("float32", 4, 13), ("smoothed", 4, 15)),
        *more(("sum", 4, 13), ("next", 3, 13), ("none", 2, 11), ("mean", 5, 13)),
    ],
)
def test_a_vocabulary_that_the_ranks_do_not_divide(case: str, world_size: int, words: int) -> None:
    loss, options = CASES[case]
    model = Language(loss, words=words, **options)
    given = [torch.randint(0, words, (3, 5)) for _ in range(world_size)]
    given[0][0] = words - 1  # the last rank's
    captured, ctx = capture_step(model, given[0], world_size=world_size)
    dims = find_move_groups(captured, ctx).by_weights[-1][0].dims
    assert dims.get("words.weight" if options.get("tied") else "head.weight") == 0
    check_training(model, given, dims)
    if not options.get("tied"):
        check_training(model, given, {**dims, "words.weight": 0})


def returned(logits: Tensor, ids: Tensor) -> Tensor:
    return logits


def of_a_batch(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), ids)


def sorted_first(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.topk(3).values


@pytest.mark.parametrize(
    "loss, reason",
    [
        (returned, "the graph returns"),
        (sorted_first, "topk has no rule"),
        (of_a_batch, "gather has no rule"),
    ],
)
def test_a_head_whose_logits_are_needed_whole_is_refused(
    loss: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    captured, ctx = capture_step(Language(loss), torch.zeros(2, 3, dtype=torch.long), world_size=2)
    found = find_move_groups(captured, ctx)
    assert reason in found.refused["head.weight"]
    assert [group.dims for group, *_ in found.by_weights] == [{"words.weight": 0}]


def test_an_id_that_no_rank_has_is_an_error() -> None:
    table = torch.randn(2, 6)
    assert TAKE_COLUMNS(table, torch.tensor([[7], [3]]), 6, 12).tolist() == [
        [table[0, 1].item()],
        [0.0],
    ]
    for wrong in (-1, 12):
        with pytest.raises(IndexError):
            TAKE_COLUMNS(table, torch.tensor([[1], [wrong]]), 6, 12)


def test_the_largest_of_all_ranks() -> None:
    found = MAX_RANKS(torch.tensor([1.0, float("-inf"), 0.5, 2.0, float("nan"), 3.0]), 2)
    assert found[:1].tolist() == [2.0] and found[1].isnan() and found[2] == 3.0

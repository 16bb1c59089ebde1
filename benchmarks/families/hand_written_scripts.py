"""Families written by hand: small models, and what scripts do with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.families.small_parts import (
    CLASSES,
    VOCABULARY,
    WIDTH,
    layers,
    scored,
    sequences,
    vectors,
)
from benchmarks.families.trial import STEPS, Family, Trial


class _BreaksInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        inner: Tensor = self.second(x)
        return inner


class _Outer(nn.Module):
    """A graph break in a submodule, whose result the outer forward goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = _BreaksInside(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        scores: Tensor = self.head(x)
        return scores


class _OuterAtOnce(_Outer):
    """The same in one expression."""

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.inner(x))
        return scores


def _break_in_submodule() -> Trial:
    return Trial(_Outer(), vectors, scored)


def _break_in_expression() -> Trial:
    return Trial(_OuterAtOnce(), vectors, scored)


def _break_between() -> Trial:
    return Trial(nn.Sequential(_BreaksInside(), layers(WIDTH, 256, CLASSES)), vectors, scored)


class _Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = layers(width, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class _Tiny(nn.Module):
    """A language model of two blocks. ``reentrant``: of checkpointing (None: none)."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(x)
        return logits


def _tied() -> Trial:
    model = _Tiny()
    model.head.weight = model.words.weight
    return Trial(model, sequences, scored)


def _checkpointed() -> Trial:
    return Trial(_Tiny(reentrant=False), sequences, scored)


def _checkpointed_reentrant() -> Trial:
    return Trial(_Tiny(reentrant=True), sequences, scored, unused=False)


def _blocks_one_by_one() -> Trial:
    model = _Tiny()
    return Trial(model, sequences, scored, parts=list(model.blocks))


def _growing(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return sequences(step, rank, length=8 + 3 * step)


def _differing(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return sequences(step, rank, length=8 + 3 * step + 2 * rank)


def _lengths_grow() -> Trial:
    return Trial(_Tiny(), _growing, scored)


def _lengths_differ() -> Trial:
    return Trial(_Tiny(), _differing, scored)


def _accumulated() -> Trial:
    return Trial(layers(WIDTH, 256, 256, CLASSES), vectors, scored, micro_batches=3)


def _autocast_loss(called: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return scored(called, batch)


def _autocast() -> Trial:
    return Trial(_Tiny(), sequences, _autocast_loss)


def _smaller(step: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step, rank)
    rows = 8 if step < STEPS - 1 else 5
    return inputs[:rows], targets[:rows]


def _smaller_last_batch() -> Trial:
    return Trial(layers(WIDTH, 256, 256, CLASSES), _smaller, scored)


def _evaluating(called: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """An evaluation before each training step."""
    called.eval()
    with torch.no_grad():
        before = scored(called, batch)
    called.train()
    return scored(called, batch) + before


def _evaluation_between() -> Trial:
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.BatchNorm1d(256), nn.Linear(256, CLASSES))
    return Trial(model, vectors, _evaluating, unused=False)


def _contrastive_loss(called: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One model, two forwards, one backward."""
    one, other = called(batch[0]), called(batch[0].flip(1))
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def _contrastive() -> Trial:
    return Trial(layers(WIDTH, 256, 128), vectors, _contrastive_loss, unused=False)


class _PartlyEager(nn.Module):
    """One layer that Dynamo is told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = layers(WIDTH, 256), nn.Linear(256, 256)
        self.last = nn.Linear(256, CLASSES)

    @torch._dynamo.disable
    def eager(self, x: Tensor) -> Tensor:
        return F.gelu(self.middle(x))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.eager(self.first(x)))
        return scores


def _partly_eager() -> Trial:
    return Trial(_PartlyEager(), vectors, scored)


def _frozen() -> Trial:
    model = layers(WIDTH, 256, 256, CLASSES)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return Trial(model, vectors, scored)


_MADE = {
    "graph break in a submodule": _break_in_submodule,
    "graph break in an expression": _break_in_expression,
    "graph break between layers": _break_between,
    "checkpoint": _checkpointed,
    "checkpoint, reentrant": _checkpointed_reentrant,
    "blocks compiled one by one": _blocks_one_by_one,
    "tied weights": _tied,
    "lengths that grow": _lengths_grow,
    "lengths that differ between ranks": _lengths_differ,
    "gradient accumulation": _accumulated,
    "autocast": _autocast,
    "smaller last batch": _smaller_last_batch,
    "evaluation in between": _evaluation_between,
    "two forwards, one backward": _contrastive,
    "a layer under dynamo.disable": _partly_eager,
    "frozen layer": _frozen,
}

FAMILIES = [
    *(Family(name, "by hand", make) for name, make in _MADE.items()),
    Family("dynamic=True", "by hand", _lengths_grow, dynamic=True),
    Family(
        "gradient accumulation, accumulate='reduced'",
        "by hand",
        _accumulated,
        options={"accumulate": "reduced"},
    ),
]

"""Batches, a loss and layers of the families written by hand."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.trial import seeded

WIDTH, CLASSES, VOCABULARY = 64, 10, 512


def scored(called: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss outside of the compiled module, as in most scripts."""
    inputs, targets = batch
    return F.cross_entropy(called(inputs).flatten(0, -2), targets.flatten())


def vectors(step: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = seeded(step, rank, micro)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, torch.randint(0, CLASSES, (8,), generator=generator)


def sequences(step: int, rank: int, length: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (4, length + 1), generator=seeded(step, rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def layers(*widths: int) -> nn.Sequential:
    """Linear layers with GELU in between."""
    made: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        made += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*made[:-1])

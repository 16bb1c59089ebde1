"""A trial: one family's model, its batches and its training loop, the same for every way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Optimizer steps of a run.
STEPS = 4
LEARNING_RATE = 1e-3
MAX_NORM = 1.0
#: Relative change of weights that rounds them otherwise: about float32's rounding.
WEIGHT_ROUNDING = 1e-7

#: A batch of a rank: (step, rank) -> anything.
Batch = Callable[[int, int], Any]
#: From a module to what the training loop calls in its place.
Wrap = Callable[[nn.Module], Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """Figures of one optimizer step on one rank."""

    loss: float
    norm: float


def seeded(step: int, rank: int, micro: int = 0) -> torch.Generator:
    """Random numbers of one batch, which differ between steps, ranks and micro-batches."""
    return torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW. The default eps of 1e-8 would turn rounding of a zero gradient into a whole step."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=1e-5)


@dataclasses.dataclass
class Trial:
    """A model with its training loop.

    ``loss``: from the called model and a batch to the loss.
    ``parts``: modules that osdp compiles one by one, each in place; none: the whole model. DDP
    wraps the whole model either way.
    ``unused``: DDP must look for parameters without a gradient.
    ``static``: DDP must take the graph of the first step as that of all steps.
    ``micro_batches``: backwards before each optimizer step; ``batch`` is then called with a third
    argument, the number of the micro-batch.
    """

    model: nn.Module
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Tensor]
    parts: Sequence[nn.Module] = ()
    unused: bool = True
    static: bool = False
    micro_batches: int = 1

    def train(self, wrap: Wrap, rank: int, steps: int = STEPS) -> Iterator[Step]:
        """Train; ``wrap``: DDP or ``torch.compile``."""
        called = self.model if self.parts else wrap(self.model)
        for part in self.parts:
            wrap(part)
        optimizer = adamw(self.model.parameters())
        for step in range(steps):
            loss = self.backwards(called, step, rank)
            norm = clipped(self.model)
            optimizer.step()
            optimizer.zero_grad()
            yield Step(loss, norm)

    def backwards(self, called: Any, step: int, rank: int) -> float:
        """Run the forwards and backwards of one optimizer step; the mean loss."""
        total = 0.0
        for micro in range(self.micro_batches):
            more = (micro,) if self.micro_batches > 1 else ()
            loss = self.loss(called, self.batch(step, rank, *more)) / self.micro_batches
            loss.backward()
            total += loss.item()
        return total


def clipped(model: nn.Module) -> float:
    """Clip the gradients as a training script does; their norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of the sweep.

    ``make``: the trial, with the same weights on every rank.
    ``dynamic``: as in ``torch.compile``. ``options``: the backend's, which such a script needs.
    ``refused``: a regular expression that the error must match, for a family that torch itself
    cannot compile.
    """

    name: str
    package: str
    make: Callable[[], Trial]
    dynamic: bool | None = None
    refused: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def words(vocabulary: int, rows: int, length: int) -> Batch:
    """Token sequences as a Hugging Face language model takes them."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, vocabulary, (rows, length), generator=seeded(step, rank))
        return {"input_ids": tokens, "labels": tokens}

    return batch


def pictures(rows: int, size: int, classes: int, channels: int = 3) -> Batch:
    """Images and their classes."""

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = seeded(step, rank)
        images = torch.randn(rows, channels, size, size, generator=generator)
        return images, torch.randint(0, classes, (rows,), generator=generator)

    return batch


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout of zero: eager and compiled code draw different random numbers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model

"""Models whose weights may stay while activations move, and how they train."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osdp_compile import Plan
from tests.training import SLOW, Recipe, Reference, adamw, plan_in_force, train_osdp

MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


GATED = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}


class Mlp(nn.Module):
    """A linear, then two with an activation between them; x: [batch, 8]."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.up = nn.Linear(12, hidden)
        self.down = nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.tanh(self.first(x)))))


class Gated(nn.Module):
    """Normalized input, a gated MLP with a residual, and a head; x: [batch, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 48, bias=False)
        self.gate = nn.Linear(8, 48, bias=False)
        self.down = nn.Linear(48, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, -1))
        y = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Words(nn.Module):
    """An embedding and a linear; tokens: [rows, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.words(tokens)))


class Language(nn.Module):
    """An embedding, a norm, a head by vocabulary, and the loss; ids: [rows, length]."""

    def __init__(self, tied: bool = True, words: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, words, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.words(ids)))
        # Each rank ignores another number of tokens.
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=3)


def plan_for(
    model: nn.Module,
    world_size: int,
    rest: str = "shard_regather",
    keep_tokens: bool = False,
    chunks: int = 1,
) -> Plan:
    dims = GATED if isinstance(model, Gated) else MLP
    plan = Plan.uniform(model.named_parameters(), rest, world_size=world_size)
    return plan.tensor_parallel(dims, keep_tokens=keep_tokens, chunks=chunks)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64)


def mean_square(model: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = model(given).square().mean()
    return loss


def its_loss(model: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = model(given)
    return loss


def recipe_of(batch, **changes) -> Recipe:
    return Recipe(
        step=mean_square, optimizer=adamw, steps=10, batch=batch, max_norm=0.05, **changes
    )


def train_by_name(
    model: nn.Module, named: list[str], batch: Callable[..., Any], rank: int, world_size: int
) -> tuple[float, Plan]:
    """Distance from one process where the named parameters stay where they are; the plan."""
    recipe = Recipe(step=its_loss, optimizer=adamw, steps=5, batch=batch, max_norm=1.0)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": named, "debug": True}
    apart = train_osdp(model, options, recipe, rank).distance(reference.train(rank))
    return apart, plan_in_force(model)


def train_dynamic(rank, world_size, make, differ, chunks=1):
    """Distance from one process; numbers of warnings of travelling weights and differing batches.

    With ``chunks``: the number of warnings of tokens that travel whole, too.
    """
    torch.manual_seed(0)
    model = make().double()
    by_words = make in (Words, Language)

    def some(step, micro, number):
        generator = torch.Generator().manual_seed(1000 * step + number)
        rows = 4 + 2 * step + (2 * number if differ and step >= 3 else 0)
        if by_words:
            return torch.randint(0, 64, (rows, 5), generator=generator)
        return torch.randn(rows, 8, generator=generator, dtype=torch.float64)

    recipe = Recipe(step=mean_square, optimizer=adamw, steps=6, batch=some)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    dims = {"words.weight": 0} if by_words else GATED if make is Gated else MLP
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    options = {"hardware": SLOW, "plan": plan.tensor_parallel(dims, chunks=chunks), "debug": True}
    with mock.patch("osdp_compile.lowering.warn.log.warning") as warned:
        ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = ours.distance(wanted)
    said = [call.args[0] for call in warned.call_args_list]
    kinds = ["stay where they are travel in this graph", "batches differ"]
    kinds += ["tokens travel whole"] if chunks > 1 else []
    return apart, *(sum(kind in one for one in said) for kind in kinds)


def distances_by_optimizer(
    kinds: Mapping[str, dict[str, Any]],
    options_of: Callable[[nn.Module], dict[str, Any]],
    rank: int,
    world_size: int,
    hidden: int = 64,
) -> dict[str, float]:
    """By optimizer of torch, with its arguments, the distance from one process.

    ``options_of``: the backend's options for a model. ``hidden``: its hidden size.
    """
    found = {}
    for kind, arguments in kinds.items():

        def make(parameters, kind=kind, arguments=arguments):
            chosen = [p for p in parameters if kind != "Muon" or p.dim() == 2]
            return getattr(torch.optim, kind)(chosen, **arguments)

        torch.manual_seed(0)
        model = Mlp(hidden).double()
        recipe = Recipe(step=mean_square, optimizer=make, steps=3, batch=batch)
        reference = Reference(copy.deepcopy(model), recipe, world_size)
        ours = train_osdp(model, options_of(model), recipe, rank)
        found[kind] = ours.distance(reference.train(rank))
    return found


class WithLoss(nn.Module):
    """A small model of Hugging Face, which returns its loss alone.

    ``config``: the name of its configuration; "": the usual one. ``more``: for the configuration.
    """

    def __init__(self, kind: str, config: str = "", layers: int = 1, **more: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        given = getattr(transformers, config or f"{kind}Config")(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            use_cache=False,
            **more,
        )
        self.model = getattr(transformers, f"{kind}ForCausalLM")(given)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

"""A Llama: RMS norms, rotary positions, grouped-query attention, gated MLPs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The default: 1.2 billion parameters, the sizes of Llama 3.2 1B with a head of its own."""

    vocab: int = 128256
    layers: int = 16
    width: int = 2048
    heads: int = 32
    groups: int = 8
    inner: int = 8192


class Attention(nn.Module):
    """Causal attention, several query heads to each key; x: [batch, tokens, width]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.groups = config.heads, config.groups
        self.size = config.width // config.heads
        self.q = nn.Linear(config.width, config.heads * self.size, bias=False)
        self.k = nn.Linear(config.width, config.groups * self.size, bias=False)
        self.v = nn.Linear(config.width, config.groups * self.size, bias=False)
        self.out = nn.Linear(config.heads * self.size, config.width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        q, k = turned(q, turns), turned(k, turns)
        each = self.heads // self.groups
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions of x [batch, heads, tokens, size]."""
    cosine, sine = turns
    half, other = x.chunk(2, -1)
    return x * cosine + torch.cat((-other, half), -1) * sine


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm; x: [batch, tokens, width]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width)
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.up = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The mean loss of tokens [batch, length] against targets of the same shape."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.words = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        rates = 500000.0 ** (-torch.arange(0, self.size, 2, device=tokens.device) / self.size)
        angles = torch.outer(places, rates).repeat(1, 2)
        turns = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def shared_dims(config: LlamaConfig) -> tuple[dict[str, int], dict[str, int]]:
    """The dimension along which ranks share each weight, where activations move.

    Returns those of the attentions and those of the MLPs.
    """
    attention, mlp = {"q": 0, "k": 0, "v": 0, "out": 1}, {"gate": 0, "up": 0, "down": 1}
    blocks = [f"blocks.{layer}" for layer in range(config.layers)]
    return (
        {
            f"{block}.attention.{name}.weight": dim
            for block in blocks
            for name, dim in attention.items()
        },
        {f"{block}.{name}.weight": dim for block in blocks for name, dim in mlp.items()},
    )

"""A plain GPT, as people write it: nothing here knows of sharding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    vocab: int = 1024
    layers: int = 4
    width: int = 512
    heads: int = 8
    context: int = 128
    dropout: float = 0.0


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm; x: [batch, tokens, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, tokens, width)
        x = x + F.dropout(self.proj(attended), self.dropout, self.training)
        mlp = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(mlp, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens [batch, tokens] to logits [batch, tokens, vocab], or to the loss with targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_and_batch(
    batch_size: int = 4, sequence_length: int = 1024
) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A GPT of 611 M parameters, a batch of one rank: osdp plan examples.gpt:model_and_batch."""
    config = GPTConfig(50304, layers=8, width=2048, heads=16, context=sequence_length)
    tokens = torch.zeros(batch_size, sequence_length + 1, dtype=torch.long)
    return GPT(config), (tokens[:, :-1], tokens[:, 1:])

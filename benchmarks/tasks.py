"""Models of several kinds, with a batch and a loss, so that nothing is tuned to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig

_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Task:
    """``model``: makes it. ``batch``: inputs of a rank's step, by keyword or position.

    ``learning_rate``: of AdamW. Where it makes training unstable, as 1e-3 does the convolutional
    net's, rounding grows tenfold from step to step and losses tell nothing.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, ...]]
    learning_rate: float = 1e-3


class Scored(nn.Module):
    """A model and its loss, so that the loss is in the traced graph."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(inputs), targets)


def words(vocab: int, rows: int, length: int) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """Makes batches of token sequences [rows, length], and the tokens that follow."""

    def batch(generator: torch.Generator) -> tuple[Any, ...]:
        tokens = torch.randint(0, vocab, (rows, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def _pictures(shape: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Any, ...]]:
    def batch(generator: torch.Generator) -> tuple[Any, ...]:
        targets = torch.randint(0, _CLASSES, shape[:1], generator=generator)
        return torch.randn(shape, generator=generator), targets

    return batch


def units(model: nn.Module) -> list[nn.Module]:
    """What a person would shard on its own: the blocks of its list, else each layer."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            return list(module)
    return [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]


def wide_mlp() -> nn.Module:
    """One layer far wider than the others."""
    layers = [nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 4096), nn.GELU()]
    return Scored(nn.Sequential(*layers, nn.Linear(4096, 512), nn.GELU(), nn.Linear(512, _CLASSES)))


class WideLayer(nn.Module):
    """One layer of a transformer's MLP, sixteen times as wide inside; x: [batch, 1024]."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 16 * width)
        self.down = nn.Linear(16 * width, width)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x + self.down(F.gelu(self.up(self.norm(x)))))
        return logits


MANY_WORDS, MANY_WORDS_TOKENS = 1 << 17, 1024


class ManyWords(nn.Module):
    """An embedding and a head of many words, and the loss of guessing the next; [rows, length]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(MANY_WORDS, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, MANY_WORDS, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.mix(self.words(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Ratings(nn.Module):
    """Eight tables of 200,000 rows, whose rows are added up in bags, and three linears (a DLRM).

    ``ids``: [batch, 8, ids of a bag].
    """

    def __init__(self, tables: int = 8, rows: int = 200_000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        linears = [nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
        self.top = nn.Sequential(*linears, nn.Linear(128, _CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        logits: Tensor = self.top(torch.cat(found, 1))
        return logits


def _ratings(generator: torch.Generator) -> tuple[Any, ...]:
    ids = torch.randint(0, 200_000, (256, 8, 4), generator=generator)
    return ids, torch.randint(0, _CLASSES, (256,), generator=generator)


def convolutional() -> nn.Module:
    """Convolutions of growing width with group norm, then two linear layers."""
    layers: list[nn.Module] = []
    before = 3
    for width in (64, 128, 256, 512):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.GroupNorm(8, width)]
        layers += [nn.ReLU()]
        before = width
    head = [nn.Flatten(), nn.Linear(512 * 4, 1024), nn.ReLU(), nn.Linear(1024, _CLASSES)]
    return Scored(nn.Sequential(*layers, *head))


class Llama(nn.Module):
    """A Hugging Face Llama, its loss returned."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=128,
            use_cache=False,
        )
        self.inner = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=targets).loss
        return loss


def _gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=512, context=128))


def _wide_gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=1024, context=128))


TASKS: dict[str, Task] = {
    "GPT": Task(_gpt, words(1024, 4, 128)),
    "wide MLP": Task(wide_mlp, _pictures((64, 512))),
    "conv net": Task(convolutional, _pictures((16, 3, 32, 32)), learning_rate=1e-4),
    "HF Llama": Task(Llama, words(1024, 4, 128)),
}
#: All tasks: these, and those of the benchmarks of slices and of moves.
ALL_TASKS = {
    **TASKS,
    "wide GPT": Task(_wide_gpt, words(1024, 2, 128)),
    "DLRM": Task(lambda: Scored(Ratings()), _ratings),
    "wide layer": Task(lambda: Scored(WideLayer()), _pictures((64, 1024))),
    "many words": Task(ManyWords, words(MANY_WORDS, 4, MANY_WORDS_TOKENS // 4)),
}

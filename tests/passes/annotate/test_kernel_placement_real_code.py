"""Kernel placement against Inductor's real code: buffers, kernels, their order, and the peak.

Each model is lowered as the backend lowers it, with every parameter sharded and gathered again,
and compiled by Inductor for the CPU. ``tests/passes/inductor_code.py`` reads the scheduler's
kernels and the output code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT, GPTConfig
from passes.annotate.annotate_costs import cost_of, region_of, stands_alone
from passes.annotate.kernel_placement import Kernels
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import WAIT, is_packing
from passes.graph.metadata import COST, STATIC, STORAGE
from passes.simulate.memory import MemoryModel
from tests.passes.inductor_code import Compiled, compiled_step

pytestmark = pytest.mark.inductor

WIDTH = 64


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Block(nn.Module):
    """A transformer's block: attention and a perceptron, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = [
            part.view(rows, length, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, -1)
        ]
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return (x + self.down(F.gelu(self.up(self.norm2(x))))).square().mean()


class Convolutions(nn.Module):
    """A residual block of convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.skip, self.head = nn.Conv2d(8, 16, 1), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return self.head(F.relu(found + self.skip(x)).mean((2, 3))).square().mean()


class Words(nn.Module):
    """An embedding, and the cross entropy of a head over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(self.table(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Gated(nn.Module):
    """A gated perceptron after an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(x)
        return (x + self.down(F.silu(self.gate(found)) * self.up(found))).square().mean()


class Residuals(nn.Module):
    """A long chain of additions, whose sums no kernel needs in memory, and a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(layer(x))
        return F.mse_loss(self.norm(x.transpose(1, 2)), x.transpose(1, 2))


class Dropped(nn.Module):
    """A perceptron with dropout before a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + F.dropout(self.down(F.relu(self.up(x))), 0.1)).square().mean()


class Joined(nn.Module):
    """Attention to own tokens and to a few of another sequence, by one softmax of both scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        own = self.norm1(x)
        query, key, other = self.query(own), self.key(own), self.key(others)
        scores = torch.cat([query @ other.mT, query @ key.mT], -1).softmax(-1)
        x = x + scores[..., : other.shape[1]] @ other + scores[..., other.shape[1] :] @ key
        return self.down(F.gelu(self.up(self.norm2(x)))).square().mean()


class Skips(nn.Module):
    """A U-net's skip connection: early and late results, concatenated, and read again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.silu(self.first(x))
        found = torch.cat([x.sin() + F.silu(self.inner(x)), x], -1)
        return self.last(F.silu(self.norm(found))).square().mean()


class Stacked(nn.Module):
    """Products that are concatenated as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))
        self.last = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([part(x) for part in self.parts]).sin()).square().mean()


class Recomputed(nn.Module):
    """Two gated layers that the user recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return sum(checkpoint(layer, x, use_reentrant=False) for layer in self.layers)


TOKENS = torch.arange(128).view(4, 32) * 7 % 256
SEQUENCES = (4, 32, WIDTH)
GPT_CONFIG = GPTConfig(vocab=256, layers=2, width=WIDTH, heads=4, context=32)

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "perceptron": lambda: (Perceptron(), (torch.randn(128, WIDTH),)),
    "block": lambda: (Block(), (torch.randn(SEQUENCES),)),
    "convolutions": lambda: (Convolutions(), (torch.randn(4, 8, 16, 16),)),
    "words": lambda: (Words(), (TOKENS,)),
    "gated": lambda: (Gated(), (torch.randn(SEQUENCES),)),
    "residuals": lambda: (Residuals(), (torch.randn(SEQUENCES),)),
    "dropped": lambda: (Dropped(), (torch.randn(128, WIDTH),)),
    "joined": lambda: (Joined(), (torch.randn(2, 256, WIDTH), torch.randn(2, 8, WIDTH))),
    "skips": lambda: (Skips(), (torch.randn(SEQUENCES),)),
    "stacked": lambda: (Stacked(), (torch.randn(128, WIDTH),)),
    "recomputed": lambda: (Recomputed(), (torch.randn(SEQUENCES),)),
    "gpt": lambda: (GPT(GPT_CONFIG), (TOKENS, TOKENS)),
}
#: Share of the bytes of fused kernels' buffers on which the model and Inductor may disagree: sums
#: for biases, of which Inductor writes some that the model inlines, and statistics of norms.
BUFFERS = 0.02
#: More, with the reason.
KNOWN_BUFFERS = {
    # Inductor writes the last activation before its mean over the image.
    ("convolutions", "forward"): 0.45,
    # The table's gradient is added up in a buffer of zeros, which Inductor names by the addition.
    ("words", "backward"): 0.23,
    ("gpt", "backward"): 0.09,
    # Inductor counts fewer reads of a group norm's gradient than the model. It keeps the sum of
    # gradients one layer earlier, and a sigmoid beside its first reader.
    ("residuals", "backward"): 0.28,
    # Inductor names a part of a concatenation, and a result that the next one is written over.
    ("skips", "forward"): 0.38,
}
#: Pairs of results of one kernel that Inductor writes in two functions, with the reason.
KNOWN_APART = {
    # Parts of one gradient, which share no input and so are no common kernel.
    ("stacked", "backward"): 6,
    # A norm's deviation divided by the width, which only the backward reads, is written last.
    ("gpt", "forward"): 6,
}
#: Share of the bytes that a kernel may write between other operators than the model says:
#: gradients of biases, which Inductor delays if only a later kernel reads them.
MISPLACED = 0.003
#: More, with the reason.
KNOWN_MISPLACED = {
    # A norm's statistics wait for its weight, and are computed with its result.
    ("block", "forward"): 0.005,
    ("gated", "forward"): 0.004,
    # And the result of the layer before is computed with them.
    ("recomputed", "forward"): 0.1,
}
#: The predicted peak over the peak of the code.
PEAK = (0.99, 1.002)
#: Others, with the reason.
KNOWN_PEAKS = {
    ("recomputed", "forward"): (1.03, 1.05),  # the sum of both layers comes later than in the model
    # A product reads a view of a gradient that Inductor does not realize. Inductor writes the view,
    # and computes the gradient again for its other reader, for which it keeps an activation.
    ("block", "backward"): (0.96, 0.97),
}


@functools.cache
def step(name: str) -> dict[str, Compiled]:
    model, batch = MODELS[name]()
    return {one.phase: one for one in compiled_step(model, *batch)}


#: Models outside the core: each takes five seconds or more to compile.
LARGE = ("convolutions", "joined", "recomputed", "skips", "residuals", "gpt")
CASES = [
    pytest.param(
        (name, phase), id=f"{name}-{phase}", marks=[pytest.mark.thorough] * (name in LARGE)
    )
    for name in MODELS
    for phase in ("forward", "backward")
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def compiled(case: tuple[str, str]) -> Compiled:
    name, phase = case
    return step(name)[phase]


class Model:
    """The model's and Inductor's kernels of one graph, by the nodes that write buffers.

    ``written``: the place of each node's kernel in the order, and the bytes of its buffer.
    ``real``: the number of the kernel in the code, and the bytes.
    ``operators``: the place of each operator that is no part of a fused kernel.
    """

    def __init__(self, compiled: Compiled) -> None:
        dataflow = Dataflow(compiled.graph)
        self.nodes = nodes = dataflow.nodes
        places = Kernels(dataflow).places(range(len(nodes)))
        fused = [region_of(node) is not None for node in nodes]
        self.written = {
            node.name: (places[index], cost_of(node).memory_bytes)
            for index, node in enumerate(nodes)
            if fused[index] and cost_of(node).memory_bytes
        }
        writer = {
            node.name: nodes[dataflow.writer[index]].name
            for index, node in enumerate(nodes)
            if fused[dataflow.writer[index]]
        }
        self.real = compiled.written(writer)
        self.both = [name for name in self.written if name in self.real]
        self.operators = {
            node.name: index
            for index, node in enumerate(nodes)
            if stands_alone(node) or is_packing(node) or node.target is WAIT
        }

    def together(self) -> list[tuple[str, str]]:
        """Pairs of results that the model has one kernel write."""
        return [
            (one, other)
            for one, other in itertools.combinations(self.both, 2)
            if self.written[one][0] == self.written[other][0]
        ]


def test_the_buffers_of_fused_kernels_are_those_in_the_code(case, compiled):
    model = Model(compiled)
    sizes = {name: size for name, (_, size) in [*model.written.items(), *model.real.items()]}
    one_sided = model.written.keys() ^ model.real.keys()
    share = sum(sizes[name] for name in one_sided) / sum(sizes.values())
    assert share <= KNOWN_BUFFERS.get(case, BUFFERS), {name: sizes[name] for name in one_sided}


def test_results_of_one_kernel_are_written_by_one_function_of_the_code(case, compiled):
    model, functions = Model(compiled), compiled.functions()
    apart = [
        pair
        for pair in model.together()
        if len({functions[model.real[name][0]] for name in pair}) == 2
    ]
    assert len(apart) <= KNOWN_APART.get(case, 0), apart


def test_the_model_puts_results_in_one_kernel():
    """Else the test before shows nothing."""
    quick = [name for name in MODELS if name not in LARGE]
    pairs = [Model(one).together() for name in quick for one in step(name).values()]
    assert sum(map(len, pairs)) >= 20


def test_kernels_run_between_the_operators_that_the_model_says(case, compiled):
    model, calls = Model(compiled), compiled.operators()
    place = {name: at for name, at in model.operators.items() if name in calls}
    assert len(place) > 0.7 * len(model.operators)  # running statistics are copied in kernels
    misplaced = {}
    for name in model.both:
        predicted = {one for one, at in place.items() if at < model.written[name][0]}
        found = {one for one in place if calls[one] < model.real[name][0]}
        if predicted != found:
            misplaced[name] = sorted(predicted ^ found)
    size = {name: size for name, (_, size) in model.written.items()}
    share = sum(size[name] for name in misplaced) / sum(size[name] for name in model.both)
    assert share <= KNOWN_MISPLACED.get(case, MISPLACED), misplaced


def test_the_peak_is_that_of_the_code(case, compiled):
    graph = compiled.graph
    freed: dict[str, int] = {}
    storages = set()
    for node in graph.nodes:
        if node.op != "output":
            cost = cost_of(node)
            COST.set(node, dataclasses.replace(cost, workspace_bytes=0))  # not in the code
            if node.op == "placeholder" and not STATIC.is_set(node):
                storage = STORAGE.get(node)
                freed[node.name] = 0 if storage in storages else cost.memory_bytes
                storages |= {storage} - {None}
    predicted_bytes = MemoryModel(Dataflow(graph)).trace().peak_bytes
    least, most = KNOWN_PEAKS.get(case, PEAK)
    assert least <= predicted_bytes / compiled.peak_bytes(freed) <= most

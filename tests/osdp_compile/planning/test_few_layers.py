"""Tracing few layers gives the plans of tracing all of them."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig
from osdp_compile.planning import traced_step
from osdp_compile.planning.few_layers import long_list
from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.graph.metadata import PARAMETER
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.chosen import core, more, thorough
from tests.training import SLOW

pytestmark = pytest.mark.usefixtures("short_search", "small_steps")

RANKS = {"ranks": 8}
WIDTH = 64


@pytest.fixture
def small_steps():
    """Steps of small models count as large ones."""
    with mock.patch.object(traced_step, "_MOST_NODES", 100):
        yield


def llama(layers: int) -> tuple[nn.Module, tuple, dict]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=WIDTH,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    return model, (), {"input_ids": tokens, "labels": tokens}


def gpt(layers: int) -> tuple[nn.Module, tuple, dict]:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=61, layers=layers, width=2 * WIDTH, heads=2, context=32))
    tokens = torch.zeros(2, 33, dtype=torch.long)
    return model, (tokens[:, :-1], tokens[:, 1:]), {}


MODELS = {"llama-12": (llama, 12), "gpt-12": (gpt, 12), "llama-16": (llama, 16)}


def traced_in_full(model: nn.Module, args=(), kwargs=None) -> TracedStep:
    with mock.patch.object(traced_step, "long_list", return_value=None):
        return trace(model, args, kwargs)


@functools.cache
def steps_of(name: str) -> tuple[TracedStep, TracedStep]:
    """A model's step from few layers, and from all of them."""
    make, layers = MODELS[name]
    with mock.patch.object(traced_step, "_MOST_NODES", 100):
        given = make(layers)
        return trace(*given), traced_in_full(*given)


@pytest.fixture(
    scope="module",
    params=[
        *thorough("llama-12"),
        *more("gpt-12", "llama-16"),
    ],
)
def both(request) -> tuple[TracedStep, TracedStep]:
    return steps_of(request.param)


def layers_read(step: TracedStep, prefix: str) -> set[str]:
    """The numbers of the layers in the traced forward."""
    found = set()
    captured = step.few.captured if step.few is not None else step.captured
    for node in captured.forward.graph.find_nodes(op="placeholder"):
        name = PARAMETER.get(node)
        if name is not None and name.startswith(prefix):
            found.add(name.removeprefix(prefix).split(".")[0])
    return found


def test_the_folded_step_is_that_of_all_layers(both):
    few, full = both
    assert few.few is not None and full.few is None
    assert few.parameters == full.parameters
    assert few.held_bytes == full.held_bytes
    assert few.few.layers == full.folded.layers
    assert few.few.inner == full.folded.inner
    assert few.few.operators == full.folded.operators
    assert (
        few.few.whole_nodes()
        == full.folded.whole_nodes()
        == sum(len(gm.graph.nodes) for gm in (full.captured.forward, full.captured.backward))
    )
    assert dict(few.flops()) == dict(full.flops())


@pytest.mark.thorough
def test_the_plans_are_equal(both, tmp_path):
    few, full = both
    plan = few.plan(RANKS, SLOW)
    assert plan == full.plan(RANKS, SLOW)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.thorough
def test_the_plans_under_a_limit_are_equal():
    few, full = steps_of("llama-12")
    least = few.least_bytes(RANKS, SLOW)
    limit = round(0.7 * least + 0.3 * predicted(few.plan(RANKS, SLOW)).peak_bytes)
    plan = few.plan(RANKS, SLOW, limit)
    assert plan.recompute and plan == full.plan(RANKS, SLOW, limit)


def refuse() -> None:
    raise AssertionError("traces all layers")


def test_a_few_layers_are_traced(both):
    few, full = both
    prefix = few.few.layers[0][0].partition("0.")[0]
    layers = len(full.folded.layers)
    kept = {*map(str, (0, 1, 2, layers - 3, layers - 2, layers - 1))}
    assert layers_read(few, prefix) == kept  # of eight traced ones, as folding keeps them
    assert layers_read(full, prefix) == {*map(str, range(layers))}


def test_uniform_plans_need_no_trace_of_all_layers(both):
    few, full = both
    lazy = dataclasses.replace(few, whole=refuse)
    for decision in (Decision.REPLICATE, Decision.SHARD_REGATHER):
        one, other = (step.uniform(decision, RANKS, SLOW) for step in (lazy, full))
        assert one == other
        assert lazy.priced(one, RANKS, SLOW) == full.priced(one, RANKS, SLOW)


@pytest.mark.thorough
def test_slices_and_recomputing_ask_for_all_layers_once():
    few, full = steps_of("llama-12")
    traced = []
    lazy = dataclasses.replace(few, whole=lambda: traced.append(1) or full.captured)
    name = few.parameters[0].name
    forced = dataclasses.replace(lazy, slices=((name, 1, 0),))
    assert forced.plan(RANKS, SLOW) == dataclasses.replace(full, slices=((name, 1, 0),)).plan(
        RANKS, SLOW
    )
    assert traced == [1]
    plan = few.uniform(Decision.SHARD_REGATHER, RANKS, SLOW)
    key = few.few.operators[4][8]
    some = plan.replace(recompute=(key,))
    with mock.patch.object(traced_step, "complete", return_value=plan) as asked:
        assert lazy.priced(some, RANKS, SLOW) == plan.prediction
    assert asked.call_args.args[:2] == (some, full.captured)


@pytest.mark.thorough
def test_the_step_of_all_layers_is_traced_when_it_is_asked_for():
    few, _ = steps_of("llama-12")
    assert few.captured is few.captured
    assert len(layers_read(dataclasses.replace(few, few=None), "model.layers.")) == 12


class Block(nn.Module):
    def __init__(self, number: int, slope: float = 1.0) -> None:
        super().__init__()
        self.number, self.slope = number, slope
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = x + self.down(torch.tanh(self.slope * self.up(x)))
        return x if scale is None else x * scale


class Chain(nn.Module):
    def __init__(self, slopes: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(n, slope) for n, slope in enumerate(slopes)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class ReadsItsNumber(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = super().forward(x, scale)
        return x.sin() if self.number == 6 else x


class OneIsNumbered(Chain):
    def __init__(self) -> None:
        super().__init__([1.0])
        self.blocks = nn.ModuleList([ReadsItsNumber(n) for n in range(12)])


class AddsBetween(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = x + 1 if number == 6 else x
        return x.square().mean()


class OtherArguments(Chain):
    def forward(self, x: Tensor) -> Tensor:
        scales = (x.sigmoid(), x.cos())
        for number, block in enumerate(self.blocks):
            x = block(x, scales[number == 6])
        return x.square().mean()


class UNet(Chain):
    """Reads its layers by their numbers, and its outer layers read what inner ones do not."""

    def forward(self, x: Tensor) -> Tensor:
        skips, half = [], len(self.blocks) // 2
        for number in range(half):
            x = self.blocks[number](x)
            skips.append(x)
        for number in range(half, 2 * half):
            x = self.blocks[number](x + skips.pop())
        return x.square().mean()


class CollectsInside(Chain):
    """What the layers write down is read after the last one."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for block in self.blocks:
            x = block(x)
            rows.append(x.mean())
        return x.square().mean() + torch.stack(rows).sum()


def with_a_hook() -> nn.Module:
    model = Chain([1.0] * 12)
    model.blocks[6].up.register_forward_hook(lambda module, args, output: output * 2)
    return model


def with_a_frozen_layer() -> nn.Module:
    model = Chain([1.0] * 12)
    model.blocks[6].requires_grad_(False)
    return model


def with_a_shared_weight() -> nn.Module:
    model = Chain([1.0] * 12)
    model.blocks[6].up.weight = model.blocks[5].up.weight
    return model


DIFFERENT = {
    "another scalar": lambda: Chain([1.0] * 6 + [2.0] + [1.0] * 5),
    "alternating scalars": lambda: Chain([1.0, 2.0] * 6),
    "a layer that reads its number": OneIsNumbered,
    "an addition between two": lambda: AddsBetween([1.0] * 12),
    "other arguments": lambda: OtherArguments([1.0] * 12),
    "a UNet": lambda: UNet([1.0] * 12),
    "results read later": lambda: CollectsInside([1.0] * 12),
    "a hook": with_a_hook,
    "a frozen layer": with_a_frozen_layer,
    "a shared weight": with_a_shared_weight,
}


@pytest.mark.parametrize("what", core(DIFFERENT, "another scalar"))
def test_layers_that_differ_are_all_traced(what):
    model = DIFFERENT[what]()
    x = torch.randn(4, WIDTH)
    step = trace(model, (x,))
    assert step.few is None
    assert len(layers_read(step, "blocks.")) == 12
    other = traced_in_full(model, (x,))
    names = [[n.name for n in one.captured.backward.graph.nodes] for one in (step, other)]
    assert names[0] == names[1]


def test_the_model_is_as_before():
    model = Chain([1.0] * 12)
    before = [type(one) for one in model.modules()]
    layers = long_list(model)
    assert layers is not None and layers.numbers == (("", "number"),)
    assert trace(model, (torch.randn(4, WIDTH),)).few is not None
    assert [type(one) for one in model.modules()] == before
    assert [block.number for block in model.blocks] == list(range(12))
    assert model(torch.randn(4, WIDTH)).isfinite()


def test_a_list_that_is_not_long_is_traced_in_full():
    assert long_list(Chain([1.0] * 11)) is None
    assert long_list(nn.Linear(2, 2)) is None

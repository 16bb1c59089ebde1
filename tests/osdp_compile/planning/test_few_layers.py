"""Tracing few layers gives the plans of tracing all of them."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig
from osdp_compile.planning import traced_step
from osdp_compile.planning.few_layers import long_list
from osdp_compile.planning.planner_inputs import slices_of
from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.graph.metadata import PARAMETER
from passes.types.decision import Decision
from passes.types.plan import Plan
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
        model = GPT(GPTConfig(vocab=61, layers=layers, width=WIDTH, heads=2, context=32))
    tokens = torch.zeros(2, 33, dtype=torch.long)
    return model, (tokens[:, :-1], tokens[:, 1:]), {}


MODELS = {"llama-12": (llama, 12), "llama-16": (llama, 16), "gpt-14": (gpt, 14)}


def traced_in_full(model: nn.Module, args=(), kwargs=None) -> TracedStep:
    with mock.patch.object(traced_step, "long_list", return_value=None):
        return trace(model, args, kwargs)


@pytest.fixture(scope="module", params=MODELS)
def both(request) -> tuple[TracedStep, TracedStep]:
    """A model's step from few layers, and from all of them."""
    make, layers = MODELS[request.param]
    with mock.patch.object(traced_step, "_MOST_NODES", 100):
        given = make(layers)
        return trace(*given), traced_in_full(*given)


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


@pytest.mark.parametrize("share", [None, 0.3], ids=["no limit", "limit"])
def test_the_plans_are_equal(both, share, tmp_path):
    few, full = both
    limit = None
    if share is not None:
        least = few.least_bytes(RANKS, SLOW)
        assert least == full.least_bytes(RANKS, SLOW)
        most = predicted(few.plan(RANKS, SLOW)).peak_bytes
        limit = round(least + share * (most - least))
    plan = few.plan(RANKS, SLOW, limit)
    assert plan == full.plan(RANKS, SLOW, limit)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def refuse() -> None:
    raise AssertionError("traces all layers")


def test_uniform_plans_need_no_trace_of_all_layers(both):
    few, full = both
    lazy = dataclasses.replace(few, whole=refuse)
    for decision in (Decision.REPLICATE, Decision.SHARD_REGATHER):
        one, other = (step.uniform(decision, RANKS, SLOW) for step in (lazy, full))
        assert one == other
        assert lazy.priced(one, RANKS, SLOW) == full.priced(one, RANKS, SLOW)

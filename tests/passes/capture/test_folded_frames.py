"""Folding a step of alike blocks that are compiled one by one: it costs what the whole one does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from examples.gpt import GPT, GPTConfig
from osdp_compile.planning.frames import captured_frames
from osdp_compile.planning.traced_step import planned_whole
from osdp_compile.runtime.current_call import Call
from passes.capture.fold_layers import Folded, fold
from passes.graph.captured import Captured
from passes.pipeline import default_passes
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import LoweredStep, predict
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.capture.test_fold_layers import NETWORKS, Block, network
from tests.passes.captures import context_of
from tests.passes.graphs import plan_of

PASSES = default_passes()
LAYERS, WIDTH, ROWS, WORLD = 14, 128, 256, 8


class OneByOne(nn.Module):
    """Blocks of one class, and modules before and after them that are not compiled."""

    def __init__(self, layers: int, between: bool = False) -> None:
        super().__init__()
        self.between = between
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 4 * WIDTH) for _ in range(layers)])
        self.last = nn.Linear(WIDTH, 64)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, self.scale)
            if self.between:
                x = x + 1
        return self.last(x).logsumexp(-1).mean()


@functools.cache
def joined(layers: int = LAYERS) -> tuple[Captured, Context]:
    torch.manual_seed(0)
    captured, ctx = captured_by_blocks(OneByOne(layers), (torch.randn(ROWS, WIDTH),))
    assert len(captured.runs) == layers
    return captured, ctx


def captured_by_blocks(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Captured, Context]:
    """The step of a model whose blocks are compiled one by one, and a context to plan it."""
    torch.compiler.reset()
    for block in model.get_submodule("blocks").children():
        block.compile(backend="osdp", dynamic=False)
    ctx = context_of(model, WORLD, network(NETWORKS["even"]))
    call = Call(model, batch, {}, (model,), is_whole=False)
    captured = captured_frames(call, [("", model)], ctx, PASSES)
    torch.compiler.reset()
    assert captured is not None
    return captured, ctx


@functools.cache
def folded() -> Folded:
    found = fold(joined()[0], joined()[1].parameters)
    assert found is not None
    return found


def decided(decision: Decision, ctx: Context) -> Plan:
    """The decision for the blocks; what eager code reads is replicated."""
    of_blocks = {
        one.name: decision if one.name.startswith("blocks") else Decision.REPLICATE
        for one in ctx.parameters
    }
    return plan_of(ctx.parameters, of_blocks, WORLD, bucket_bytes=1 << 16)


def both(plan: Plan, ctx: Context) -> tuple[LoweredStep, LoweredStep]:
    """The whole step's prediction and the folded one's."""
    ctx = ctx.replace(deciding=True)
    return predict(joined()[0], plan, ctx, PASSES), predict(folded(), plan, ctx, PASSES)


def test_it_says_the_same_of_frames_and_of_what_no_frame_reads():
    whole, few = joined()[0], folded().captured
    assert few.is_joined and few.runs == whole.runs
    assert few.unread == whole.unread == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert few.border_bytes == whole.border_bytes > 0
    assert len(few.forward.graph.nodes) < 0.6 * len(whole.forward.graph.nodes)


@pytest.mark.parametrize("decision", ["replicate", "shard_keep", "shard_regather"])
def test_it_takes_as_long_and_as_much_memory(decision):
    ctx = joined()[1]
    plan = decided(Decision.named(decision), ctx)
    whole, few = both(plan, ctx)
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.02)
    whole, few = both(plan, ctx.replace(limit_bytes=0))
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.05)


@pytest.mark.parametrize("number", (0, -1), ids=["a little", "as much as helps"])
def test_what_one_block_recomputes_all_do(number):
    """All blocks share their code, and so the keys of its operators."""
    ctx = joined()[1]
    one = PlanEvaluator(folded(), ctx, PASSES).sets[number]
    assert one.recompute and all(len({*folded().alike[key]}) == 1 for key in one.recompute)
    plan = decided(Decision.SHARD_REGATHER, ctx)
    saving, _ = both(plan, ctx.replace(limit_bytes=0))
    plan = plan.replace(recompute=one.recompute, also_save=one.also_save)
    whole, few = both(plan, ctx.replace(limit_bytes=0))
    assert whole.prediction.peak_bytes < saving.prediction.peak_bytes
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.05)
    assert few.prediction.recomputed_bytes == whole.prediction.recomputed_bytes > 0


def test_blocks_that_eager_code_comes_between_are_not_folded():
    """Each block gets a tensor that no frame makes."""
    model = OneByOne(LAYERS, between=True)
    captured, ctx = captured_by_blocks(model, (torch.randn(4, WIDTH),))
    assert fold(captured, ctx.parameters) is None


def test_the_plan_of_many_blocks_comes_of_a_few(monkeypatch):
    """The number of nodes that the planner lowers does not grow with the number of blocks."""
    monkeypatch.setattr("osdp_compile.planning.traced_step._MOST_NODES", 100)
    monkeypatch.setattr("passes.pricing.evaluator.predict", counted := _Counted(predict))
    found = []
    for layers in (LAYERS, 2 * LAYERS):
        captured, ctx = joined(layers)
        counted.nodes = []
        plan = planned_whole(captured, ctx, PASSES)
        assert {name for phase in plan.order.values() for one in phase for name in one.names} >= {
            f"blocks.{layer}.up.weight" for layer in range(layers)
        }
        found.append(max(counted.nodes))
    assert found[0] == found[1] < 0.6 * len(joined()[0].backward.graph.nodes)


class _Counted:
    """A function of a step that remembers the numbers of its backward's nodes."""

    def __init__(self, function):
        self.function = function
        self.nodes: list[int] = []

    def __call__(self, step, *args):
        graphs = step.captured if isinstance(step, Folded) else step
        self.nodes.append(len(graphs.backward.graph.nodes))
        return self.function(step, *args)


def test_blocks_that_make_constants_for_themselves_are_folded():
    """A GPT's block puts its gradients of q, k and v into zeros."""
    model = GPT(GPTConfig(layers=8, width=64, context=32))
    tokens = torch.randint(0, 1024, (2, 32))
    captured, ctx = captured_by_blocks(model, (tokens, tokens))
    found = fold(captured, ctx.parameters)
    assert found is not None and len(found.layers) == 8

"""A step that graph breaks cut, joined: it trains as the step without breaks does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from osdp_compile.planning.frames import captured_frames
from osdp_compile.runtime.current_call import Call
from passes.graph.captured import Captured
from passes.graph.metadata import OPERATOR_KEY
from passes.pipeline import default_passes
from passes.plan.planner import complete
from passes.pricing.predict import predict
from passes.recompute.recompute_activations import keys_of
from passes.types.context import Context
from passes.types.decision import FLAT_DECISIONS, Decision
from passes.types.plan import Collective, Plan
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step, context_of


class Broken(nn.Module):
    """Breaks twice; reads a weight before and after, and gives one tensor to two frames."""

    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.breaks = breaks
        self.embedding = nn.Embedding(11, 6)
        self.shared = nn.Linear(6, 6)
        self.last = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(self.embedding(tokens)))
        if self.breaks:
            torch._dynamo.graph_break()
        again = torch.tanh(self.shared(hidden))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(hidden + again)


def joined(model: nn.Module, batch: Tensor, world_size: int) -> tuple[Captured, Context]:
    """The step of a model that breaks, as the first call joins it."""
    ctx = context_of(model, world_size)
    compiled = torch.compile(model, backend="osdp", dynamic=False)
    torch.compiler.reset()
    call = Call(compiled, (batch,), {}, (model,), is_whole=False)
    captured = captured_frames(call, [("", model)], ctx, default_passes())
    torch.compiler.reset()
    assert captured is not None and not captured.unread
    return captured, ctx


def broken(world_size: int) -> Training:
    torch.manual_seed(0)
    batches = [torch.randint(0, 11, (2, 5)) for _ in range(world_size)]
    return Training(Broken(), batches, [torch.randn(2, 5, 11) for _ in range(world_size)])


@pytest.mark.parametrize("decision", FLAT_DECISIONS)
def test_a_joined_step_gives_eager_outputs_and_mean_gradients(decision):
    training = broken(2)
    captured, ctx = joined(training.model, training.batches[0], 2)
    contexts = [ctx.replace(rank=rank) for rank in range(2)]
    training.check(captured, contexts, decided(ctx, decision))


def test_the_model_and_the_random_numbers_are_as_they_were():
    model = Broken()
    before = dict(model.named_parameters())
    state = torch.get_rng_state()
    joined(model, torch.zeros(2, 5, dtype=torch.long), 2)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_prediction_is_that_of_the_step_without_breaks():
    batch = torch.randint(0, 11, (64, 5))
    cut, ctx = joined(Broken(), batch, 2)
    whole, _ = capture_step(Broken(breaks=False), batch, world_size=2)
    plan = decided(ctx, Decision.SHARD_REGATHER)
    said = [
        predict(one, complete(plan, one, ctx, default_passes()), ctx, default_passes()).prediction
        for one in (cut, whole)
    ]
    activation_bytes = batch.numel() * 6 * 4  # frames save what they are given
    assert 0 <= said[0].peak_bytes - said[1].peak_bytes <= 2 * activation_bytes
    assert said[0].step_seconds == pytest.approx(said[1].step_seconds, rel=0.1)


def test_operators_keep_the_keys_that_their_own_frame_gives_them():
    captured, _ = joined(Broken(), torch.zeros(2, 5, dtype=torch.long), 2)
    keys = list(keys_of(captured.forward.graph).values())
    assert sum(key.startswith("shared:addmm:0") for key in keys) == 2, "one in each of two frames"
    assert all(
        OPERATOR_KEY.is_set(node)
        for node in captured.forward.graph.nodes
        if node.op == "call_function" and node.name != "unshard" and "unshard" not in node.name
    )


def test_a_frame_follows_what_the_order_says_of_its_own_parameters():
    order = (Collective(("a", "b"), True), Collective(("c",), True), Collective(("b",), False))
    plan = Plan((), world_size=2, order={"forward": order})
    own = [Collective(("b",), True), Collective(("c",), True)]
    assert plan.order_for("forward", own) == (own[0], own[1])
    assert plan.order_for("forward", [*own, Collective(("d",), True)]) is None
    assert plan.order_for("forward", []) is None

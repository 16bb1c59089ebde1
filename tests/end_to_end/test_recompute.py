"""Recomputed activations in what is lowered and trained: the keys of both traces, losses, peaks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn

from examples.gpt import GPT, GPTConfig
from osdp_compile import PeakMemory, Plan, plan_of, report
from osdp_compile.engine.backend import compile_graph
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.planner_inputs import UNSEEN_BYTES
from osdp_compile.planning.traced_step import trace
from osdp_compile.trace import fake_world, trace_graphs
from passes.graph.step_module import graphs_of
from passes.recompute.recompute_activations import PartitionBoundary, keys_of, recompute
from passes.types.decision import FLAT_DECISIONS
from passes.types.units import parse_bytes
from tests.training import SLOW, Recipe, Reference, adamw, train_osdp

CONFIG = GPTConfig(vocab=64, layers=2, width=32, heads=2, context=16, dropout=0.1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(norm(layer(x)))
        return x.mean()


def gpt():
    tokens = torch.zeros(4, CONFIG.context, dtype=torch.long)
    return GPT(CONFIG), (tokens, tokens)


def convolutions():
    return Convolutions(), (torch.randn(4, 4, 8, 8),)


def layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())
    return model, (torch.randn(4, 8),)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), (tokens, None, None, None, None, tokens)


class Modulated(nn.Module):
    """Dynamo puts inputs of the forward, which are not free to save, between parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, 32, 2, stride=2)
        self.register_buffer("places", torch.randn(1, 256, 32))
        self.scale = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(32, elementwise_affine=False)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x, condition, gate):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places[:, :64]
        condition = condition * gate
        scale, shift = self.scale(condition)[:, None].chunk(2, dim=2)
        x = x + self.down(torch.relu(self.up(self.norm(x) * (1 + scale) + shift)))
        return x.square().mean()


def modulated():
    return Modulated(), (torch.randn(2, 4, 16, 16), torch.randn(2, 16), torch.randn(2, 1))


def saved_keys(forward, backward) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a step saves and could compute again, by their keys."""
    cut = PartitionBoundary(forward.graph, backward.graph)
    return {
        key: tuple(node.meta["val"].shape)
        for node, key in keys_of(forward.graph).items()
        if node in cut.saved and cut.chain(node)
    }


def compiled_with(model, args, **given):
    """One step in a world that is not there, without Inductor."""

    def backend(gm, inputs):
        options = CheckedOptions.parse({"hardware": SLOW, **given})
        return compile_graph(gm, inputs, options, lambda gm, _, **__: make_boxed_func(gm.forward))

    torch.compiler.reset()
    with fake_world(2):
        out = torch.compile(model, backend=backend)(*args)
        getattr(out, "loss", out).sum().backward()
    torch.compiler.reset()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "decision"),
    [
        (gpt, "shard_keep"),
        (convolutions, "replicate"),
        (layers, "shard_regather"),
        (llama, "shard_keep"),
        (modulated, "shard_keep"),
    ],
)
def test_what_is_saved_has_the_same_keys_in_the_graph_that_is_planned_on_and_in_the_lowered_one(
    make, decision
):
    model, args = make()
    traces = []

    def spied(step, ctx):
        traces.append(saved_keys(*graphs_of(step)))
        return recompute(step, ctx)

    plan = Plan.uniform(model.named_parameters(), decision, world_size=2)
    with mock.patch("passes.pipeline.recompute", spied):
        compiled_with(model, args, plan=plan)
    planned, lowered = traces[0], traces[-1]
    assert len(planned) > 1
    assert planned == lowered


def test_a_plan_that_recomputes_what_is_not_saved_is_refused():
    model, args = layers()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
    with pytest.raises(RuntimeError, match=r"PlanMismatch: .* '9:gelu:0'"):
        compiled_with(model, args, plan=plan.replace(recompute=("9:gelu:0",)))
    assert plan_of(model) is None


@pytest.mark.parametrize("scope", ["shard", "shard_host"])
def test_what_is_recomputed_reads_weights_as_their_decision_says(scope):
    """A weight whose gradient alone the backward needs is gathered again for a copy, or kept."""

    def gathers(how):
        model, args = layers()
        plan = Plan.uniform(
            model.named_parameters(), f"{scope}_{how}", world_size=4, ranks_of_a_host=2
        )
        texts = trace_graphs(
            model,
            args,
            world_size=4,
            mesh={"host": 2, "gpu": 2},
            plan=plan.replace(recompute=("0:addmm:0",)),
        )
        return texts["backward/shard"].count("all_gather_into_tensor")

    assert gathers("keep") == 0
    assert gathers("again") > 0


class FourLayers(nn.Module):
    """Activations that take far more than the parameters; gives its loss, and no more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def large_batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2048, 64, generator=generator)


def trained_under(rank, world_size, limit_bytes):
    """The plan, peaks and losses of two steps under a limit, and the losses of the reference."""
    recipe = Recipe(batch=large_batch, optimizer=adamw, steps=2)
    with PeakMemory() as memory:
        model = FourLayers()
        options = {"memory_limit": limit_bytes, "hardware": SLOW, "debug": True}
        losses = train_osdp(model, options, recipe, rank).losses
    lowered_bytes = report(model).predicted_peak_bytes
    wanted = Reference(FourLayers(), recipe, world_size).train(rank).losses
    return plan_of(model), lowered_bytes, memory.peak_bytes, losses, wanted


@pytest.mark.inductor
@pytest.mark.timeout(300)
def test_training_fits_where_it_would_not_without_recomputing_with_the_losses_of_ddp(two_ranks):
    limit_bytes = parse_bytes("3.8MiB")
    step = trace(FourLayers(), (large_batch(0, 0, 0),))
    least_bytes = min(
        step.uniform(decision, {"dp": 2}, SLOW).prediction.peak_bytes for decision in FLAT_DECISIONS
    )
    for plan, lowered_bytes, measured_bytes, losses, wanted in two_ranks.run(
        trained_under, limit_bytes
    ):
        assert plan.recompute
        assert lowered_bytes == pytest.approx(plan.prediction.peak_bytes, rel=1e-3)
        # The prediction holds a reserve.
        expected_bytes = plan.prediction.peak_bytes - UNSEEN_BYTES
        assert measured_bytes == pytest.approx(expected_bytes, rel=1e-3)
        assert measured_bytes <= 1.01 * limit_bytes < 0.95 * least_bytes
        assert losses == pytest.approx(wanted, abs=1e-5)
        assert len(set(wanted)) == len(wanted)

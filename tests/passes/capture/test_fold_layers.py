"""Folding: a step without its inner layers costs what the whole one does."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import Tensor, fx, nn

from passes.candidates.recompute_sets import RecomputeSet
from passes.capture.fold_layers import Folded, fold, recomputes_regularly
from passes.graph.captured import Captured
from passes.ops.markers import REDUCE_GRAD, UNSHARD, reduce_grad_of, unshard_of
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.pipeline import default_passes
from passes.plan.planner import Infeasible, make_plan
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import LoweredStep, predict
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import Plan
from tests.passes.captures import capture_step
from tests.passes.graphs import hardware, plan_of

PASSES = default_passes()
LAYERS, WIDTH, ROWS, WORLD = 14, 128, 256, 8
#: A layer's collectives take a tenth of its computing, about as long, and ten times as long.
NETWORKS = {"fast": 1e-8, "even": 1.5e-7, "slow": 1e-6}


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(torch.tanh(self.up(normed))) * scale


class Deep(nn.Module):
    """Something before the layers, something after, and something that all of them read."""

    def __init__(self, inner: list[int], skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, size) for size in inner])
        self.last = nn.Linear(WIDTH, 512)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale, earlier = torch.sigmoid(self.scale), []
        for block in self.blocks:
            earlier.append(x)
            x = block(x, scale)
            if self.skips and len(earlier) > 2:
                x = x + earlier[-3]
        return self.last(x).logsumexp(-1).mean()


def network(seconds_per_byte: float, overhead_seconds_per_byte: float = 0.0) -> Hardware:
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    rate = LinkRate(1e-6, seconds_per_byte, overhead_seconds_per_byte=overhead_seconds_per_byte)
    return hardware(collectives=dict.fromkeys(kinds, rate))


@functools.cache
def captured(layers: int = LAYERS) -> tuple[Captured, Context]:
    torch.manual_seed(0)
    model = Deep([4 * WIDTH] * layers)
    return capture_step(model, torch.randn(ROWS, WIDTH), world_size=WORLD)


@functools.cache
def folded() -> Folded:
    found = fold(captured()[0], captured()[1].parameters)
    assert found is not None
    return found


def decided(mix: tuple[str, str], ctx: Context) -> Plan:
    """The first for six layers, the second for the others, and again for what is in none."""
    return by_layers([mix[0]] * 6 + [mix[1]] * (LAYERS - 6), ctx)


def by_layers(by_layer: list[str], ctx: Context) -> Plan:
    decisions = {}
    for one in ctx.parameters:
        number = re.search(r"\d+", one.name)
        decisions[one.name] = Decision.named(
            by_layer[int(number.group())] if number else "shard_regather"
        )
    return plan_of(ctx.parameters, decisions, ctx.world_size, bucket_bytes=bucket_bytes_for(ctx))


def both(plan: Plan, ctx: Context) -> tuple[LoweredStep, LoweredStep]:
    """The whole step's prediction and the folded one's."""
    ctx = ctx.replace(deciding=True)
    return predict(captured()[0], plan, ctx, PASSES), predict(folded(), plan, ctx, PASSES)


KINDS = ["replicate", "shard_keep", "shard_regather"]
#: One decision for the first layers and one for the others.
MIXES = [
    *((kind, kind) for kind in KINDS),
    ("replicate", "shard_regather"),
    ("shard_regather", "shard_keep"),
]


@pytest.mark.parametrize("wires", NETWORKS)
@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_a_folded_step_takes_as_long_as_the_whole(wires, mix):
    _, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS[wires]))
    whole, few = both(decided(mix, ctx), ctx)
    assert len(few.backward.graph.nodes) < 0.6 * len(whole.backward.graph.nodes)
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.02)
    assert few.prediction.compute_seconds == pytest.approx(
        whole.prediction.compute_seconds, rel=0.01
    )


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_the_compute_overhead_of_collectives_counts_in_their_own_layer(mix):
    """Gathers run ahead: the first layers start those of layers that are left out."""
    _, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS["fast"], NETWORKS["fast"]))
    whole, few = both(decided(mix, ctx), ctx)
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.004)


def test_a_marker_of_a_folded_step_has_the_name_of_its_shard():
    """A layer's first gradient is among the operators of the layer ahead of it."""
    step = folded().captured
    names: dict[fx.Node, set[str]] = {}
    for node in step.backward.graph.nodes:
        if node.target in (UNSHARD, REDUCE_GRAD):
            mark = unshard_of(node) if node.target is UNSHARD else reduce_grad_of(node)
            names.setdefault(mark.shard, set()).add(mark.name)
    assert len(names) > 20
    assert all(len(own) == 1 for own in names.values())


@pytest.mark.parametrize("mix", MIXES, ids="-".join)
def test_a_folded_step_takes_as_much_memory_as_the_whole(mix):
    """With all collectives on the spot: without a limit gathers run ahead through all layers."""
    _, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS["even"]))
    plan = decided(mix, ctx)
    whole, few = both(plan, ctx.replace(limit_bytes=0))
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.05)
    limit_bytes = int(1.1 * whole.prediction.peak_bytes)
    whole, few = both(plan, ctx.replace(limit_bytes=limit_bytes))
    assert max(whole.prediction.peak_bytes, few.prediction.peak_bytes) <= limit_bytes
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.04)


@functools.cache
def sets() -> list[RecomputeSet]:
    ctx = captured()[1].replace(hardware=network(NETWORKS["even"]))
    return PlanEvaluator(folded(), ctx, PASSES).sets


def test_what_is_recomputed_is_in_all_layers():
    assert len(sets()) > 1
    alike = folded().alike
    for one in sets():
        of_layers = [key for key in (*one.recompute, *one.also_save) if key in alike]
        assert of_layers
        for key in of_layers:
            assert len(alike[key]) == LAYERS - 2
            assert {*alike[key]} <= {*one.recompute, *one.also_save}


@pytest.mark.parametrize("number", (0, -1), ids=["a little", "as much as helps"])
@pytest.mark.parametrize("mix", MIXES[2:], ids="-".join)
def test_a_folded_step_that_recomputes_is_like_the_whole(mix, number):
    _, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS["even"]))
    one = sets()[number]
    plan = decided(mix, ctx)
    saving, _ = both(plan, ctx.replace(limit_bytes=0))
    plan = plan.replace(recompute=one.recompute, also_save=one.also_save)
    whole, few = both(plan, ctx.replace(limit_bytes=0))
    assert whole.prediction.peak_bytes < saving.prediction.peak_bytes
    assert few.prediction.peak_bytes == pytest.approx(whole.prediction.peak_bytes, rel=0.05)
    whole, few = both(plan, ctx)
    assert few.prediction.step_seconds == pytest.approx(whole.prediction.step_seconds, rel=0.02)
    assert few.prediction.recomputed_bytes == whole.prediction.recomputed_bytes > 0
    assert few.prediction.recomputed_seconds == pytest.approx(
        whole.prediction.recomputed_seconds, rel=0.01
    )


def test_layers_that_are_recomputed_at_once_are_not_regular():
    step, ctx = captured()
    cut = PartitionBoundary(step.forward.graph, step.backward.graph)
    keys = keys_of(step.forward.graph)
    everything = tuple(keys[n] for n in sorted(cut.saved) if n in keys and cut.chain(n) is not None)
    plan = decided(("shard_regather", "shard_regather"), ctx).replace(recompute=everything)
    whole, few = both(plan, ctx.replace(limit_bytes=0))
    assert few.prediction.peak_bytes < 0.9 * whole.prediction.peak_bytes
    assert not recomputes_regularly(folded(), plan, ctx)


def test_a_limit_that_only_recomputing_keeps_is_kept_by_the_whole_step():
    step, ctx = captured()
    ctx = ctx.replace(hardware=network(NETWORKS["even"]))
    everything_again = decided(("shard_regather", "shard_regather"), ctx)
    saving, _ = both(everything_again, ctx.replace(limit_bytes=0))
    limit_bytes = int(0.85 * saving.prediction.peak_bytes)
    limited = ctx.replace(limit_bytes=limit_bytes)
    plan = make_plan(folded(), limited, PASSES)
    assert plan.recompute and plan.prediction.peak_bytes <= limit_bytes
    there = predict(step, plan, limited.replace(deciding=True), PASSES).prediction
    assert there.peak_bytes <= 1.05 * limit_bytes
    assert there.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("inner", "skips"),
    [([512] * 7, False), ([512] * 10 + [128] * 2, False), ([512] * 12, True)],
    ids=["few", "of two sizes", "with connections over three"],
)
def test_what_is_not_alike_is_not_folded(inner, skips):
    step, ctx = capture_step(Deep(inner, skips), torch.randn(4, WIDTH), world_size=WORLD)
    assert fold(step, ctx.parameters) is None


def test_a_layer_that_is_like_neither_neighbour_is_refused():
    _, ctx = captured()
    plan = by_layers(["shard_regather"] * 6 + ["replicate"] + ["shard_regather"] * 7, ctx)
    with pytest.raises(ValueError, match="layer 6 of a folded step has other decisions"):
        predict(folded(), plan, ctx, PASSES)


def least_bytes(ctx: Context) -> int:
    with pytest.raises(Infeasible) as error:
        make_plan(folded(), ctx.replace(limit_bytes=1), PASSES)
    return error.value.least_bytes

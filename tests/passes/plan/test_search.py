"""The search: slices where they make room and nowhere else, and the least memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.graph.captured import Captured
from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.pipeline import default_passes
from passes.plan.planner import Infeasible, complete, make_plan
from passes.plan.search import Search
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.predict import predict
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.hardware_presets import PRESETS
from passes.types.plan import OF_INPUT, Plan
from tests.chosen import others, thorough
from tests.hashes import printed_with_another_hash_seed
from tests.passes.captures import capture_step
from tests.passes.plan.test_planner import (
    MODELS,
    PASSES,
    captured,
    every_plan,
    limits,
    peak_of,
)
from tests.passes.split.test_split_operators import Guessing, Mlp
from tests.searching import short_searches

EACH_MODEL = pytest.mark.parametrize(
    "model",
    [
        "even",
        *thorough("biased"),
        *others(MODELS, ("even", "biased")),
    ],
)


def planned(step: Captured, ctx: Context, limit_bytes: int | None) -> Plan:
    return make_plan(step, ctx.replace(limit_bytes=limit_bytes), default_passes())


def least_bytes(step: Captured, ctx: Context) -> int:
    with pytest.raises(Infeasible) as error:
        planned(step, ctx, 1)
    return error.value.least_bytes


def sliced(plan: Plan) -> dict[str, int]:
    return {row.name: row.along for row in plan.parameters if row.slices > 1}


def wide() -> tuple[nn.Module, Tensor]:
    """Two weights that are nearly all there is, and little between them."""
    return Mlp(1024, bias=False), torch.randn(3, 6)


def guessing() -> tuple[nn.Module, Tensor]:
    """Logits far larger than all parameters."""
    return Guessing(), torch.randint(0, 64, (8, 50))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "along", "plans"),
    [
        (wide, {"up.weight": 0, "down.weight": 1}, 100),
        (guessing, {"head.weight": OF_INPUT}, 100),
    ],
)
def test_what_no_other_plan_fits_fits_in_slices(make, along, plans):
    torch.manual_seed(0)
    step, ctx = capture_step(*make(), world_size=8)
    with short_searches(plans):
        _fits_in_slices(step, ctx, along)


def _fits_in_slices(step: Captured, ctx: Context, along: dict[str, int]) -> None:
    whole = ctx.replace(slices=())
    least, least_whole = least_bytes(step, ctx), least_bytes(step, whole)
    assert least < 0.9 * least_whole
    limit = (least + least_whole) // 2
    found = planned(step, ctx, limit)
    assert sliced(found) == along
    assert found.prediction.peak_bytes <= limit
    # What the planner says is what the plan takes when it is lowered as it is.
    limited = ctx.replace(limit_bytes=limit)
    assert predict(step, found, limited, default_passes()).prediction == found.prediction
    with pytest.raises(Infeasible):
        planned(step, whole, limit)
    assert not sliced(planned(step, ctx, None))


@pytest.mark.usefixtures("short_search")
@pytest.mark.thorough
def test_by_hand_whatever_else_is_decided():
    step, ctx = capture_step(Mlp(256, bias=True), torch.randn(3, 6), world_size=4)
    ctx = ctx.replace(slices=(("up.weight", 3, 0),))
    for limit in (None, round(1.2 * least_bytes(step, ctx))):
        found = planned(step, ctx, limit)
        assert {row.name: row.slices for row in found.parameters if row.slices > 1} == {
            "up.weight": 3,
            "down.weight": 3,
        }
    assert found.decision("up.weight") == Decision.SHARD_REGATHER


@pytest.mark.usefixtures("medium_search")
@pytest.mark.thorough
def test_memory_is_filled_slice_by_slice():
    """Between all gathered again and all kept there are steps in time, each with its slices."""
    torch.manual_seed(0)
    step, ctx = capture_step(*wide(), world_size=8)
    least = least_bytes(step, ctx)
    whole_bytes = sum(ctx.parameter(name).full_bytes for name in ("up.weight", "down.weight"))
    found = [planned(step, ctx, least + whole_bytes * part // 8) for part in (0, 2, 4)]
    kept = [
        sum(row.kept_share * row.slices for row in plan.parameters if row.slices > 1)
        for plan in found
    ]
    seconds = [plan.prediction.step_seconds for plan in found]
    assert kept == sorted(kept) and len(set(kept)) > 2
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]


def test_slices_that_are_faster_are_found_without_need_of_memory():
    model = nn.Sequential(nn.Linear(512, 2048, False), nn.ReLU(), nn.Linear(2048, 512, False))
    hardware = PRESETS["cpu-gloo"]
    step, ctx = capture_step(model, torch.randn(128, 512), world_size=4, hardware=hardware)
    plan, whole = planned(step, ctx, 1 << 32), planned(step, ctx.replace(slices=()), None)
    assert sliced(plan) == {"0.weight": 0, "2.weight": 1}
    assert plan.prediction.step_seconds < 0.97 * whole.prediction.step_seconds


@EACH_MODEL
@pytest.mark.usefixtures("medium_search")
def test_an_infeasible_limit_says_the_least_and_that_works(model: str):
    step, ctx = captured(model)
    with pytest.raises(Infeasible, match="is below the least possible") as caught:
        make_plan(step, ctx.replace(limit_bytes=1000), PASSES)
    least = caught.value.least_bytes
    assert peak_of(make_plan(step, ctx.replace(limit_bytes=least), PASSES)) <= least


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["even", *others(MODELS, ("even",))])
def test_the_least_limit_is_about_that_of_the_smallest_of_all_plans(model: str, monkeypatch):
    step, ctx = captured(model)
    # Those plans run nothing in slices, and recompute nothing.
    tight = ctx.replace(limit_bytes=1000, slices=())
    monkeypatch.setattr("passes.pricing.evaluator.PlanEvaluator.sets", [])
    with pytest.raises(Infeasible) as caught:
        make_plan(step, tight, PASSES)
    start = bucket_bytes_for(tight)
    sizes = [size for size in (start, start // 4, start // 16, start // 64) if size >= 1 << 10]
    peaks = [
        peak_of(complete(one.replace(bucket_bytes=size), step, tight, PASSES))
        for one in every_plan(tight)
        for size in sizes
    ]
    assert min(peaks) <= caught.value.least_bytes <= 1.05 * min(peaks)


@pytest.mark.parametrize("model", ["even", "biased"])
def test_no_single_decision_that_fits_is_faster(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("passes.pricing.evaluator.PlanEvaluator.sets", [])
    step, ctx = captured(model)
    limited = ctx.replace(limit_bytes=limits(step, ctx, 5)[2], slices=())
    evaluator = PlanEvaluator(step, limited, PASSES)
    uniform = min(evaluator.evaluated_rank(evaluator.uniform(option)) for option in range(3))
    best = Search(evaluator).fastest()
    assert evaluator.rank(best) < uniform
    assert evaluator.left > 0, "the budget ended the search, not its goal"
    for index, options in enumerate(evaluator.choices):
        for option in options:
            key = best.deciding([(index, option.decision)], limited)
            assert evaluator.evaluated_rank(key) >= evaluator.rank(best)


def test_all_decisions_of_a_small_step_are_evaluated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("passes.pricing.evaluator.PlanEvaluator.sets", [])
    step, ctx = captured("even")
    limited = ctx.replace(limit_bytes=limits(step, ctx, 5)[2], slices=())
    evaluator = PlanEvaluator(step, limited, PASSES)
    Search(evaluator).fastest()
    assert len({key.decisions for key in evaluator.seen}) == 3**3  # three weights, three each


@pytest.mark.parametrize("model", ["even", "biased"])
def test_near_a_faster_candidate_above_the_limit_there_is_one_that_fits(model: str):
    step, ctx = captured(model, "slow")
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=limits(step, ctx, 5)[2]), PASSES)
    evaluator.is_short = True
    search = Search(evaluator)
    faster, best = evaluator.uniform(0), evaluator.uniform(2)
    assert evaluator.evaluated_rank(faster)[0] > evaluator.evaluated_rank(best)[0] == 0
    assert evaluator.seconds(faster) < evaluator.seconds(best)
    found = search.followed(faster, best)
    assert found is not None and evaluator.rank(found) < evaluator.rank(best)
    assert search.followed(best, faster) is None, "it is slower"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_slices_that_lose_time_make_room_to_recompute_less():
    torch.manual_seed(0)
    model, hardware = nn.Sequential(*(Residual() for _ in range(3))), PRESETS["cpu-gloo"]
    step, ctx = capture_step(model, torch.randn(512, 64), world_size=4, hardware=hardware)
    without = PlanEvaluator(step, ctx.replace(limit_bytes=1 << 40), PASSES)
    best = without.uniform(2).recomputing(without.sets[0])
    limit_bytes = int(without.evaluate(best).bytes_at.max()) + 2048
    evaluator = PlanEvaluator(step, ctx.replace(limit_bytes=limit_bytes), PASSES)
    evaluator.is_short = True
    search, (group,) = Search(evaluator), evaluator.slice_groups
    key = best.slicing(group, 2, None, ctx)
    assert evaluator.evaluated_rank(best) < evaluator.evaluated_rank(key)
    found = search.followed(key, best)
    assert found is not None and evaluator.rank(found) < evaluator.rank(best)
    assert found.splits and found.recompute != best.recompute


def evaluated_in_order() -> str:
    """The number of candidates that a search evaluates, and the rank of each in their order."""
    step, ctx = captured("even", rows=64)
    with short_searches(60):
        limited = ctx.replace(limit_bytes=limits(step, ctx, 5)[1])
        evaluator = PlanEvaluator(step, limited, PASSES)
        Search(evaluator).fastest()
    return f"{len(evaluator.seen)} {[evaluator.rank(key) for key in evaluator.seen]}"


@pytest.mark.thorough
def test_nothing_depends_on_the_order_of_hashes():
    """All ranks evaluate the same candidates in the same order, whatever their hash seed."""
    code = f"from {__name__} import evaluated_in_order as found; print(found())"
    printed = printed_with_another_hash_seed(code)
    assert printed == evaluated_in_order() and int(printed.split()[0]) > 20

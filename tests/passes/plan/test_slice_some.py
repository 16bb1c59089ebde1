"""Slices that the planner chooses: where they make room, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.capture.captured_step import Captured
from passes.pipeline import default_passes
from passes.plan.evaluator import Candidate, PlanEvaluator
from passes.plan.planner import Infeasible, make_plan
from passes.plan.predict import predict
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT, Plan
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import Guessing, Mlp


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
    ("make", "along"),
    [(wide, {"up.weight": 0, "down.weight": 1}), (guessing, {"head.weight": OF_INPUT})],
)
def test_what_no_other_plan_fits_fits_in_slices(make, along):
    torch.manual_seed(0)
    step, ctx = capture_step(*make(), world_size=8)
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
    assert planned(step, ctx, limit) == found
    with pytest.raises(Infeasible):
        planned(step, whole, limit)
    assert not sliced(planned(step, ctx, None))


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


def test_slices_and_decisions_are_changed_apart():
    step, ctx = capture_step(Mlp(256, bias=False), torch.randn(3, 6), world_size=4)
    evaluator = PlanEvaluator(step, ctx, default_passes())
    key = Candidate((Decision.SHARD_KEEP,) * len(ctx.parameters))
    (slice_group,) = [one for one in evaluator.slice_groups if "up.weight" in one.names]
    kept = evaluator.slicing(key, slice_group, 4)
    assert kept.decisions == key.decisions
    assert evaluator.slicing(key, slice_group, 4, 8) == kept  # all of both weights
    split = evaluator.slicing(key, slice_group, 4, 5)
    decided = dict(zip((one.name for one in ctx.parameters), split.decisions, strict=True))
    # The backward reads the last weight first: that one is kept, and of the other one slice.
    assert decided["up.weight"] == Decision.SHARD_REGATHER
    assert decided["down.weight"] == decided["first.weight"] == Decision.SHARD_KEEP
    assert {one.name: one.kept_slices for one in split.splits} == {"up.weight": 1, "down.weight": 0}
    whole = evaluator.slicing(split, slice_group, 1)
    replicated = evaluator.deciding(kept, (Decision.REPLICATE,) * len(ctx.parameters))
    for one, slices in (
        (kept, (4, 8)),
        (split, (4, 5)),
        (whole, (1, None)),
        (replicated, (4, None)),
    ):
        assert evaluator.slices_of(one, slice_group) == slices
    assert evaluator.deciding(split, key.decisions) == kept
    again = evaluator.slicing(key, slice_group, 4, 0)
    tight = ctx.replace(limit_bytes=1)
    peaks = [
        evaluator.price(one, tight, 0)[1].peak_bytes
        for one in (again, split, kept, evaluator.slicing(again, slice_group, 1))
    ]
    assert peaks[0] < peaks[1] <= peaks[2] and peaks[0] < peaks[3]


@pytest.mark.thorough
def test_memory_is_filled_slice_by_slice():
    """Between all gathered again and all kept there are steps in time, each with its slices."""
    torch.manual_seed(0)
    step, ctx = capture_step(*wide(), world_size=8)
    least = least_bytes(step, ctx)
    whole_bytes = sum(ctx.parameter(name).full_bytes for name in ("up.weight", "down.weight"))
    found = [planned(step, ctx, least + whole_bytes * part // 8) for part in range(5)]
    kept = [
        sum(row.kept_share * row.slices for row in plan.parameters if row.slices > 1)
        for plan in found
    ]
    seconds = [plan.prediction.step_seconds for plan in found]
    assert kept == sorted(kept) and len(set(kept)) > 2
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]

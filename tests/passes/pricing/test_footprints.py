"""Footprints: bytes by place are those of the state, of gathered copies and of gradients."""

from __future__ import annotations

import pytest

from passes.annotate.training_state import optimizer_temporary_bytes, state_bytes
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.footprints import Footprints
from passes.types.plan import Split
from tests.passes.plan.test_planner import PASSES, captured


@pytest.mark.parametrize("option", range(3))
def test_at_the_optimizers_step_there_is_the_state(option: int):
    step, ctx = captured("biased")
    evaluator = PlanEvaluator(step, ctx, PASSES)
    key = evaluator.uniform(option)
    bytes_of, plan = Footprints(evaluator).bytes_of(key), evaluator.plan_of(key)
    assert bytes_of[-1] == sum(state_bytes(ctx, plan).values()) + optimizer_temporary_bytes(
        ctx, plan
    )
    assert bytes_of.min() > 0


def test_a_weight_in_slices_is_whole_nowhere():
    step, ctx = captured("even")
    evaluator = PlanEvaluator(step, ctx, PASSES)
    footprints = Footprints(evaluator)
    key = evaluator.uniform(2)
    name, full_bytes = ctx.parameters[1].name, ctx.parameters[1].full_bytes
    sliced = key.replace(splits=(Split(name, 4),))
    spared = footprints.bytes_of(key) - footprints.bytes_of(sliced)
    assert spared.min() == 0 and spared.max() in (3 * full_bytes // 4, 2 * (3 * full_bytes // 4))


def test_other_calls_in_flight_keep_their_gathered_copies():
    step, ctx = captured("even")
    more = []
    for calls in (1, 3):
        evaluator = PlanEvaluator(step, ctx.replace(calls_in_flight=calls), PASSES)
        kept, again = (evaluator.uniform(option) for option in (1, 2))
        bytes_of = Footprints(evaluator).bytes_of
        more.append((bytes_of(kept), bytes_of(again)))
    gathered_bytes = sum(one.full_bytes for one in ctx.parameters)
    assert {*(more[1][0] - more[0][0])[:-1]} == {2 * gathered_bytes}
    assert (more[1][0] - more[0][0])[-1] == 0
    assert not (more[1][1] - more[0][1]).any()


def test_bytes_do_not_depend_on_the_candidate_before():
    step, ctx = captured("biased")
    evaluator = PlanEvaluator(step, ctx, PASSES)
    footprints = Footprints(evaluator)
    first = evaluator.uniform(1)
    keys = [first.deciding([(0, one.decision)], ctx) for one in evaluator.choices[0]]
    found = [footprints.bytes_of(key) for key in (first, *keys, first)]
    alone = [Footprints(evaluator).bytes_of(key) for key in (first, *keys, first)]
    assert all((one == other).all() for one, other in zip(found, alone, strict=True))
    assert len({tuple(one) for one in alone}) > 1

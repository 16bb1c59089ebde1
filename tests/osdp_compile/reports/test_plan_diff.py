"""The differences of two plans: in groups of layers, with both predictions and the gains."""

from __future__ import annotations

import dataclasses

from osdp_compile.reports.plan_diff import plan_diff
from osdp_compile.reports.plan_table import plain_text
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT, Collective, ParameterPlan, Plan, Prediction

AGAIN, KEEP = Decision.SHARD_REGATHER, Decision.SHARD_KEEP
MIB = 1 << 20
NAMES = ("before.json", "after.json")


def layers(decision: Decision, reason: str) -> list[ParameterPlan]:
    return [
        ParameterPlan(f"blocks.{i}.up.weight", (8, 8), "float32", decision, 0, reason)
        for i in range(4)
    ]


def prediction(step_seconds: float, gathered_bytes: int) -> Prediction:
    peak = {"parameters": 2 * MIB, "gathered": gathered_bytes}
    return Prediction(step_seconds, 0.5, step_seconds - 0.5, sum(peak.values()), peak)


BEFORE = Plan(
    tuple(layers(AGAIN, "saves 8.00 MiB at the peak for 2.0 ms; gather 1.0 ms, hidden")),
    world_size=2,
    memory_limit_bytes=8 * MIB,
    prediction=prediction(0.8, MIB),
)


def text(before: Plan, after: Plan) -> str:
    return plain_text(*plan_diff((before, after), NAMES), width=160)


def cells(said: str, start: str) -> list[str]:
    """The cells of the row whose first cell begins so."""
    (line,) = (one for one in said.splitlines() if one[1:].strip().startswith(start))
    return [one.strip() for one in line.strip("│").split("│")]


def test_alike_plans_have_no_differences():
    assert plan_diff((BEFORE, BEFORE), NAMES) == []
    slower = BEFORE.replace(
        parameters=tuple(dataclasses.replace(one, reason="other") for one in BEFORE.parameters)
    )
    assert plan_diff((BEFORE, slower), NAMES) == []


def test_layers_with_one_difference_share_a_row_with_the_gains_of_both_plans():
    rows = layers(KEEP, "saves 2.0 ms for 8.00 MiB at the peak")
    rows[3] = BEFORE.parameters[3]
    said = text(BEFORE, BEFORE.replace(parameters=tuple(rows)))
    row = cells(said, "blocks.{0..2}.up.weight")
    assert row[1:3] == ["shard, regather", "shard, keep"]
    assert row[3].startswith("before.json: saves 8.00 MiB at the peak for 2.0 ms; gather")
    assert "after.json: saves 2.0 ms for 8.00 MiB at the peak" in said
    assert "blocks.3" not in said and "blocks.{0..3}" not in said


def test_predictions_stand_side_by_side_with_the_change():
    said = text(BEFORE, BEFORE.replace(prediction=prediction(0.6, 3 * MIB)))
    assert cells(said, "predicted step")[1:] == ["800.0 ms", "600.0 ms", "-25.0%"]
    assert cells(said, "computing")[1:] == ["500.0 ms", "500.0 ms", "+0.0%"]
    assert cells(said, "predicted peak")[1:] == ["3.00 MiB", "5.00 MiB", "+66.7%"]
    assert cells(said, "gathered")[1:] == ["1.00 MiB", "3.00 MiB", "+200.0%"]
    assert "parameters" not in said  # as many as before


def test_a_plan_by_hand_has_no_prediction():
    said = text(BEFORE, BEFORE.replace(prediction=None))
    assert cells(said, "predicted step")[1:] == ["800.0 ms", "-", ""]
    assert cells(said, "predicted peak")[1:] == ["3.00 MiB", "-", ""]


def test_settings_are_there_where_they_differ():
    said = text(BEFORE, BEFORE.replace(memory_limit_bytes=None, bucket_bytes=2 * MIB))
    assert cells(said, "memory limit")[1:] == ["8 MiB", "-", ""]
    assert cells(said, "bucket size")[1:] == ["1.00 MiB", "2.00 MiB", ""]
    assert "ranks" not in said


def test_slices_of_another_dimension_are_a_difference():
    row = dataclasses.replace(BEFORE.parameters[0], slices=2)
    plans = [BEFORE.replace(parameters=(dataclasses.replace(row, along=a),)) for a in (1, OF_INPUT)]
    assert cells(text(*plans), row.name)[1:3] == [
        "shard, regather, in 2 slices, along 1",
        "shard, regather, in 2 slices, of its input",
    ]


def test_small_parameters_share_a_row_without_reasons():
    rows = [ParameterPlan("up.weight", (1000,), "float32", AGAIN)]
    rows += [
        ParameterPlan(f"{n}.bias", (2,), "float32", AGAIN, reason=f"reason {n}") for n in "abc"
    ]
    after = tuple(dataclasses.replace(row, decision=KEEP) for row in rows)
    said = text(BEFORE.replace(parameters=tuple(rows)), BEFORE.replace(parameters=after))
    assert cells(said, "3 small parameters")[1:] == ["shard, regather", "shard, keep", ""]
    assert "up.weight" in said and "bias" not in said


def test_a_parameter_of_one_plan_alone():
    said = text(BEFORE, BEFORE.replace(parameters=BEFORE.parameters[:3]))
    assert cells(said, "blocks.3.up.weight")[1:3] == ["shard, regather", "-"]


def test_orders_and_recomputed_tensors():
    one, other = (
        Collective(("blocks.0.up.weight",), True),
        Collective(("blocks.1.up.weight",), True),
    )
    before = BEFORE.replace(order={"forward": (one, other)}, recompute=("blocks.0.up:mm:0",))
    after = before.replace(
        order={"forward": (other, one)},
        recompute=("blocks.0.up:mm:0", "blocks.1.up:mm:0", "blocks.2.up:mm:0"),
    )
    said = text(before, after)
    assert "other buckets, or another order of collectives: forward" in said
    assert "only after.json recomputes 2 tensors: blocks.{1..2}.up:mm:0" in said
    assert "only before.json" not in said


def test_brackets_in_names_are_text():
    row = dataclasses.replace(BEFORE.parameters[0], name="layers.[red].weight")
    after = dataclasses.replace(row, decision=KEEP, reason="[bold] saves 1.0 ms")
    said = text(BEFORE.replace(parameters=(row,)), BEFORE.replace(parameters=(after,)))
    assert "layers.[red].weight" in said and "[bold] saves 1.0 ms" in said

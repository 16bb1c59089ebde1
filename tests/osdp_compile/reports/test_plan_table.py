"""The plan as people see it: grouped, complete, on one screen, and shown without being asked."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
import subprocess
import sys

import pytest
from rich.console import Console

from osdp_compile.reports.plan_table import (
    log_plan,
    plan_line,
    plan_table,
    plan_text,
    prediction_lines,
)
from passes.types.decision import Decision
from passes.types.plan import Collective, ParameterPlan, Plan, Prediction

AGAIN, KEEP, WHOLE = Decision.SHARD_REGATHER, Decision.SHARD_KEEP, Decision.REPLICATE
MIB = 1 << 20


def row(name, decision=AGAIN, saved_bytes=MIB, reason="gather 1.0 ms, hidden", shape=(512, 512)):
    return ParameterPlan(name, shape, "float32", decision, saved_bytes, reason)


def plan(*rows, **changes):
    return Plan(tuple(rows), world_size=2, **changes)


def cells(a_plan):
    """The table's rows as lists of text."""
    columns = [[str(cell) for cell in column.cells] for column in plan_table(a_plan).columns]
    return [list(one) for one in zip(*columns, strict=True)]


def test_a_row_says_what_was_decided_and_why():
    one = row("head.weight", KEEP, 3 * MIB // 2, "gather 2.5 ms, 1.0 ms exposed", (256, 512))
    why = "gather 2.5 ms, 1.0 ms exposed"
    assert cells(plan(one)) == [["head.weight", "256x512", "shard, keep", "1.50 MiB", why]]


def test_slices_and_how_many_of_them_are_kept():
    four = dataclasses.replace(row("up.weight"), slices=4)
    one_kept = dataclasses.replace(four, kept_slices=1)
    said = ["shard, regather, in 4 slices", "shard, regather, in 4 slices, 1 of them kept"]
    assert [cells(plan(one))[0][2] for one in (four, one_kept)] == said
    layers = [
        dataclasses.replace(one, name=f"{i}.up.weight") for i, one in enumerate((four, one_kept))
    ]
    assert len(cells(plan(*layers))) == 2


def test_what_saves_nothing_says_nothing_and_a_scalar_is_called_one():
    one = row("scale", WHOLE, 0, "too small to shard", ())
    assert cells(plan(one)) == [["scale", "scalar", "replicate", "", "too small to shard"]]


def test_layers_that_are_alike_share_a_row_which_sums_what_they_save():
    rows = [row(f"blocks.{i}.{kind}.weight") for i in range(12) for kind in ("up", "down")]
    assert [one[0] for one in cells(plan(*rows))] == [
        "blocks.{0..11}.up.weight",
        "blocks.{0..11}.down.weight",
    ]
    assert {one[3] for one in cells(plan(*rows))} == {"12.00 MiB"}


@pytest.mark.parametrize(
    "odd",
    [
        row("blocks.1.up.weight", KEEP),
        row("blocks.1.up.weight", shape=(512, 256)),
        row("blocks.1.up.weight", reason="gather 1.0 ms, 0.5 ms exposed"),
        row("blocks.1.down.weight"),
        row("layers.1.up.weight"),
    ],
)
def test_layers_that_differ_do_not_share_a_row(odd):
    rows = [row("blocks.0.up.weight"), odd, row("blocks.2.up.weight"), row("blocks.3.up.weight")]
    names = [one[0] for one in cells(plan(*rows))]
    assert names == ["blocks.{0,2,3}.up.weight", odd.name]


def test_two_numbers_in_a_name_are_each_given_as_a_range():
    rows = [row(f"stages.{i}.blocks.{j}.weight") for i in range(2) for j in range(3)]
    assert [one[0] for one in cells(plan(*rows))] == ["stages.{0..1}.blocks.{0..2}.weight"]


def test_a_grid_of_layers_with_gaps_is_not_given_as_a_full_one():
    rows = [row(f"stages.{i}.blocks.{j}.weight") for i, j in ((0, 0), (0, 1), (1, 0))]
    names = [one[0] for one in cells(plan(*rows))]
    assert names == ["stages.0.blocks.{0..1}.weight", "stages.1.blocks.0.weight"]


def test_a_shared_row_gives_the_range_of_its_figures():
    reasons = ["gather 2.1 ms, hidden; reduce 900 us, hidden"] * 2
    reasons[1] = "gather 12.5 ms, hidden; reduce 1.5 ms, hidden"
    rows = [row(f"blocks.{i}.weight", reason=reason) for i, reason in enumerate(reasons)]
    assert (
        cells(plan(*rows))[0][4] == "gather 2.1 to 12.5 ms, hidden; reduce 900 us to 1.5 ms, hidden"
    )


def test_every_parameter_of_a_deep_model_is_shown_on_one_screen():
    kinds = ("norm.weight", "qkv.weight", "qkv.bias", "proj.weight", "up.weight", "down.weight")
    rows = [row("token.weight"), row("head.weight")]
    for i in range(100):
        for kind in kinds:
            decision = KEEP if i < 40 else AGAIN
            rows.append(
                row(f"model.layers.{i}.{kind}", decision, reason=f"gather {i}.0 ms, hidden")
            )
    text = plan_text(plan(*rows), width=120)
    assert len(text.splitlines()) <= 24
    assert "model.layers.{0..39}.qkv.bias" in text and "model.layers.{40..99}.qkv.bias" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_folds_the_text_and_loses_none_of_it(width):
    one = row("a_module_with_a_long_name." * 3 + "weight", reason="gather 1.0 ms, hidden; " * 4)
    lines = plan_text(plan(one), width=width).splitlines()
    assert max(map(len, lines)) <= width
    # A column of the folded table, read from top to bottom, is what stood in the cell.
    body = [re.split("[│┃]", line)[1:-1] for line in lines if line.startswith("│")]
    whole = ["".join(part.strip() for part in column) for column in zip(*body, strict=True)]
    assert whole[0] == one.name
    assert whole[4].replace(" ", "") == one.reason.replace(" ", "")


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, plan_text(plan(row("w", reason="word " * 60))).splitlines())) == 70


def test_the_title_says_for_how_many_ranks_and_under_what_limit():
    assert plan_text(plan(row("w"))).startswith("osdp plan for 2 ranks, no memory limit\n")
    limited = plan_text(plan(row("w"), memory_limit_bytes=180 * MIB))
    assert limited.startswith("osdp plan for 2 ranks, limit 180 MiB\n")


def test_the_prediction_follows_the_table():
    said = Prediction(1.25, 1.0, 0.25, 3 * MIB, {"parameters": 2 * MIB, "gathered": MIB})
    predicted = plan(row("w"), prediction=said)
    assert prediction_lines(predicted) == [
        "predicted step 1.25 s, exposed communication 250.0 ms",
        "predicted peak 3.00 MiB (parameters 2.00 MiB, gathered 1.00 MiB)",
    ]
    assert plan_text(predicted).splitlines()[-2:] == prediction_lines(predicted)
    assert prediction_lines(plan(row("w"))) == []
    gather, reduce = Collective(("w",), True), Collective(("w",), False)
    in_stages = predicted.replace(order={"forward": (gather, Collective(("w",), True, 1), reduce)})
    line = "1 of 2 collectives over all ranks are hierarchical"
    assert prediction_lines(in_stages)[2:] == [line]
    # What is sharded within hosts is not over all ranks.
    local = row("v", decision=Decision.SHARD_HOST_KEEP)
    reductions = Collective(("v",), False), Collective(("v",), False, 1)
    mixed = in_stages.replace(
        parameters=(*in_stages.parameters, local), order={**in_stages.order, "backward": reductions}
    )
    assert prediction_lines(mixed)[2:] == [line]
    assert "shard within" in plan_text(mixed)  # the rest may be in the next line


def test_brackets_in_names_are_text_and_not_markup():
    console = Console(file=io.StringIO(), width=100)
    console.print(plan_table(plan(row("experts[bold].weight"))))
    assert "experts[bold].weight" in console.file.getvalue()


def test_the_plan_is_one_record_at_info(caplog):
    log = logging.getLogger("osdp_compile.test_report")
    with caplog.at_level(logging.INFO, logger=log.name):
        log_plan(plan(row("w")), log)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == plan_text(plan(row("w")))


def test_the_plan_in_one_line_and_its_table_at_debug(caplog):
    log = logging.getLogger("osdp_compile.test_report")
    said = Prediction(0.002, 0.001, 0.001, 3 * MIB, {"parameters": 3 * MIB})
    one = plan(row("up"), row("bias", WHOLE), memory_limit_bytes=4 * MIB, prediction=said)
    line = (
        "osdp plan for 2 ranks, limit 4 MiB: 1 of 2 parameters sharded, predicted step 2.0 ms, "
        "exposed communication 1.0 ms, peak 3.00 MiB"
    )
    for level, seen in (
        (logging.INFO, [("INFO", line)]),
        (logging.DEBUG, [("INFO", line), ("DEBUG", plan_text(one))]),
    ):
        caplog.clear()
        with caplog.at_level(level, logger=log.name):
            log_plan(one, log, in_one_line=True)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == seen
    assert plan_line(plan(row("w"))) == (
        "osdp plan for 2 ranks, no memory limit: 1 of 1 parameters sharded"
    )


LOGS_A_PLAN = """
import logging, sys
from osdp_compile.reports.plan_table import log_plan
from passes.types.plan import Decision, ParameterPlan, Plan

plan = Plan((ParameterPlan("w", (4, 4), "float32", Decision.SHARD_REGATHER),), world_size=2)
log = logging.getLogger("osdp_compile")
{configure}
log_plan(plan, log)
"""


def what_a_person_sees(configure):
    """Standard error of a program that configures logging in this way and gets a plan logged."""
    done = subprocess.run(
        [sys.executable, "-c", LOGS_A_PLAN.format(configure=configure)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr


def test_who_has_configured_nothing_sees_the_plan_once():
    assert what_a_person_sees("").count("osdp plan for 2 ranks") == 1


def test_who_has_configured_logging_gets_one_record_in_their_format():
    configure = "logging.basicConfig(level=logging.INFO, format='%(name)s says %(message)s')"
    seen = what_a_person_sees(configure)
    assert seen.startswith("osdp_compile says osdp plan for 2 ranks")
    assert seen.count("osdp plan for 2 ranks") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "configure", ["logging.basicConfig(level=logging.WARNING)", "log.setLevel(logging.ERROR)"]
)
def test_who_wants_only_warnings_sees_nothing(configure):
    assert what_a_person_sees(configure) == ""

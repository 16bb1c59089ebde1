"""The log of a graph's lowering: lines at DEBUG, artifacts of TORCH_TRACE, or nothing at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from osdp_compile import Plan, _torch
from osdp_compile.lowering import graph_log
from osdp_compile.lowering.graph_log import GraphLog
from osdp_compile.trace import fake_world
from passes.pipeline import Stage, default_passes
from tests.boxed import without_inductor
from tests.training import SLOW

ROOT = Path(__file__).parents[3]


def trained() -> Plan:
    """One step of a small model on a fake rank, and a call without gradients. Its plan."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64))
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
    with without_inductor():
        compiled = torch.compile(model, backend="osdp", options={"hardware": SLOW, "plan": plan})
        compiled(torch.randn(128, 32)).sum().backward()
        with torch.no_grad():
            compiled(torch.randn(128, 32))
    return plan


PROGRAM = """
import sys
from osdp_compile.trace import fake_world
from tests.osdp_compile.lowering.test_graph_log import trained

with fake_world(2, int(sys.argv[1])):
    trained()
"""


def started(rank: int, folder: Path) -> subprocess.Popen[str]:
    given = {"PYTHONPATH": str(ROOT), "TORCH_LOGS": "+osdp", "TORCH_TRACE": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(rank)],
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By rank: what it prints, and the folder of its trace."""
    folders = [tmp_path_factory.mktemp(f"rank{rank}") for rank in range(2)]
    processes = [started(rank, folder) for rank, folder in enumerate(folders)]
    found = {}
    for rank, (process, folder) in enumerate(zip(processes, folders, strict=True)):
        printed, lines = process.communicate(timeout=500)
        assert process.returncode == 0, lines
        assert printed == ""
        found[rank] = lines, folder
    return found


def artifacts(folder: Path) -> list[tuple[str, dict, str]]:
    """The package's artifacts in a folder of TORCH_TRACE: name, entry and text, in order."""
    (file,) = folder.iterdir()
    entries: list[tuple[dict, list[str]]] = []
    for line in file.read_text().splitlines():
        if line.startswith("\t"):
            entries[-1][1].append(line[1:])
        else:
            entries.append((json.loads(line.partition("] ")[2]), []))
    return [
        (entry["artifact"]["name"], entry, "\n".join(lines))
        for entry, lines in entries
        if entry.get("artifact", {}).get("name", "").startswith("osdp_")
    ]


def names_of(frame: int, found: list[tuple[str, dict, str]]) -> list[str]:
    return [name for name, entry, _ in found if entry["frame_compile_id"] == frame]


def expected_names() -> list[str]:
    numbered = list(enumerate(default_passes()))
    joint = [f"joint_{n:02d}_{one.name}" for n, one in numbered if one.stage is Stage.JOINT]
    graphs = [
        f"{graph}_{n:02d}_{one.name}"
        for graph in ("backward", "forward")
        for n, one in numbered
        if one.stage is not Stage.JOINT
    ]
    more = ["plan", "plan_table", "forward_schedule", "backward_schedule"]
    return sorted(f"osdp_{one}" for one in [*joint, *graphs, *more])


@pytest.mark.thorough
def test_plan_graphs_and_schedule_are_artifacts_of_the_compilation_on_every_rank(runs):
    for rank in range(2):
        found = artifacts(runs[rank][1])
        assert sorted(names_of(0, found)) == expected_names()
        assert {(entry["rank"], entry["frame_id"]) for _, entry, _ in found} == {(rank, 0)}
        # The first attempt plans; the second reads the model through markers.
        attempts = {e["attempt"] for _, e, _ in found if e["frame_compile_id"] == 0}
        assert attempts == {1}


@pytest.mark.thorough
def test_names_sort_in_the_order_of_the_passes(runs):
    for graph in ("joint", "forward", "backward"):
        names = names_of(0, artifacts(runs[0][1]))
        of_graph = [one for one in names if re.match(rf"osdp_{graph}_\d", one)]
        assert of_graph == sorted(of_graph)


@pytest.mark.thorough
def test_a_call_without_gradients_has_its_own(runs):
    names = names_of(1, artifacts(runs[0][1]))
    assert "osdp_inference_schedule" in names and "osdp_plan" in names
    assert not [one for one in names if "backward" in one]


@pytest.mark.thorough
def test_the_artifacts_say_what_the_graphs_are(runs):
    found = artifacts(runs[0][1])
    texts = {name: text for name, entry, text in found if entry["frame_compile_id"] == 0}
    plan = Plan.from_dict(json.loads(texts["osdp_plan"]))
    assert {row.decision.sharded for row in plan.parameters} == {True}
    assert "osdp plan for 2 ranks" in texts["osdp_plan_table"]
    last = default_passes()[-1].name
    for graph, purpose in (("forward", "gather"), ("backward", "reduce")):
        (name,) = (one for one in texts if re.match(rf"osdp_{graph}_\d+_{last}$", one))
        gathered = re.findall(rf"# ({purpose} .+)$", texts[name], re.M)
        title, head, *rows = texts[f"osdp_{graph}_schedule"].splitlines()
        assert title.startswith(f"schedule of the {graph}: {len(rows)} collective")
        assert head.split() == ["start", "end", "exposed", "network", "collective"]
        assert gathered and len([row for row in rows if purpose in row]) == len(gathered)
    (before,) = (text for name, text in texts.items() if re.match(r"osdp_forward_\d+_hoist$", name))
    assert "# gather" not in before


@pytest.mark.thorough
def test_rank_zero_logs_each_pass_and_the_schedule_and_the_other_nothing(runs):
    lines, _ = runs[0]
    assert runs[1][0] == ""
    (line,) = re.findall(r"I.*\] osdp plan for 2 ranks.*: (\d+ of \d+) parameters sharded", lines)
    assert line == "4 of 4"
    assert re.search(r"V.*│ 0.bias +│ 32 +│ shard, regather", lines)
    of_pass = r"(\w+), pass (\w+): (\d+) nodes before, (\d+) after, [\d.]+ \w+"
    logged = re.findall(rf"^\[rank0\]:V.*\] \[0/0_1\] {of_pass}$", lines, re.M)
    graphs = [(graph, name) for graph, name, _, _ in logged]
    by_stage = {Stage.JOINT: ["joint"], Stage.STEP: ["step"], Stage.PARTS: ["forward", "backward"]}
    assert sorted(graphs) == sorted(
        (graph, one.name) for one in default_passes() for graph in by_stage[one.stage]
    )
    (before, after), *_ = [
        (int(b), int(a)) for g, n, b, a in logged if (g, n) == ("forward", "shard")
    ]
    assert after > before  # collectives and waits in place of markers
    assert "schedule of the forward: " in lines and "schedule of the backward: " in lines


def test_without_both_nothing_is_computed():
    never = mock.Mock(side_effect=AssertionError("the text is made and nobody reads it"))
    torch.compiler.reset()
    with (
        mock.patch.multiple(graph_log, graph_text=never, plan_text=never, schedule_text=never),
        mock.patch.object(Plan, "to_json", never),
        mock.patch.object(graph_log, "_logged", never),
        fake_world(2),
    ):
        trained()
    torch.compiler.reset()


def test_the_form_that_gathers_all_weights_has_names_of_its_own_and_the_id_of_the_first():
    written = []
    plan = Plan((), world_size=2)
    with (
        mock.patch.object(_torch.logs, "is_traced", lambda: True),
        mock.patch.object(_torch.dynamo, "compile_id", mock.Mock(side_effect=["first", None])),
        mock.patch.object(_torch.logs, "trace_artifact", lambda *given: written.append(given)),
    ):
        GraphLog(plan, (), GraphLog(plan, ()))
    assert [(name, compiled) for name, _, _, compiled in written] == [
        ("osdp_plan", "first"),
        ("osdp_plan_table", "first"),
        ("osdp_gathers_all_plan", "first"),
        ("osdp_gathers_all_plan_table", "first"),
    ]

"""The fixture ``osdp_budget`` in pytest: its files, its flag, its failures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from passes.types.plan import Plan

pytest_plugins = ["pytester"]


def test_a_budget_of_this_repository(osdp_budget, short_search):
    """The stored figures are those of one version of torch; others may differ."""
    with torch.device("meta"):
        model, x = (
            nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)),
            torch.ones(4, 64),
        )
    plan = osdp_budget(
        model, x, world_size=64, hardware="h100-sxm", peak="73MiB", step="1ms", grows=0.5
    )
    assert isinstance(plan, Plan) and plan.world_size == 64


SHORT = """
import pytest
from tests.searching import short_searches


@pytest.fixture(autouse=True)
def few_plans():
    with short_searches():
        yield
"""
HEAD = """
import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()
"""
ONE_TEST = """
def test_{name}(osdp_budget):
    for rows in {rows}:
        osdp_budget(
            Deep({layers}), torch.ones(rows, 64), world_size=8, hardware="h100-sxm", {more}
        )
"""


def one_test(name: str, layers: int = 2, rows: tuple[int, ...] = (4,), more: str = "") -> str:
    return ONE_TEST.format(name=name, layers=layers, rows=rows, more=more)


@pytest.mark.thorough
def test_the_fixture_fails_until_written_and_on_growth(pytester, monkeypatch):
    pytester.makeconftest(SHORT)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    def run(tests, *flags):
        pytester.makepyfile(test_it=HEAD + "".join(tests))
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *flags)

    def stored():
        return {path.name: path.read_text() for path in pytester.path.glob("__snapshots__/*/*")}

    twice = one_test("twice", layers=1, rows=(4, 8))
    tests = [one_test("deeper", layers=1), one_test("limited", layers=1), twice]
    run(tests, "--snapshot-update").assert_outcomes(passed=3)
    before = stored()
    assert sorted(before) == [
        "test_deeper[budget].json",
        "test_limited[budget].json",
        "test_twice[budget-2].json",
        "test_twice[budget].json",
    ]
    assert before["test_deeper[budget].json"] == before["test_twice[budget].json"]

    tests = [one_test("deeper"), twice, one_test("never_written", layers=1)]
    result = run(tests, "-k", "not limited")
    result.assert_outcomes(passed=1, failed=2)
    said = result.stdout.str()
    assert "layers.1.weight: new, 64x64 float32, +16.00 KiB" in said
    path = "__snapshots__/test_it/test_never_written[[]budget].json"
    result.stdout.fnmatch_lines([f"no figures are stored in {path}: pytest --snapshot-update*"])
    assert "torch.__trace" not in said, "torch's own records hide the failure"
    assert "During handling" not in said
    assert stored() == before

    limited = one_test("limited", layers=1, more="memory_limit='1KiB'")
    result = run([*tests, limited], "--snapshot-update", "-k", "deeper or limited")
    result.assert_outcomes(passed=1, failed=1, deselected=2)
    assert "least possible" in result.stdout.str()
    after = stored()
    assert after.keys() == before.keys()
    changed = {name for name, text in before.items() if after[name] != text}
    assert changed == {"test_deeper[budget].json"}

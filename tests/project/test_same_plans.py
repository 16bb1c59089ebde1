"""The comparison of two records of plans and graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.same_plans import CONFIGURATIONS, compare, differences


def _record() -> dict[str, object]:
    prediction = {"step_seconds": 0.5, "peak_bytes": 100}
    return {
        "limit_bytes": 120,
        "plan": {"prediction": prediction, "order": {"forward": [{"names": ["a"]}]}},
        "graphs": {"forward/reorder": ["%0 = input[a]", "%1 = mm(%0, %0)", "return [%1]"]},
    }


def test_equal_records_have_no_differences() -> None:
    assert list(differences(_record(), _record())) == []


def test_seconds_are_equal_up_to_rounding_and_bytes_exactly() -> None:
    assert list(differences({"seconds": 0.5}, {"seconds": 0.5 * (1 + 1e-13)})) == []
    assert [path for path, _, _ in differences({"seconds": 0.5}, {"seconds": 0.5 + 1e-11})]
    assert list(differences({"bytes": 100}, {"bytes": 101})) == [("bytes", 100, 101)]


def test_of_a_graph_the_first_different_line_counts() -> None:
    before = ["%0 = input[a]", "%1 = mm(%0, %0)", "return [%1]"]
    after = ["%0 = input[a]", "%1 = add(%0, %0)", "%2 = mm(%1, %1)", "return [%2]"]
    assert list(differences({"graph": before}, {"graph": after})) == [
        ("graph[1]", "%1 = mm(%0, %0)", "%1 = add(%0, %0)")
    ]
    assert list(differences(before, before[:2])) == [("[2]", "return [%1]", None)]


def test_a_configuration_that_only_one_record_has_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        folder.mkdir()
        (folder / "GPT, 8 ranks.json").write_text(json.dumps(_record()))
    assert compare(before, after, show=4) == 0
    (after / "tied, 8 ranks.json").write_text(json.dumps(_record()))
    assert compare(before, after, show=4) == 1
    assert "1 of them different" in capsys.readouterr().out


def test_every_configuration_has_a_file_of_its_own() -> None:
    assert len(set(CONFIGURATIONS)) == len(CONFIGURATIONS)

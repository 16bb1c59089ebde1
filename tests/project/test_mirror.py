"""``tests/`` mirrors ``passes/``: each file of these folders has a test file of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "annotate",
    "candidates",
    "capture",
    "chunk",
    "overlap",
    "plan",
    "pricing",
    "reasons",
    "recompute",
    "shard",
    "simulate",
    "split",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_file_has_a_test_file_of_its_name(folder: str):
    files = {one.name for one in (ROOT / "passes" / folder).glob("*.py")} - {"__init__.py"}
    tests = {one.name for one in (ROOT / "tests" / "passes" / folder).glob("test_*.py")}
    assert files
    assert sorted(file for file in files if f"test_{file}" not in tests) == []

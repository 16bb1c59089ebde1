"""The table of what works with what names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_table_names_is_there():
    table = (TESTS.parent / "docs" / "works_with.md").read_text()
    named, file = [], ""
    for given, test in re.findall(r"(\w+\.py)?::(\w+)", table):
        file = given or file  # the one before, where none is given
        named.append((file, test))
    assert len(named) > 20
    texts = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    missing = [one for one in named if f"def {one[1]}(" not in texts.get(one[0], "")]
    assert not missing

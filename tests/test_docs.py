"""The table of what works with what names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_table_names_is_there():
    table = (HERE.parent / "docs" / "works_with.md").read_text()
    named, file = [], ""
    for given, test in re.findall(r"(\w+\.py)?::(\w+)", table):
        file = given or file  # the one before, where none is given
        named.append((file, test))
    assert len(named) > 20
    missing = [one for one in named if f"def {one[1]}(" not in (HERE / one[0]).read_text()]
    assert not missing

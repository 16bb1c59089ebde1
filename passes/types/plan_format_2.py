"""Plans of format 2, of version 0.1: a decision is one name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from passes.types.decision import Decision


def of_format_2(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a plan of format 2 as that of format 3.

    Raises:
        ValueError: for a decision that does not exist.
    """
    rows = data.get("parameters")
    if not isinstance(rows, list | tuple):
        return dict(data)  # the caller names the field
    return {**data, "parameters": [_row(row) for row in rows]}


def _row(row: Any) -> Any:
    if not isinstance(row, dict) or "decision" not in row:
        return row
    decision = Decision.named(row["decision"])
    return {**row, "decision": {**dataclasses.asdict(decision), "scope": decision.scope.value}}

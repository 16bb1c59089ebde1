"""Plans of format 2, of version 0.1: a decision is one name, a stage is called leg."""

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
    found = dict(data)
    rows, order = data.get("parameters"), data.get("order")
    if isinstance(rows, list | tuple):  # else the caller names the field
        found["parameters"] = [_row(row) for row in rows]
    if isinstance(order, dict):
        found["order"] = {
            graph: [_collective(one) for one in collectives] for graph, collectives in order.items()
        }
    return found


def _collective(data: Any) -> Any:
    if not isinstance(data, dict) or "leg" not in data:
        return data
    return {name if name != "leg" else "stage": value for name, value in data.items()}


def _row(row: Any) -> Any:
    if not isinstance(row, dict) or "decision" not in row:
        return row
    decision = Decision.named(row["decision"])
    return {**row, "decision": {**dataclasses.asdict(decision), "scope": decision.scope.value}}

"""What a benchmark ends with: its claims, each with whether it holds here, and a record as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console


def conclude(
    console: Console, claims: Mapping[str, bool], record: dict[str, Any], out: Path
) -> None:
    """Print the claims and write the record; the process ends with 1 if one does not hold."""
    for claim, holds in claims.items():
        console.print(("[green]yes[/green] " if holds else "[red]no[/red]  ") + claim)
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"torch": torch.__version__, **record, "claims": dict(claims)}, indent=1)
    out.write_text(text + "\n")
    if not all(claims.values()):
        sys.exit(1)

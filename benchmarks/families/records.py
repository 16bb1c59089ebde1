"""One run's outcome, as a line of JSON, and the file of all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ran", "refused", "failed", "hung"]

_ERROR_CHARACTERS = 6000


@dataclasses.dataclass(frozen=True)
class Record:
    """A family trained one way.

    ``refused``: a message of this package stopped it. ``ranks``: figures of each rank where it
    ran. ``error``: the end of what went wrong.
    """

    family: str
    package: str
    way: str
    outcome: Outcome
    seconds: float
    ranks: Sequence[dict[str, Any]] = ()
    error: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    revision: str = ""

    def append_to(self, path: Path) -> None:
        """Add a line; appending is atomic, so jobs may share the file."""
        record = dataclasses.asdict(self) | {"error": self.error[-_ERROR_CHARACTERS:]}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def of_family(runs: Mapping[tuple[str, str], Record], family: str) -> dict[str, Record]:
    """One family's records by way."""
    return {way: record for (name, way), record in runs.items() if name == family}


def read(path: Path) -> dict[tuple[str, str], Record]:
    """The latest record of each family and way."""
    if not path.exists():
        return {}
    records = [Record(**json.loads(line)) for line in path.read_text().splitlines() if line]
    return {(record.family, record.way): record for record in records}

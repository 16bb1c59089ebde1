"""Run families in all ways, each in fresh processes, and keep a record of each run."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.families import records
from benchmarks.families.catalogue import find_family
from benchmarks.families.rank import run, versions
from benchmarks.families.records import Outcome, Record
from benchmarks.families.trial import Family
from benchmarks.families.verdict import ROUNDINGS, differs_from_ddp
from tests.ranks import RankFailed, Ranks

#: How every family is trained.
WAYS = ("ddp", "osdp", "limit")
#: And how if one of the two others fails: whether torch can compile the model at all.
TRIAGE = "inductor"
RANKS = 2

_ROOT = Path(__file__).resolve().parent.parent.parent
_ENVIRONMENT = {
    "OSDP_DEBUG": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Where a sweep keeps what, and how long a run may take.

    ``cache``: of Inductor's compiled kernels, shared by all runs. ``ways``: a first look may
    leave some out.
    """

    results: Path
    cache: Path
    timeout_seconds: float
    ways: Sequence[str] = WAYS

    def run(self, families: Sequence[Family], again: bool = False) -> Iterator[Record]:
        """Run what has no record yet (``again``: all), and yield each record once it is kept."""
        for family in families:
            for way in (*self.ways, TRIAGE, *ROUNDINGS):
                known = {} if again else records.read(self.results)
                if (family.name, way) in known:
                    continue
                if way == TRIAGE and not self._failed(family):
                    continue
                if way in ROUNDINGS and not differs_from_ddp(family, self._kept(family)):
                    continue
                record = self._run(family, way)
                record.append_to(self.results)
                yield record

    def _failed(self, family: Family) -> bool:
        own = self._kept(family)
        return not all(own[way].outcome == "ran" for way in WAYS if way in own)

    def _kept(self, family: Family) -> dict[str, Record]:
        return records.of_family(records.read(self.results), family.name)

    def _run(self, family: Family, way: str) -> Record:
        begin = time.monotonic()
        outcome: Outcome = "ran"
        figures, error = [], ""
        ranks = Ranks(RANKS, self.cache, "benchmarks.families.imported", _ENVIRONMENT)
        try:
            with ranks:
                figures = ranks.run(run, family.name, way, timeout_seconds=self.timeout_seconds)
        except RankFailed as failure:
            error = str(failure)
            outcome = _outcome_of(error)
        return Record(
            family=family.name,
            package=family.package,
            way=way,
            outcome=outcome,
            seconds=round(time.monotonic() - begin, 1),
            ranks=figures,
            error=error,
            versions=versions(),
            revision=revision(),
        )


def _outcome_of(error: str) -> Outcome:
    """What stopped the ranks: a message of this package, another exception, or nothing."""
    if "no answer after" in error.split("\n---")[0] or "\nno answer after" in error:
        return "hung"
    raised = [line for line in error.splitlines() if line.startswith("osdp_compile.errors.")]
    return "refused" if raised else "failed"


def revision() -> str:
    """The commit that is checked out, with a + if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=_ROOT, capture_output=True, text=True
    )
    return described.stdout.strip()


def share_of(families: Sequence[Family], number: int, jobs: int) -> list[Family]:
    """Every ``jobs``-th family, from ``number`` on."""
    return [find_family(family.name) for family in families[number::jobs]]

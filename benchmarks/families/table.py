"""The table of families, for a terminal and for docs/families.md.

A sweep takes hours. A row of the document stays until its family has run again, so that the table
grows over several sweeps; each row names the commit that it was run at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.families.catalogue import FAMILIES
from benchmarks.families.records import Record, of_family
from benchmarks.families.trial import STEPS
from benchmarks.families.verdict import (
    LOW_PRECISION_TOLERANCE,
    TOLERANCE,
    Verdict,
    counted,
    judge,
)

_HEAD = """# Families of models

Made by `python -m benchmarks.families`; do not edit. {summary}.

Tiny configurations with random weights, trained {steps} steps of AdamW with clipped gradients on
2 ranks (gloo, CPU), three ways, each in fresh processes:

* *DDP*: `DistributedDataParallel` in eager mode, the reference;
* *no limit*: `torch.compile(model, backend="osdp")`;
* *1.1 x least*: the same with a memory limit of 1.1 times the least one, which the error for a
  limit that is too low names.

*difference*: the largest relative difference to DDP of any loss or gradient norm, of every rank and
step, both ways. At most {tolerance:.0e} counts as equal ({low:.0e} under autocast to bfloat16):
compiled kernels add in another order than eager ones, and training multiplies the rounding. A
family that is farther away trains with DDP twice more, with weights changed by 1e-7 of themselves
and with Inductor's kernels, and may be three times as far from DDP as these runs are.
*peak*: the most tensor bytes alive on a rank since before the model was built, measured by
`osdp_compile.PeakMemory`, as a share of the limit. A family *warns* that trains like DDP and is
above its limit by what its first call does not show, where a warning says how much, and the cause.
*plan*: parameters by decision under the limit.

{how}

{versions}

"""
_HOW = """How families are chosen: from the packages' own lists and not by their outcome.
transformers: every 16th of the causal language models in alphabetical order, every 9th masked one,
every 7th sequence-to-sequence one that reads text alone, every 8th image classifier and detector,
every 5th segmenter and speech recogniser. timm: every 11th module, its smallest model. diffusers
and PEFT: see `benchmarks/families/diffusers_models.py` and `peft_models.py`. Then those that many
people train, those that were tried on earlier code, and those written by hand. One that a package
cannot build here (DiNAT needs natten) gives way to the next in its list."""


def judged(runs: Mapping[tuple[str, str], Record]) -> list[Verdict]:
    """A verdict for every family of which there is a run, in the catalogue's order."""
    found = []
    for family in FAMILIES:
        own = of_family(runs, family.name)
        if own:
            found.append(judge(family, own))
    return found


def rows(
    verdicts: Sequence[Verdict], runs: Mapping[tuple[str, str], Record]
) -> list[tuple[str, ...]]:
    """Cells as text."""
    return [
        (
            verdict.family.name,
            verdict.family.package,
            verdict.kind,
            f"{verdict.parameters / 1e6:.2f} M" if verdict.parameters else "",
            "" if math.isnan(verdict.difference) else f"{verdict.difference:.0e}",
            "" if math.isnan(verdict.peak_of_limit) else f"{verdict.peak_of_limit:.2f}",
            ", ".join(f"{count} {kind}" for kind, count in verdict.decisions.items()),
            verdict.reason,
            _revisions(verdict, runs),
        )
        for verdict in verdicts
    ]


def _revisions(verdict: Verdict, runs: Mapping[tuple[str, str], Record]) -> str:
    """The commits at which osdp ran the family."""
    own = of_family(runs, verdict.family.name)
    return ", ".join(sorted({own[way].revision for way in ("osdp", "limit") if way in own}))


HEADER = ("family", "package", "", "parameters", "difference", "peak", "plan", "reason", "commit")
#: Place of the kind in a row.
_KIND = 2


def write(path: Path, runs: Mapping[tuple[str, str], Record]) -> None:
    """Write the document; rows of families without a complete run here stay as they are."""
    known = _known(path)
    found = {row[0]: row for row in rows(judged(runs), runs)}
    complete = {name: row for name, row in found.items() if row[_KIND] != "not run"}
    shown = {**found, **known, **complete}
    ordered = [shown[family.name] for family in FAMILIES if family.name in shown]
    kinds = counted([row[_KIND] for row in ordered])
    head = _HEAD.format(
        summary=f"{len(ordered)} families: {kinds}{_missing(len(ordered))}",
        steps=STEPS,
        tolerance=TOLERANCE,
        low=LOW_PRECISION_TOLERANCE,
        how=_HOW,
        versions=_versions(runs),
    )
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for row in ordered:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    path.write_text(head + "\n".join(lines) + "\n")


def _known(path: Path) -> dict[str, tuple[str, ...]]:
    """The document's rows by family, before it is written again."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    found = {}
    for line in lines[1:]:
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        cells += [""] * (len(HEADER) - len(cells))
        found[cells[0]] = tuple(cells)
    return found


def _missing(shown: int) -> str:
    """How many families have no row."""
    missing = len(FAMILIES) - shown
    return f"; {missing} more of the catalogue have not run yet" if missing else ""


def _versions(runs: Mapping[tuple[str, str], Record]) -> str:
    """Versions of the packages in the latest runs; several of one mean that the sweep was mixed."""
    found: dict[str, set[str]] = {}
    for record in runs.values():
        for package, version in record.versions.items():
            found.setdefault(package, set()).add(version)
    named = [f"{package} {' and '.join(sorted(seen))}" for package, seen in found.items()]
    return "Versions of the latest runs: " + ", ".join(named) + "."

"""What the runs of a family say: works, warns, refused, or fails, and why."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from benchmarks.families.records import Record
from benchmarks.families.trial import WEIGHT_ROUNDING, Family

#: How far a loss or a gradient norm may be from DDP's, relative to it. Compiled kernels sum in
#: another order than eager ones: a relative 1e-6 in the first step, which training multiplies.
TOLERANCE = 2e-3
#: In bfloat16, whose numbers have 8 bits: eager mode rounds what a compiled kernel keeps.
LOW_PRECISION_TOLERANCE = 3e-2
#: A family that multiplies rounding errors may be this many times as far from DDP as DDP is from
#: itself where its weights or its sums are rounded otherwise.
OF_ROUNDING = 3.0
#: Ways to train with DDP that round otherwise.
ROUNDINGS = {
    "rounding": f"DDP with weights that differ by {WEIGHT_ROUNDING:.0e}",
    "compiled": "DDP with Inductor's kernels",
}
#: Differences of figures below this size are rounding of zero.
SMALLEST = 1e-4

Kind = Literal["works", "warns", "refused", "fails", "not run"]

#: A warning that gives a step's bytes, the limit, and the cause.
_CAUSE = re.compile(r"above memory_limit=.*(beside the|in the place of)")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A row of the table.

    ``difference``: the largest relative one, of losses and gradient norms of all ranks and steps,
    to DDP. ``peak_of_limit``: the highest rank's measured peak over the limit.
    """

    family: Family
    kind: Kind
    reason: str = ""
    difference: float = math.nan
    peak_of_limit: float = math.nan
    parameters: int = 0
    decisions: Mapping[str, int] = dataclasses.field(default_factory=dict)


def judge(family: Family, runs: Mapping[str, Record]) -> Verdict:
    """Compare the runs of one family."""
    missing = [way for way in ("ddp", "osdp", "limit") if way not in runs]
    if missing:
        return Verdict(family, "not run", "no run of " + ", ".join(missing))
    ddp = runs["ddp"]
    if ddp.outcome != "ran":
        return Verdict(family, "fails", f"the reference (DDP): {last_line(ddp.error)}")
    for way in ("osdp", "limit"):
        if runs[way].outcome != "ran":
            return _stopped(family, runs, way)
    figures = runs["limit"].ranks
    tolerance = _tolerance(family)
    differences = {way: difference(ddp, runs[way]) for way in ("osdp", "limit")}
    said = ""
    roundings = {
        way: difference(ddp, runs[way])
        for way in ROUNDINGS
        if way in runs and runs[way].outcome == "ran" and _starts_alike(family, ddp, runs[way])
    }
    if roundings:
        way = max(roundings, key=roundings.__getitem__)
        tolerance = max(tolerance, OF_ROUNDING * roundings[way])
        said = f"{ROUNDINGS[way]} is {roundings[way]:.0e} from DDP"
    peak_of_limit = max(rank["peak_bytes"] / rank["limit_bytes"] for rank in figures)
    wrong = []
    for way, found in differences.items():
        if not found <= tolerance:
            wrong.append(f"{way}: {found:.1e} from DDP")
    if not _gone_down(runs["osdp"]):
        wrong.append("osdp: nothing is planned")
    warnings = [line for rank in figures for line in rank.get("log", ()) if _CAUSE.search(line)]
    if peak_of_limit > 1 and not warnings:
        wrong.append(f"peak {peak_of_limit:.2f} x the limit")
    is_above = peak_of_limit > 1 and not wrong
    return Verdict(
        family,
        "fails" if wrong else "warns" if is_above else "works",
        warnings[0] if is_above else "; ".join(wrong) or said,
        max(differences.values()),
        peak_of_limit,
        figures[0]["parameters"],
        figures[0].get("decisions", {}),
    )


def _tolerance(family: Family) -> float:
    return LOW_PRECISION_TOLERANCE if "autocast" in family.name else TOLERANCE


def differs_from_ddp(family: Family, runs: Mapping[str, Record]) -> bool:
    """Whether a run with osdp trains otherwise than DDP, by more than the tolerance."""
    ran = {way: record for way, record in runs.items() if record.outcome == "ran"}
    return "ddp" in ran and any(
        not difference(ran["ddp"], ran[way]) <= _tolerance(family)
        for way in ("osdp", "limit")
        if way in ran
    )


def _gone_down(record: Record) -> bool:
    return all(rank.get("decisions") for rank in record.ranks)


def _stopped(family: Family, runs: Mapping[str, Record], way: str) -> Verdict:
    record = runs[way]
    line = last_line(record.error)
    if record.outcome == "hung":
        where = stack_of_hang(record.error)
        return Verdict(family, "fails", f"{way}: hang after {record.seconds:.0f} s{where}")
    if family.refused is not None and re.search(family.refused, record.error):
        if record.outcome == "refused":
            return Verdict(family, "refused", line)
        return Verdict(family, "fails", f"{way}: not refused by a message of its own: {line}")
    triage = runs.get("inductor")
    torch_too = "; torch.compile alone fails too" if triage and triage.outcome != "ran" else ""
    return Verdict(family, "fails", f"{way}: {line}{torch_too}")


def _starts_alike(family: Family, ddp: Record, record: Record) -> bool:
    """Whether a run's first step is DDP's: rounding alone makes no larger difference there.

    An infinite figure of a later step is no rounding either.
    """
    is_finite = math.isfinite(difference(ddp, record))
    return is_finite and difference(ddp, record, steps=1) <= _tolerance(family)


def difference(reference: Record, record: Record, steps: int | None = None) -> float:
    """The largest relative difference of losses and gradient norms, over ranks and steps.

    ``steps``: the number of steps that count; None: all.
    """
    found = 0.0
    for expected, seen in zip(reference.ranks, record.ranks, strict=True):
        for what in ("losses", "norms"):
            for one, other in zip(expected[what][:steps], seen[what][:steps], strict=True):
                if not (math.isfinite(one) and math.isfinite(other)):
                    return math.inf
                found = max(found, abs(one - other) / max(abs(one), SMALLEST))
    return found


def stack_of_hang(error: str, frames: int = 3) -> str:
    """Where the first rank that hangs is, innermost frame first."""
    found = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', error.partition(" hangs:")[2])
    shown = [f"{Path(file).name}:{line} {function}" for file, line, function in found[:frames]]
    return " at " + " < ".join(shown) if shown else ""


def last_line(error: str) -> str:
    """The exception's first line: the last line that starts one, or the last of all."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|\w+): ", line)]
    shown = [line for line in raised if not line.startswith("tests.ranks")]
    return (shown or lines or [""])[-1][:300]


def counted(kinds: Sequence[str]) -> str:
    """Counts by kind, as text."""
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in get_args(Kind))

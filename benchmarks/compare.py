"""osdp beside the other ways to train, in one run: step time, measured peak, losses.

    sudo python -m benchmarks.compare                # 2 hosts, 400 Mbit/s, GPT of 13.7 M parameters
    sudo python -m benchmarks.compare --hosts 4 --layers 2 --width 1024 --batch 2 --repeats 3

Each way trains in fresh processes, one rank and one thread a host. First every way's peak
is measured, then every way's steps are timed, round after round, so that what else the
machine does hits all alike: quote ratios. osdp trains twice: without a limit, and with
FSDP2's peak, just measured, as its limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.hosts import Hosts, HostsError
from benchmarks.launch import measure_on
from benchmarks.train import Work
from passes.units import format_bytes

FREE = "osdp, no limit"
LIMITED = "osdp, FSDP2's peak as limit"
#: Ways in the order they run, with the name that benchmarks.peers has for them.
ROWS = {
    "alone": "alone",
    "DDP": "DDP",
    "DDP + compile": "DDP + compile",
    "FSDP2": "FSDP2",
    "FSDP2 + compile": "FSDP2 + compile",
    "SimpleFSDP + compile": "SimpleFSDP + compile",
    FREE: "osdp",
    LIMITED: "osdp",
}
#: How far a loss may be from DDP's: rounding, grown over the steps.
LOSS_TOLERANCE = 1e-4


@dataclasses.dataclass
class Row:
    """What was measured of one way. ``step_seconds``: one median a round, of the slowest rank."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    decisions: dict[str, int] = dataclasses.field(default_factory=dict)
    predicted: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(self.step_seconds)


def run(hosts: Hosts, work: Work, names: list[str], repeats: int, console: Console) -> list[Row]:
    """Measure every way. A way that fails is told, and the others go on."""
    rows = {name: Row(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="osdp-bench-cache") as folder:
        cache = Path(folder)
        for phase, round_ in [("memory", 0), *(("time", i) for i in range(repeats))]:
            for name, row in rows.items():
                if row.failed:
                    continue
                console.print(f"[dim]{phase} {round_ + 1}: {name}[/dim]")
                if name == LIMITED:
                    row.options = {"memory_limit": rows["FSDP2"].peak_bytes}
                try:
                    got = measure_on(hosts, work, ROWS[name], phase, row.options, cache)
                except HostsError as error:
                    row.failed = str(error)
                    console.print(row.failed, style="red", markup=False, soft_wrap=True)
                    continue
                _note(row, got, phase)
    return list(rows.values())


def _note(row: Row, got: dict[str, Any], phase: str) -> None:
    if phase == "memory":
        row.peak_bytes = got["peak_bytes"]
    else:
        row.step_seconds.append(got["step_seconds"])
        row.losses = got["losses"]
    predicted = got.get("predicted", {})
    if phase == "memory":  # every run measures the network and plans by itself
        row.decisions, row.predicted = got.get("decisions", {}), predicted
    elif predicted:
        row.predicted["step_seconds"] = predicted["step_seconds"]


def _ratio(rows: dict[str, Row], row: Row, base: str) -> float | None:
    """How much faster than another way: the median of the rounds' own ratios."""
    other = rows.get(base)
    if other is None or other.failed or row.failed:
        return None
    pairs = zip(other.step_seconds, row.step_seconds, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def loss_difference(rows: dict[str, Row], row: Row) -> float | None:
    """The largest distance of a loss from DDP's at the same step; None for training alone."""
    base = rows.get("DDP")
    if base is None or base.failed or row.failed or row.name == "alone":
        return None
    return max(abs(a - b) for a, b in zip(row.losses, base.losses, strict=True))


def table(rows: list[Row], title: str) -> Table:
    """For people."""
    by_name = {row.name: row for row in rows}
    made = Table(title=title)
    made.add_column("how")
    for head in ("step s", "peak", "x DDP", "x FSDP2", "losses off DDP's", "predicted"):
        made.add_column(head, justify="right")
    made.add_column("decisions")
    for row in rows:
        if row.failed:
            made.add_row(row.name, "failed")
            continue
        against = [_ratio(by_name, row, base) for base in ("DDP", "FSDP2")]
        difference = loss_difference(by_name, row)
        wrong = difference is not None and difference > LOSS_TOLERANCE
        made.add_row(
            row.name,
            f"{row.seconds:.2f}",
            format_bytes(row.peak_bytes),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in against),
            "" if difference is None else f"{difference:.1e}" + (" WRONG" if wrong else ""),
            f"{row.predicted['step_seconds']:.2f} s, {format_bytes(row.predicted['peak_bytes'])}"
            if row.predicted
            else "",
            ", ".join(f"{count} {kind}" for kind, count in row.decisions.items()),
        )
    return made


def claims(rows: list[Row]) -> dict[str, bool]:
    """What the project promises of this comparison, and whether it holds here."""
    by_name = {row.name: row for row in rows}
    found: dict[str, bool] = {}
    free, limited = by_name.get(FREE), by_name.get(LIMITED)
    if limited is not None:
        faster = _ratio(by_name, limited, "FSDP2")
        found["at FSDP2's peak, 1.3 times as fast as FSDP2"] = faster is not None and faster >= 1.3
        found["at FSDP2's peak, the measured peak is under it"] = (
            not limited.failed and limited.peak_bytes <= limited.options["memory_limit"]
        )
    if free is not None:
        faster = _ratio(by_name, free, "DDP")
        found["with no limit, no slower than DDP"] = faster is not None and faster >= 1.0
    differences = [loss_difference(by_name, row) for row in rows]
    found["every loss is DDP's"] = not any(row.failed for row in rows) and all(
        d <= LOSS_TOLERANCE for d in differences if d is not None
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="400mbit", help="what each host may send")
    for field in dataclasses.fields(Work):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=field.default, dest=field.name)
    parser.add_argument("--repeats", type=int, default=1, help="rounds of timing")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="these ways only")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    given = parser.parse_args()
    names = given.only or list(ROWS)
    if LIMITED in names and "FSDP2" not in names:
        parser.error(f"{LIMITED!r} needs 'FSDP2' too")
    work = Work(**{f.name: getattr(given, f.name) for f in dataclasses.fields(Work)})
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    try:
        with Hosts(given.hosts, given.rate) as hosts:
            rows = run(hosts, work, names, given.repeats, console)
    except HostsError as error:
        sys.exit(str(error))
    parameters = sum(p.numel() for p in work.model().parameters())
    title = (
        f"GPT, {parameters / 1e6:.1f} M parameters, batch {work.batch} x {work.context} a rank, "
        f"{given.hosts} hosts at {given.rate}, torch {torch.__version__}"
    )
    console.print(table(rows, title))
    held = claims(rows)
    for claim, holds in held.items():
        console.print(("[green]yes[/green] " if holds else "[red]no[/red]  ") + claim)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "title": title,
        "hosts": given.hosts,
        "rate": given.rate,
        "work": dataclasses.asdict(work),
        "rows": [dataclasses.asdict(row) for row in rows],
        "claims": held,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"[dim]saved {given.out}[/dim]")
    if any(row.failed for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()

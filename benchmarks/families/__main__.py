"""The command: ``python -m benchmarks.families``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import benchmarks.families
from benchmarks.families import records, table
from benchmarks.families.catalogue import FAMILIES, find_family, is_installed
from benchmarks.families.records import Record
from benchmarks.families.runner import WAYS, Sweep, share_of
from benchmarks.families.trial import Family
from benchmarks.families.verdict import counted, last_line

_DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "families.md"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    families = [find_family(name) for name in given.family] or [
        f for f in FAMILIES if given.package in (None, f.package)
    ]
    if given.list:
        print("\n".join(f"{family.package}: {family.name}" for family in families))
        return 0
    left_out = [family for family in families if not is_installed(family)]
    for package in sorted({family.package for family in left_out}):
        print(f"{package} is not installed: its families are left out", file=sys.stderr)
    families = [family for family in families if family not in left_out]
    given.folder.mkdir(parents=True, exist_ok=True)
    results = given.folder / "results.jsonl"
    sweep = Sweep(results, given.folder / "inductor", given.timeout, given.ways.split(","))
    if given.share:
        number, jobs = map(int, given.share.split("/"))
        _run(sweep, share_of(families, number, jobs), given.again)
        return 0
    if not given.report:
        if given.jobs > 1:
            _run_in_jobs(arguments if arguments is not None else sys.argv[1:], given.jobs)
        else:
            _run(sweep, families, given.again)
    runs = records.read(results)
    _print(runs, families)
    if given.out is not None:
        table.write(given.out, runs)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families",
        description=benchmarks.families.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # Not "--only": Inductor reads an option of this name, and writes its value into its code.
    add("--family", action="append", default=[], metavar="NAME", help="this one; may be repeated")
    add("--package", help="families of this package, as transformers or 'by hand'")
    add("--jobs", type=int, default=1, help="families at a time, each with two processes")
    add("--ways", default=",".join(WAYS), help="ways to train, for a first look (default: all)")
    add("--timeout", type=float, default=300.0, help="seconds of a run, after which it hangs")
    add("--folder", type=Path, default=Path("families-out"), help="results and compiled kernels")
    add("--again", action="store_true", help="run what has a record too")
    add("--report", action="store_true", help="run nothing, only show and write the table")
    add("--list", action="store_true", help="show the families' names")
    add("--out", type=Path, default=_DOCUMENT, help="where the table is written")
    add("--share", help=argparse.SUPPRESS)
    return parser


def _run(sweep: Sweep, families: Sequence[Family], again: bool) -> None:
    for record in sweep.run(families, again):
        said = "" if record.outcome == "ran" else ": " + last_line(record.error)
        line = f"{record.family}, {record.way}: {record.outcome} in {record.seconds:.0f} s{said}"
        print(line, flush=True)


def _run_in_jobs(arguments: Sequence[str], jobs: int) -> None:
    """Each job is this command with its share of the families."""
    command = [sys.executable, "-m", "benchmarks.families", *arguments]
    running = [
        subprocess.Popen([*command, "--share", f"{number}/{jobs}"]) for number in range(jobs)
    ]
    try:
        for job in running:
            job.wait()
    finally:
        for job in running:
            job.terminate()


def _print(runs: dict[tuple[str, str], Record], families: Sequence[Family]) -> None:
    names = {family.name for family in families}
    verdicts = [verdict for verdict in table.judged(runs) if verdict.family.name in names]
    shown = Table(*table.HEADER)
    for row in table.rows(verdicts, runs):
        shown.add_row(*map(escape, row))
    Console().print(shown)
    print(f"{len(verdicts)} families: {counted([verdict.kind for verdict in verdicts])}")


if __name__ == "__main__":
    sys.exit(main())

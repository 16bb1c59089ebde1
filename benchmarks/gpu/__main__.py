"""The proof kit for GPUs: claims that are tested on CPUs, tested on this machine's GPUs.

    python -m benchmarks.gpu                # needs a GPU; at most eight minutes
    python -m benchmarks.gpu --dry          # the same code on CPUs, with tiny models

* ``tests``: the tests marked ``gpu``, two ranks over gloo and over NCCL;
* ``against DDP``: losses of a GPT, with and without a memory limit, beside DDP's;
* ``overlap``: the share of NCCL's time in which other kernels run;
* ``predictions``: a Llama under plans of eight ranks: peaks and kernels, predicted and measured;
* ``peers``: with two GPUs or more, ``benchmarks.compare`` over NCCL.

With one GPU two ranks share it. Writes ``gpu.json`` and prints a table; the exit status is 1 if
anything fails, or is not done in ``--minutes``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu import against_ddp, predictions
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.share import NCCL
from benchmarks.launch import environment, kept_code
from benchmarks.processes import Processes
from benchmarks.train import Work
from passes.types.units import format_bytes, format_seconds

#: What a measured peak may be of the predicted one, and a step's error.
BELOW, ABOVE, STEP_ERROR = 0.95, 1.02, 0.15
#: What the kit may take.
MINUTES = 8.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """``device``: ``cuda`` or ``cpu``. ``gpus``: on this machine. ``dry``: tiny models.

    ``workers``: number of tests that run at once. ``profiles``: folder of measured profiles for all
    parts; None: each part measures. ``deadline``: the end of all parts.
    """

    device: str
    gpus: int
    dry: bool
    workers: int
    profiles: Path | None
    deadline: Deadline


@dataclasses.dataclass
class Check:
    """One line of the table. ``holds``: None: only told."""

    part: str
    what: str
    found: str
    holds: bool | None = None


def run_tests(setting: Setting, folder: Path) -> tuple[list[Check], Any]:
    """The tests marked ``gpu``, in several processes at once."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/end_to_end/test_gpu.py"),
        *("-p", "no:cacheprovider", "--no-header", "--timeout", "400"),
    ]
    if setting.dry:  # the tests themselves are in the suite
        command += ["-k", "profile"]
    if setting.workers > 1:
        command += ["--numprocesses", str(setting.workers)]
    done = setting.deadline.run(command, {"OSDP_TEST_DEVICE": setting.device})
    (folder / "tests.txt").write_text(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if line]
    checks = [Check("tests", "tests marked gpu", lines[-1] if lines else "", not done.returncode)]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return checks + [Check("tests", "", line[:150], False) for line in failed], lines[-1:]


def run_against_ddp(setting: Setting, folder: Path) -> tuple[list[Check], Any]:
    """Losses beside DDP's."""
    profiles, deadline = setting.profiles, setting.deadline
    checks, outcomes = [], against_ddp.measure(setting.device, setting.dry, deadline, profiles)
    for one in outcomes:
        limit = "" if one.limit_bytes is None else f", limit {format_bytes(one.limit_bytes)}"
        found = one.failed[-300:] or (
            f"losses off by {one.difference:.1e}, peak {format_bytes(one.peak_bytes)}{limit}"
        )
        checks.append(Check("against DDP", f"{one.way} over {one.backend}", found, one.holds))
    return checks, [dataclasses.asdict(one) for one in outcomes]


def run_overlap(setting: Setting, folder: Path) -> tuple[list[Check], Any]:
    """The share of NCCL's time in which other kernels run."""
    layers, width = (1, 64) if setting.dry else (8, 1024)
    work = Work(layers=layers, width=width, device=setting.device)
    out = folder / "overlap.json"
    backend = NCCL if setting.device == "cuda" else "gloo"
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.overlap", "--backend", backend),
        *("--work", json.dumps(dataclasses.asdict(work)), "--out", str(out)),
    ]
    with Processes(max(2, setting.gpus), backend) as ranks:
        variables = environment(kept_code(folder), setting.profiles)
        ranks.run(command, variables, setting.deadline.left_seconds())
    found = json.loads(out.read_text())
    sending, both = found["nccl_seconds"], found["both_seconds"]
    told = f"{format_seconds(both)} of {format_seconds(sending)} of NCCL's kernels beside others"
    holds = None if setting.device == "cpu" else both > 0
    return [Check("overlap", "a step, all sharded", told, holds)], found


def run_predictions(setting: Setting, folder: Path) -> tuple[list[Check], Any]:
    """Predicted against measured peaks and steps of a Llama."""
    checks = []
    rows, late = predictions.measure(setting.device, setting.dry, setting.deadline, folder)
    for row in rows:
        share = row["measured_bytes"] / row["predicted_bytes"]
        error = row["predicted_seconds"] / row["measured_seconds"] - 1
        limit_bytes = row["limit_bytes"]
        kept = limit_bytes is None or row["measured_bytes"] <= limit_bytes
        peak = (
            f"peak {format_bytes(row['measured_bytes'])}, predicted "
            f"{format_bytes(row['predicted_bytes'])} ({share:.3f} of it)"
        )
        checks.append(Check("predictions", row["plan"], peak, BELOW <= share <= ABOVE and kept))
        step = (
            f"step {format_seconds(row['measured_seconds'])}, predicted "
            f"{format_seconds(row['predicted_seconds'])} ({error:+.0%})"
        )
        checks.append(Check("predictions", row["plan"], step))
        if row["kernels_seconds"] is not None:
            error = row["predicted_kernels_seconds"] / row["kernels_seconds"] - 1
            holds = abs(error) <= STEP_ERROR
            kernels = (
                f"kernels {format_seconds(row['kernels_seconds'])}, predicted "
                f"{format_seconds(row['predicted_kernels_seconds'])} ({error:+.0%})"
            )
            checks.append(Check("predictions", row["plan"], kernels, holds))
    checks += [Check("predictions", plan, why, False) for plan, why in late.items()]
    return checks, rows


def run_peers(setting: Setting, folder: Path) -> tuple[list[Check], Any]:
    """``benchmarks.compare`` on this machine's ranks."""
    if setting.gpus < 2 and not setting.dry:
        return [Check("peers", "benchmarks.compare", "needs two GPUs: not run")], None
    out = folder / "compare.json"
    command = [
        *(sys.executable, "-m", "benchmarks.compare", "--local", str(max(2, setting.gpus))),
        *("--out", str(out)),
    ]
    if setting.dry:
        command += ["--layers", "1", "--width", "64", "--timed-steps", "2"]
        command += ["--only", "DDP"]  # osdp trains by the same code in "against DDP"
    else:
        command += ["--layers", "12", "--width", "2048", "--batch", "8", "--context", "1024"]
    done = setting.deadline.run(command)
    (folder / "compare.txt").write_text(done.stdout + done.stderr)
    if not out.exists():
        return [Check("peers", "benchmarks.compare", done.stderr[-300:], False)], None
    record = json.loads(out.read_text())
    checks = [
        Check("peers", row["name"], row["failed"][-300:], not row["failed"])
        for row in record["rows"]
    ]
    checks += [Check("peers", what, "", holds) for what, holds in record["claims"].items()]
    return checks, record


PARTS: dict[str, Callable[[Setting, Path], tuple[list[Check], Any]]] = {
    "tests": run_tests,
    "against DDP": run_against_ddp,
    "overlap": run_overlap,
    "predictions": run_predictions,
    "peers": run_peers,
}


def table(checks: list[Check], title: str) -> Table:
    """For people."""
    made = Table(title=title)
    for head in ("part", "what", "found", "holds"):
        made.add_column(head)
    words = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
    for one in checks:
        made.add_row(one.part, one.what, escape(one.found), words[one.holds])
    return made


def run_parts(
    setting: Setting, parts: list[str], record: dict[str, Any], out: Path, console: Console
) -> list[Check]:
    """Run the parts one after the other; write the record after each."""
    checks: list[Check] = []
    for part in parts:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="osdp-gpu") as folder:
            try:
                found, record[part] = PARTS[part](setting, Path(folder))
            except RuntimeError as error:
                found, record[part] = [Check(part, "", str(error)[-1500:], False)], None
            for text in Path(folder).glob("*.txt"):
                record[text.stem + " output"] = text.read_text()[-20000:]
        record["seconds"][part] = time.perf_counter() - begin
        checks += found
        console.print(table(found, f"{part}, {record['seconds'][part]:.0f} s"))
        record["checks"] = [dataclasses.asdict(one) for one in checks]
        out.write_text(json.dumps(record, indent=1) + "\n")
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on CPUs, with tiny models")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--workers",
        type=int,
        help="tests that run at once; by default one for three cores, up to 5",
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"what is not done then fails ({MINUTES:g})"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    given = parser.parse_args()
    gpus = 0 if given.dry else torch.cuda.device_count()
    if not gpus and not given.dry:
        parser.error("this machine has no GPU that torch sees; --dry runs the kit on CPUs")
    console = Console(width=None if sys.stdout.isatty() else 160)
    record: dict[str, Any] = {"torch": torch.__version__, "gpus": gpus, "seconds": {}}
    if gpus:
        record["gpu"] = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory(prefix="osdp-gpu") as folder:
        profiles = Path(folder) if given.dry else None
        device = "cuda" if gpus else "cpu"
        cores = 1 if given.dry else os.cpu_count() or 1
        workers = given.workers or max(1, min(5, cores // 3))
        deadline = Deadline(60 * given.minutes)
        setting = Setting(device, gpus, given.dry, workers, profiles, deadline)
        checks = run_parts(setting, given.only, record, given.out, console)
    title = f"{record.get('gpu', 'no GPU: a dry run')}, torch {torch.__version__}"
    console.print(table(checks, title))
    console.print(f"[dim]saved {given.out}[/dim]")
    if any(one.holds is False for one in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()

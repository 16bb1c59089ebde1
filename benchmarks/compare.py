"""osdp beside the other ways to train, in one run: step time, measured peak, losses.

    sudo python -m benchmarks.compare                      # GPT of 13.7 M parameters, 400 Mbit/s
    sudo python -m benchmarks.compare --setting wide       # 27.4 M parameters on 4 hosts
    sudo python -m benchmarks.compare --setting unlimited  # as much network as can be used
    sudo python -m benchmarks.compare --setting layer      # one wide MLP, few tokens
    sudo python -m benchmarks.compare --setting llama      # Hugging Face's; or conv
    sudo python -m benchmarks.compare --limits 8 --only    # osdp over a range of memory limits
    sudo python -m benchmarks.compare --setting words      # 128k words; or tables: a DLRM
    python -m benchmarks.compare --local 8                 # on 8 GPUs of this machine, with NCCL

Each way trains in fresh processes, one rank and one thread a host. First every way's peak
is measured, then every way's steps are timed, round after round (``--repeats``), so that what
else the machine does hits all alike: quote ratios. osdp trains without a limit, with FSDP2's
peak, just measured, as its limit, and with limits from the least that is feasible up.

*Waiting* is what a step takes above the same without communication. The *bound* is the larger
of that and of the least bytes on the wire over the rate (``benchmarks/least_bytes.py``), whether
weights or activations move.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.share import NCCL
from benchmarks.hosts import Hosts
from benchmarks.launch import kept_code, measure_on
from benchmarks.least_bytes import least_bytes
from benchmarks.processes import Processes, RanksError
from benchmarks.train import Work
from osdp_compile.calibration.calibrate import matmul_rate
from passes.types.units import format_bytes

FREE = "osdp, no limit"
LIMITED = "osdp, FSDP2's peak as limit"
MOVES = "osdp, activations may move"
MOVES_LIMITED = "osdp, activations may move, FSDP2's peak as limit"
MOVES_BELOW = "osdp, activations may move, 80 % of FSDP2's peak as limit"
OVERLAP = "SimpleFSDP + overlap"
KEEP_OVERLAP = "SimpleFSDP keep + overlap"
ALONE = ("alone", "alone + compile")
#: Ways in the order they run, with the name that benchmarks.peers has for them.
ROWS = {
    "alone": "alone",
    "alone + compile": "alone + compile",
    "DDP": "DDP",
    "DDP + compile": "DDP + compile",
    "FSDP2": "FSDP2",
    "FSDP2 + compile": "FSDP2 + compile",
    "SimpleFSDP + compile": "SimpleFSDP + compile",
    OVERLAP: OVERLAP,
    KEEP_OVERLAP: KEEP_OVERLAP,
    FREE: "osdp",
    LIMITED: "osdp",
    MOVES: "osdp",
    MOVES_LIMITED: "osdp",
    MOVES_BELOW: "osdp",
}
#: Options of a way, beside its limit.
OPTIONS: dict[str, dict[str, Any]] = {
    MOVES: {"tensor_parallel": True},
    MOVES_LIMITED: {"tensor_parallel": True},
    MOVES_BELOW: {"tensor_parallel": True},
}
#: The limits that follow from FSDP2's measured peak: shares of it.
_OF_FSDP2 = {LIMITED: 1.0, MOVES_LIMITED: 1.0, MOVES_BELOW: 0.8}
#: How far a loss may be from DDP's: rounding, grown over the steps.
LOSS_TOLERANCE = 1e-4
#: How much slower a step may be measured at a higher limit: noise.
NO_SLOWER = 1.03
#: How long matrix products are timed for the ways that must be told their rate.
_RATE_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compared where, and what the project promises there.

    ``faster``: (row, other row, how many times as fast). ``bound``: how near osdp comes, without a
    limit and with weights that move, to the bound of weights that move; None: not promised.
    """

    hosts: int
    rate: str
    work: Work
    faster: tuple[tuple[str, str, float], ...]
    bound: float | None = None


SETTINGS = {
    "gpt": Setting(
        2,
        "400mbit",
        Work(),
        (
            (FREE, "DDP", 1.2),
            (LIMITED, "FSDP2", 2.2),
            (LIMITED, OVERLAP, 1.45),
            (LIMITED, KEEP_OVERLAP, 1.45),
            (MOVES, "DDP", 1.35),
            (MOVES_LIMITED, "FSDP2", 3.0),
        ),
        bound=1.15,
    ),
    "wide": Setting(
        4,
        "400mbit",
        Work(layers=2, width=1024, batch=2),
        (
            (LIMITED, "FSDP2", 1.8),
            (LIMITED, OVERLAP, 1.2),
            (LIMITED, KEEP_OVERLAP, 1.2),
            (MOVES, "DDP", 2.2),
            (MOVES, "FSDP2", 4.2),
            (MOVES_LIMITED, "FSDP2", 4.0),
            (MOVES_LIMITED, OVERLAP, 2.6),
        ),
    ),
    "unlimited": Setting(
        2,
        "10gbit",
        Work(),
        (
            (FREE, "DDP + compile", 1.0),
            (LIMITED, "FSDP2", 1.05),
            (LIMITED, "FSDP2 + compile", 1.0),
            (MOVES, FREE, 1.0),
        ),
    ),
    "layer": Setting(
        2,
        "400mbit",
        Work(task="wide layer"),
        ((MOVES, "DDP", 7.0), (MOVES, "FSDP2", 14.0), (MOVES_BELOW, "FSDP2", 10.0)),
    ),
    "words": Setting(2, "400mbit", Work(task="many words"), ((MOVES, "DDP", 6.0),)),
    "tables": Setting(2, "400mbit", Work(task="DLRM"), ((MOVES, "DDP", 5.0),)),
    "llama": Setting(2, "400mbit", Work(task="HF Llama"), ((MOVES, "DDP", 1.45),)),
    "conv": Setting(2, "400mbit", Work(task="conv net"), ()),
}


@dataclasses.dataclass
class Row:
    """What was measured of one way. ``step_seconds``: one median a round, of the slowest rank."""

    name: str
    way: str
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


def run(
    hosts: Processes, work: Work, names: list[str], limits: int, repeats: int, console: Console
) -> list[Row]:
    """Measure every way. A way that fails is told, and the others go on."""
    rows = {name: Row(name, ROWS[name], OPTIONS.get(name, {})) for name in names}
    with tempfile.TemporaryDirectory(prefix="osdp-bench-cache") as folder:
        cache = kept_code(Path(folder))
        # As users have it: measured once and kept.
        profiles = Path(folder) / "profiles" if limits else None
        for limit in _swept(hosts, work, limits, cache, profiles) if limits else ():
            name = f"osdp, limit {format_bytes(limit)}"
            rows[name] = Row(name, "osdp", {"memory_limit": limit})
        told_rates = [rows[name] for name in (OVERLAP, KEEP_OVERLAP) if name in rows]
        if told_rates and isinstance(hosts, Hosts):
            # Measured here, so that every rank is told the same.
            rates = {
                "bytes_per_second": hosts.bytes_per_second,
                "flops_per_second": _flops_per_second(),
            }
            for row in told_rates:
                row.options = rates
        for phase, round_ in [("memory", 0), *(("time", i) for i in range(repeats))]:
            for name, row in rows.items():
                if row.failed:
                    continue
                console.print(f"[dim]{phase} {round_ + 1}: {name}[/dim]")
                if name in _OF_FSDP2:
                    limit_bytes = round(_OF_FSDP2[name] * rows["FSDP2"].peak_bytes)
                    row.options = {**row.options, "memory_limit": limit_bytes}
                try:
                    got = measure_on(hosts, work, row.way, phase, row.options, cache, profiles)
                except RanksError as error:
                    row.failed = str(error)
                    console.print(row.failed, style="red", markup=False, soft_wrap=True)
                    continue
                _note(row, got, phase)
    return list(rows.values())


def _ranks(local: int | None, hosts: int, rate: str, device: str) -> Processes:
    """Hosts, or so many ranks of this machine."""
    if local is None:
        return Hosts(hosts, rate)
    return Processes(local, NCCL if device == "cuda" else "gloo")


def _swept(
    hosts: Processes, work: Work, count: int, cache: Path, profiles: Path | None
) -> list[int]:
    """Limits from the least that is feasible to what is used without one, evenly spaced."""

    def bytes_of(**options: Any) -> int:
        found = measure_on(hosts, work, "osdp", "least", options, cache, profiles)
        return int(found["least_bytes"])

    least, most = bytes_of(memory_limit="1KiB"), bytes_of()
    return [least + (most - least) * i // max(1, count - 1) for i in range(count)]


def _flops_per_second() -> float:
    """Of a matrix product on one thread, which is what a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return matmul_rate(torch.float32, torch.device("cpu"), _RATE_SECONDS)
    finally:
        torch.set_num_threads(threads)


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
    if base is None or base.failed or row.failed or row.way in ALONE:
        return None
    return max(abs(a - b) for a, b in zip(row.losses, base.losses, strict=True))


def alone_seconds(rows: list[Row]) -> float | None:
    """The quickest step without communication; None if none was measured."""
    times = [row.seconds for row in rows if row.way in ALONE and not row.failed]
    return min(times, default=None)


def bound_seconds(rows: list[Row], sending_seconds: float) -> float | None:
    """The least a step can take; None if what it takes alone was not measured."""
    alone = alone_seconds(rows)
    return None if alone is None else max(alone, sending_seconds)


def best_peer(rows: list[Row]) -> Row | None:
    """The fastest way that communicates and is not osdp."""
    peers = [row for row in rows if row.way not in (*ALONE, "osdp") and not row.failed]
    return min(peers, key=lambda row: row.seconds, default=None)


def table(rows: list[Row], title: str, bound: float | None) -> Table:
    """For people."""
    by_name = {row.name: row for row in rows}
    made = Table(title=title)
    made.add_column("how")
    best, alone = best_peer(rows), alone_seconds(rows)
    heads = ["step s", "waiting", "x bound", "x best peer", "x DDP", "x FSDP2", "peak", "limit"]
    for head in (*heads, "losses off DDP's", "predicted"):
        made.add_column(head, justify="right")
    made.add_column("decisions")
    for row in rows:
        if row.failed:
            made.add_row(row.name, "failed")
            continue
        against = [_ratio(by_name, row, base) for base in ("DDP", "FSDP2")]
        difference = loss_difference(by_name, row)
        wrong = difference is not None and difference > LOSS_TOLERANCE
        peer = None if best is None else _ratio(by_name, row, best.name)
        limit = row.options.get("memory_limit")
        made.add_row(
            row.name,
            f"{row.seconds:.2f}",
            "" if alone is None else f"{max(0.0, row.seconds - alone):.2f}",
            "" if bound is None else f"{row.seconds / bound:.2f}",
            *("" if ratio is None else f"{ratio:.2f}" for ratio in (peer, *against)),
            format_bytes(row.peak_bytes),
            "" if limit is None else format_bytes(limit),
            "" if difference is None else f"{difference:.1e}" + (" WRONG" if wrong else ""),
            f"{row.predicted['step_seconds']:.2f} s, {format_bytes(row.predicted['peak_bytes'])}"
            if row.predicted
            else "",
            ", ".join(f"{count} {kind}" for kind, count in row.decisions.items()),
        )
    return made


def claims(rows: list[Row], setting: Setting | None, bound: float | None) -> dict[str, bool]:
    """What the project promises of this comparison, and whether it holds here."""
    by_name = {row.name: row for row in rows}
    found: dict[str, bool] = {}
    for name, base, least in setting.faster if setting is not None else ():
        if name in by_name and base in by_name:
            ratio = _ratio(by_name, by_name[name], base)
            found[f"{name}: {least} times as fast as {base}"] = ratio is not None and ratio >= least
    free = by_name.get(FREE)
    if setting is not None and setting.bound and free is not None and bound is not None:
        near = not free.failed and free.seconds <= setting.bound * bound
        found[f"{FREE}: within {setting.bound} of the bound"] = near
    limited = [row for row in rows if "memory_limit" in row.options]
    if limited:
        found["every measured peak is under its limit"] = not any(
            row.failed or row.peak_bytes > row.options["memory_limit"] for row in limited
        )
    swept = [row for row in limited if row.name != LIMITED and not row.failed]
    if len(swept) > 1:
        pairs = itertools.combinations(swept, 2)
        found[f"a higher limit is never more than {NO_SLOWER - 1:.0%} slower"] = all(
            higher.seconds <= NO_SLOWER * lower.seconds for lower, higher in pairs
        )
    differences = [loss_difference(by_name, row) for row in rows if row.way != "DDP"]
    compared = [d for d in differences if d is not None]
    if compared:
        found["every loss is DDP's"] = not any(row.failed for row in rows) and all(
            d <= LOSS_TOLERANCE for d in compared
        )
    return found


def draw(rows: list[Row], title: str, bound: float | None, path: Path) -> None:
    """Step time against measured peak: osdp's limits as a line, every other way a mark."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if not row.failed]
    mib = float(1 << 20)
    ours = sorted((row for row in shown if row.way == "osdp"), key=lambda row: row.peak_bytes)
    axes.plot(
        [row.peak_bytes / mib for row in ours],
        [row.seconds for row in ours],
        marker="o",
        color="black",
        label="osdp",
    )
    for row in shown:
        if row.way != "osdp":
            axes.scatter(row.peak_bytes / mib, row.seconds, marker="s", label=row.name)
    if bound is not None:
        axes.axhline(bound, color="gray", linestyle="--", label="bound")
    figure.suptitle(title, fontsize=10)
    axes.set(xlabel="measured peak, MiB", ylabel="step, seconds")
    axes.set_ylim(bottom=0)
    figure.legend(fontsize=8, loc="outside right center")  # not over a point
    figure.savefig(path, dpi=120)


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of the arguments for sizes, which override a setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=list(SETTINGS), default="gpt")
    parser.add_argument("--hosts", type=int, help="in place of the setting's")
    parser.add_argument("--rate", help="what each host may send, in place of the setting's")
    parser.add_argument(
        "--local",
        type=int,
        help="so many ranks of this machine, in place of hosts: on GPUs with NCCL if there are any",
    )
    sizes = [field.name for field in dataclasses.fields(Work) if field.type == "int"]
    for name in sizes:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, dest=name, help="in place of the setting's")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of timing")
    parser.add_argument("--limits", type=int, default=0, help="so many memory limits for osdp, too")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="these ways only")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    return parser, sizes


def _names(given: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The ways to measure."""
    names = list(ROWS) if given.only is None else given.only
    if given.local:  # these are told the rates of hosts
        names = [name for name in names if name not in (OVERLAP, KEEP_OVERLAP)]
    if _OF_FSDP2.keys() & set(names) and "FSDP2" not in names:
        parser.error("a limit of FSDP2's peak needs 'FSDP2' too")
    if not names and not given.limits:
        parser.error("nothing to measure: --only names no way, and --limits is 0")
    return names


def main() -> None:
    parser, sizes = _parser()
    given = parser.parse_args()
    names = _names(given, parser)
    chosen = SETTINGS[given.setting]
    changed = {name: getattr(given, name) for name in sizes if getattr(given, name) is not None}
    if chosen.work.task and {"layers", "width", "batch", "context"} & set(changed):
        parser.error(f"--setting {given.setting} has sizes of its own")
    work = dataclasses.replace(chosen.work, **changed)
    if given.local and torch.cuda.is_available():
        work = dataclasses.replace(work, device="cuda")
    count, rate = given.hosts or chosen.hosts, given.rate or chosen.rate
    as_set = not changed and not given.local and (count, rate) == (chosen.hosts, chosen.rate)
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    try:
        with _ranks(given.local, count, rate, work.device) as hosts:
            rows = run(hosts, work, names, given.limits, given.repeats, console)
    except RanksError as error:
        sys.exit(str(error))
    bound = of_weights = None
    place = f"{given.local} ranks of this machine ({hosts.backend})"
    if isinstance(hosts, Hosts):
        bound, of_weights = (
            bound_seconds(rows, size_bytes / hosts.bytes_per_second)
            for size_bytes in least_bytes(work, count)
        )
        place = f"{count} hosts at {rate}"
    parameters = sum(p.numel() for p in work.model().parameters())
    title = (
        f"{work.task or f'GPT, batch {work.batch} x {work.context} a rank'}, "
        f"{parameters / 1e6:.1f} M parameters, {place}, torch {torch.__version__}"
    )
    if bound is not None:
        title += f", bound {bound:.2f} s"
    console.print(table(rows, title, bound))
    held = claims(rows, chosen if as_set else None, of_weights)
    for claim, holds in held.items():
        console.print(("[green]yes[/green] " if holds else "[red]no[/red]  ") + claim)
    record = {
        "title": title,
        "place": place,
        "bound_seconds": bound,
        "work": dataclasses.asdict(work),
        "rows": [dataclasses.asdict(row) for row in rows],
        "claims": held,
    }
    _save(record, rows, bound, given.out, console)
    if any(row.failed for row in rows):
        sys.exit(1)


def _save(
    record: dict[str, Any], rows: list[Row], bound: float | None, path: Path, console: Console
) -> None:
    """Write the record as JSON, and a picture beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    picture = path.with_suffix(".png")
    draw(rows, record["title"], bound, picture)
    console.print(f"[dim]saved {path} and {picture}[/dim]")


if __name__ == "__main__":
    main()

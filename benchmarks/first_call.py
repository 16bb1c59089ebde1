"""What the first call costs: osdp's against SimpleFSDP's with Inductor, both from cold caches.

    sudo python -m benchmarks.first_call --pairs 3
    sudo python -m benchmarks.first_call --second-start --pairs 3

The first call is the first forward and backward: tracing, planning, measuring the network,
sharding, compiling. Every run has fresh processes and an empty cache of compiled code that
its ranks share. Runs alternate (A B A B), and the ratio is taken within each pair, so that
what else the machine does hits both alike.

With ``--second-start`` each pair is a start of osdp's training with empty caches, and a second one
with the caches that the first has left: hardware profile, plan and compiled code. Counted is the
time from the start of the processes to the end of the first optimizer step.

With ``--blocks`` each pair is osdp's first call of a whole model of 24 layers, and of the same one
whose blocks are compiled one by one.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.claims import conclude
from benchmarks.hosts import Hosts, hosts_and_cache, parser_for
from benchmarks.launch import measure_on
from benchmarks.train import Work

PEER = "SimpleFSDP + compile"
_MANY_LAYERS = 24


def pairs(
    hosts: Hosts,
    work: Work,
    ways: tuple[str, str],
    count: int,
    options: dict[str, Any],
    console: Console,
) -> list[tuple[float, float]]:
    """Seconds of the first call of two ways, pair after pair."""
    found = []
    for index in range(count):
        seconds = []
        for way in ways:
            got = measure_on(hosts, work, way, "first", None if way == PEER else options)
            seconds.append(got["first_call_seconds"])
            console.print(f"[dim]{index + 1}: {way} {seconds[-1]:.1f} s[/dim]")
        found.append((seconds[0], seconds[1]))
    return found


def second_starts(
    hosts: Hosts, work: Work, count: int, options: dict[str, Any], console: Console, folder: Path
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Figures of a cold start and of the next one, pair after pair."""
    found = []
    for index in range(count):
        own = folder / str(index)
        pair = [
            measure_on(hosts, work, "osdp", "start", options, own / "code", own / "kept")
            for _ in range(2)
        ]
        plans = len(list((own / "kept" / "plans").glob("*.json")))
        pair[1]["plan_found"] = plans == 1  # a second plan would be a second file
        console.print(f"[dim]{index + 1}: {pair}[/dim]")
        found.append((pair[0], pair[1]))
    return found


def conclude_second_starts(
    found: list[tuple[dict[str, Any], dict[str, Any]]], out: Path, console: Console
) -> None:
    """Print the medians and the claims, and write the record."""
    ratios = {
        name: statistics.median(second[name] / cold[name] for cold, second in found)
        for name in ("start_seconds", "cpu_seconds")
    }
    for name, ratio in ratios.items():
        cold, second = (statistics.median(pair[i][name] for pair in found) for i in (0, 1))
        console.print(f"{name}: cold {cold:.1f}, second {second:.1f}, median ratio {ratio:.2f}")
    claims = {
        "every second start finds the plan": all(second["plan_found"] for _, second in found),
        "a second start takes at most 25 % of the first": ratios["start_seconds"] <= 0.25,
    }
    conclude(console, claims, {"pairs": found, "median_ratios": ratios}, out)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--second-start", action="store_true", help="against osdp's own first")
    parser.add_argument("--blocks", action="store_true", help="blocks one by one, and the whole")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=Work.width)
    parser.add_argument("--memory-limit", help="osdp's, for example 180MiB (default: none)")
    parser.add_argument("--out", type=Path, default=Path("first_call.json"))
    given = parser.parse_args()
    console = Console()
    options = {"memory_limit": given.memory_limit} if given.memory_limit else {}
    layers = given.layers or (_MANY_LAYERS if given.blocks else Work.layers)
    work = Work(layers=layers, width=given.width)
    ways, most = ((PEER, "osdp"), 1.1) if not given.blocks else (("osdp", "osdp by blocks"), 0.4)
    with hosts_and_cache(given.hosts, given.rate) as (hosts, folder):
        if given.second_start:
            starts = second_starts(hosts, work, given.pairs, options, console, folder)
            conclude_second_starts(starts, given.out, console)
            return
        found = pairs(hosts, work, ways, given.pairs, options, console)
    ratios = [ours / theirs for theirs, ours in found]
    made = Table(title=f"seconds of the first call, {layers} layers of {given.width}")
    for head in (*ways, "ratio"):
        made.add_column(head, justify="right")
    for (theirs, ours), ratio in zip(found, ratios, strict=True):
        made.add_row(f"{theirs:.1f}", f"{ours:.1f}", f"{ratio:.2f}")
    console.print(made)
    median = statistics.median(ratios)
    console.print(f"median ratio {median:.2f}")
    claims = {f"the first call takes at most {most} times the other's": median <= most}
    conclude(console, claims, {"pairs_seconds": found, "median_ratio": median}, given.out)


if __name__ == "__main__":
    main()

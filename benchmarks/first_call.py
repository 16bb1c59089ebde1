"""What the first call costs: osdp's against SimpleFSDP's with Inductor, both from cold caches.

    sudo python -m benchmarks.first_call --pairs 3

The first call is the first forward and backward: tracing, planning, measuring the network,
sharding, compiling. Every run has fresh processes and an empty cache of compiled code that
its ranks share. Runs alternate (A B A B), and the ratio is taken within each pair, so that
what else the machine does hits both alike.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.hosts import Hosts, hosts_and_cache, parser_for
from benchmarks.launch import measure_on
from benchmarks.train import Work

PEER = "SimpleFSDP + compile"


def pairs(
    hosts: Hosts, work: Work, count: int, options: dict[str, Any], console: Console
) -> list[tuple[float, float]]:
    """Seconds of the peer's and of osdp's first call, pair after pair."""
    found = []
    for index in range(count):
        seconds = []
        for way in (PEER, "osdp"):
            got = measure_on(hosts, work, way, "first", options if way == "osdp" else None)
            seconds.append(got["first_call_seconds"])
            console.print(f"[dim]{index + 1}: {way} {seconds[-1]:.1f} s[/dim]")
        found.append((seconds[0], seconds[1]))
    return found


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=Work.layers)
    parser.add_argument("--width", type=int, default=Work.width)
    parser.add_argument("--memory-limit", help="osdp's, for example 180MiB (default: none)")
    parser.add_argument("--out", type=Path, default=Path("first_call.json"))
    given = parser.parse_args()
    console = Console()
    options = {"memory_limit": given.memory_limit} if given.memory_limit else {}
    work = Work(layers=given.layers, width=given.width)
    with hosts_and_cache(given.hosts, given.rate) as (hosts, _):
        found = pairs(hosts, work, given.pairs, options, console)
    ratios = [ours / theirs for theirs, ours in found]
    made = Table(title=f"seconds of the first call, {given.layers} layers of {given.width}")
    for head in (PEER, "osdp", "ratio"):
        made.add_column(head, justify="right")
    for (theirs, ours), ratio in zip(found, ratios, strict=True):
        made.add_row(f"{theirs:.1f}", f"{ours:.1f}", f"{ratio:.2f}")
    console.print(made)
    median = statistics.median(ratios)
    holds = median <= 1.5
    console.print(f"median ratio {median:.2f}, at most 1.5: {'yes' if holds else 'no'}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"pairs_seconds": found, "median_ratio": median}) + "\n")


if __name__ == "__main__":
    main()

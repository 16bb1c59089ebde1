"""Hosts of several ranks behind one link each: collectives stage by stage beside flat ones.

    sudo python -m benchmarks.two_dimensions    # two hosts of two ranks, 400 Mbit/s a host
    sudo python -m benchmarks.two_dimensions --limit 110MiB    # osdp may shard within hosts

The same GPT is trained by DDP and by osdp, over a mesh with one dimension and with two, in turns
(``--repeats``): quote ratios. Ranks of a host reach each other without the limit; what they send
to other hosts shares the host's rate.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, hosts_and_cache, parser_for
from benchmarks.launch import measure_on
from benchmarks.train import Work

#: What is measured, by the name that benchmarks.peers has for it.
WAYS = {"DDP": "DDP", "osdp, flat": "osdp", "osdp, two dimensions": "osdp on hosts"}


def measure(
    hosts: Hosts, work: Work, cache: Path, repeats: int, options: dict[str, Any]
) -> dict[str, list[Any]]:
    """What ``benchmarks.train`` found, by way, one for each round; ``options``: of osdp."""
    found: dict[str, list[Any]] = {name: [] for name in WAYS}
    for _ in range(repeats):
        for name, way in WAYS.items():
            own = {} if way == "DDP" else options
            result = measure_on(hosts, work, way, "time", own, cache)
            found[name].append(result)
            print(f"{name}: {result['step_seconds']:.3f} s", flush=True)
    return found


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences of 128 tokens a rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", help="osdp's memory limit, as 150MiB (default: none)")
    given = parser.parse_args()
    with hosts_and_cache(given.hosts, given.rate, given.ranks_per_host) as (hosts, cache):
        options = {"memory_limit": given.limit} if given.limit else {}
        found = measure(hosts, Work(batch=given.batch), cache, given.repeats, options)
    seconds = {
        name: statistics.median(one["step_seconds"] for one in results)
        for name, results in found.items()
    }
    for name, results in found.items():
        off = max(
            abs(ours - theirs)
            for ours, theirs in zip(results[0]["losses"], found["DDP"][0]["losses"], strict=True)
        )
        decided = results[-1].get("decisions", {})
        predicted = results[-1].get("predicted", {}).get("step_seconds")
        print(
            f"{name}: {seconds[name]:.3f} s, {seconds['DDP'] / seconds[name]:.2f} times DDP's "
            f"speed, losses {off:.1e} off DDP's"
            + ("" if predicted is None else f", predicted {predicted:.3f} s")
            + "".join(f", {count} {kind}" for kind, count in decided.items())
        )


if __name__ == "__main__":
    main()

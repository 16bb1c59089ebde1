"""A vocabulary of 128k words: under a limit below the logits' size, they are never there whole.

    sudo python -m benchmarks.many_words

An embedding, one linear and a head of 131,072 words and 64 dimensions train on two hosts, 1024
tokens on each: the logits alone are 512 MiB. The planner is given a limit of just that; it must
find by itself that the head runs by slices of its tokens, the loss with it. What is measured is
the peak of all tensors together, so that no single one can be larger. DDP's peak and losses stand
beside it, and what operators as a whole need at least.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.claims import conclude
from benchmarks.compare import LOSS_TOLERANCE
from benchmarks.hosts import Hosts, hosts_and_cache, parser_for
from benchmarks.launch import measure_on
from benchmarks.tasks import MANY_WORDS, MANY_WORDS_TOKENS
from benchmarks.train import Work
from passes.types.units import format_bytes

WORK = Work(task="many words", warmup_steps=1, timed_steps=3)
LOGITS_BYTES = 4 * MANY_WORDS * MANY_WORDS_TOKENS


@dataclasses.dataclass(frozen=True)
class Found:
    """Peaks in bytes, seconds of a step, and the largest difference of losses from DDP's.

    ``whole_least_bytes``: the least limit with operators as a whole.
    """

    peak_bytes: int
    predicted_bytes: int
    whole_least_bytes: int
    ddp_bytes: int
    step_seconds: float
    ddp_seconds: float
    loss_difference: float


def measure(hosts: Hosts, cache: Path) -> Found:
    """All of it."""

    def got(way: str, phase: str, options: dict[str, Any]) -> dict[str, Any]:
        return measure_on(hosts, WORK, way, phase, options, cache)

    limited = {"memory_limit": LOGITS_BYTES}
    memory, timed = got("osdp", "memory", limited), got("osdp", "time", limited)
    ddp = got("DDP", "time", {})
    return Found(
        memory["peak_bytes"],
        memory["predicted"]["peak_bytes"],
        got("osdp", "least", {"slices": 1, "memory_limit": 1})["least_bytes"],
        got("DDP", "memory", {})["peak_bytes"],
        timed["step_seconds"],
        ddp["step_seconds"],
        max(abs(a - b) for a, b in zip(timed["losses"], ddp["losses"], strict=True)),
    )


def claims(found: Found) -> dict[str, bool]:
    """What the project promises, and whether it holds here."""
    return {
        f"the peak of all tensors ({format_bytes(found.peak_bytes)}) is below the logits "
        f"({format_bytes(LOGITS_BYTES)})": found.peak_bytes < LOGITS_BYTES,
        f"whole operators need more ({format_bytes(found.whole_least_bytes)})": (
            found.whole_least_bytes > LOGITS_BYTES
        ),
        f"losses are DDP's ({found.loss_difference:.1e})": found.loss_difference <= LOSS_TOLERANCE,
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--out", type=Path, default=Path("many_words.json"))
    given = parser.parse_args()
    console = Console()
    with hosts_and_cache(given.hosts, given.rate) as (hosts, cache):
        found = measure(hosts, cache)
    console.print(
        f"osdp: {found.step_seconds:.2f} s a step, {format_bytes(found.peak_bytes)} at the peak "
        f"(predicted {format_bytes(found.predicted_bytes)}); "
        f"DDP: {found.ddp_seconds:.2f} s, {format_bytes(found.ddp_bytes)}"
    )
    conclude(console, claims(found), dataclasses.asdict(found), given.out)


if __name__ == "__main__":
    main()

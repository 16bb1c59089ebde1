"""The knapsack: the cheapest decisions within so many bytes, where memory and costs add up.

A choice d of parameter i takes m(i, d) bytes (its state, plus the gathered weight if it is kept)
and costs ``c(i, d) = wf * forward communication + wb * backward communication + computing``, where
computing is the optimizer's step and what collectives take of the computing beside them. With
memory cut into units of limit/1024 and parameters in order::

    f[i][v] = min over d of f[i-1][v - m(i, d)] + c(i, d)

The weights (wf, wb) say how much of the forward's and the backward's communication is expected to
be exposed. Which plan is the fastest is not decided here (``passes/plan.py``).

Recurrence: the 0/1 knapsack of OSDP (arXiv 2209.13258, section 3.3) and Galvatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from passes.bucket import bucket_bytes_for
from passes.context import Context, Parameter
from passes.decisions import Decision, shardable
from passes.levels import legs_seconds

#: Of the limit, or of what all parameters take if that is less.
UNITS = 1024


@dataclasses.dataclass(frozen=True)
class Choice:
    """One decision for one parameter, and what it costs by itself."""

    decision: Decision
    memory_bytes: int
    forward_seconds: float
    backward_seconds: float
    compute_seconds: float


def choices_of(parameter: Parameter, ctx: Context) -> list[Choice]:
    """What can be done with a parameter; replicate first, the least memory last."""
    world, hardware, full = ctx.world_size, ctx.hardware, parameter.full_bytes
    trained = parameter.requires_grad

    # Small collectives share a bucket and so most of what each costs whatever its size.
    spared = 1 - min(1.0, full / bucket_bytes_for(ctx))

    def link(kind: str) -> float:
        latency_seconds = hardware.collectives[kind].latency_seconds
        seconds = hardware.collective_seconds(kind, full, world) - spared * latency_seconds
        if ctx.levels is None or (kind == "reduce_scatter" and ctx.by_exchange):
            return seconds
        latency_seconds = legs_seconds(kind, 0, ctx)
        return min(seconds, legs_seconds(kind, full, ctx) - spared * latency_seconds)

    def busy(*kinds: str) -> float:
        return sum(
            hardware.busy_seconds(kind, full, world)
            - spared * hardware.collectives[kind].start_seconds
            for kind in kinds
        )

    def update(state: int) -> float:
        return hardware.update_seconds(state, 1)

    whole, part = parameter.state_bytes(world, False), parameter.state_bytes(world, True)
    reduce_whole = link("all_reduce") if trained else 0.0
    computing = update(whole) + (busy("all_reduce") if trained else 0.0)
    found = [Choice(Decision.REPLICATE, whole, 0.0, reduce_whole, computing)]
    if shardable(parameter.shape, world):
        gather = link("all_gather")
        kind = min(("reduce_scatter", "all_to_all"), key=link)
        reduce = link(kind) if trained else 0.0
        computing = update(part) + busy("all_gather", *([kind] if trained else []))
        again = computing + busy("all_gather")
        found.append(Choice(Decision.SHARD_KEEP, part + full, gather, reduce, computing))
        found.append(Choice(Decision.SHARD_AGAIN, part, gather, gather + reduce, again))
    return found


def together(alike: Sequence[list[Choice]]) -> list[Choice]:
    """The choices of parameters that are decided on together, of all of them in sum."""
    return [
        Choice(
            options[0].decision,
            sum(one.memory_bytes for one in options),
            sum(one.forward_seconds for one in options),
            sum(one.backward_seconds for one in options),
            sum(one.compute_seconds for one in options),
        )
        for options in zip(*alike, strict=True)
    ]


class Table:
    """The dynamic programme for one weighting: the best decisions for any budget."""

    def __init__(
        self, choices: list[list[Choice]], weights: tuple[float, float], ctx: Context
    ) -> None:
        self.choices = choices
        self.most_bytes = sum(max(o.memory_bytes for o in options) for options in choices)
        whole = (
            self.most_bytes if ctx.limit_bytes is None else min(ctx.limit_bytes, self.most_bytes)
        )
        self.unit_bytes = max(1, whole // UNITS)
        self.units = whole // self.unit_bytes
        forward, backward = weights
        best = np.zeros(self.units + 1)
        self.picks = np.zeros((len(choices), self.units + 1), dtype=np.int8)
        # Rounding each parameter up would waste half a unit a parameter: carry the remainder.
        self.sizes: list[list[int]] = []
        carried = [0.0, 0.0, 0.0]
        for index, options in enumerate(choices):
            sizes = []
            found = np.full((len(options), self.units + 1), np.inf)
            for pick, option in enumerate(options):
                exact = option.memory_bytes / self.unit_bytes + carried[pick]
                size = round(exact)
                carried[pick] = exact - size
                sizes.append(size)
                seconds = (
                    forward * option.forward_seconds
                    + backward * option.backward_seconds
                    + option.compute_seconds
                )
                if size <= self.units:
                    found[pick, size:] = best[: self.units + 1 - size] + seconds
            self.sizes.append(sizes)
            self.picks[index] = found.argmin(axis=0)
            best = found.min(axis=0)
        self.cost = best

    def best(self, budget_bytes: int) -> list[Decision] | None:
        """The cheapest decisions whose additive memory is within the budget; None if none is."""
        left = min(self.units, budget_bytes // self.unit_bytes)
        if left < 0 or not np.isfinite(self.cost[left]):
            return None
        picked: list[Decision] = []
        for index in range(len(self.choices) - 1, -1, -1):
            pick = int(self.picks[index, left])
            picked.append(self.choices[index][pick].decision)
            left -= self.sizes[index][pick]
        return picked[::-1]

    def memory_bytes(self, decisions: Sequence[Decision]) -> int:
        """Additive memory of some decisions."""
        return sum(
            next(o.memory_bytes for o in options if o.decision is decision)
            for options, decision in zip(self.choices, decisions, strict=True)
        )

"""Constants of the search, each with the experiment that set it (docs/experiments.md)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """The tuned constants of the planner; sizes of data structures are where they are used.

    ``weights``: prices of a second of communication for the dynamic program's first proposals. One
    step of the climb evaluates as many of its plans.
    ``most_plans``, ``most_nodes``: evaluation budget: plans, and simulated nodes in all.
    ``least_plans``: evaluation budget of a graph of however many nodes.
    ``folded_plans``: evaluation budget of a folded step; half as many more in slices.
    ``sliced``: slices that make the step faster by at most this share go, if it fits without them.
    ``promise``: least gain that a change of a folded step promises, as a share of the step.
    ``near``: the climb starts again from other structures that are at most so many times as slow.
    ``width``: number of changes after which a second change is tried.
    ``least_gain``: least gain of a step towards a peak, as a share of the bytes above it. A search
    for the least memory lowers the peak to reach by the same share. A candidate whose forecast is
    slower by more than this share is not evaluated.
    ``alike``: alike parameters get one decision if this makes the step longer by at most this share
    of itself.
    ``tiny``: share of all parameter bytes that the parameters with one common decision have.
    """

    weights: tuple[float, ...] = (1.0, 0.3, 0.01)
    most_plans: int = 600
    most_nodes: int = 30_000
    least_plans: int = 30
    folded_plans: int = 12
    sliced: float = 0.005
    promise: float = 0.0002
    near: float = 1.25
    width: int = 8
    least_gain: float = 0.02
    alike: float = 0.002
    tiny: float = 0.01


CONSTANTS = Constants()

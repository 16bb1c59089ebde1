"""Explain: the reason for each parameter's decision, in one line for users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from passes.graph.metadata import COLLECTIVE
from passes.ops.slicing import parameter_of
from passes.pricing.predict import LoweredStep
from passes.types.context import Context
from passes.types.decision import Moves
from passes.types.plan import Plan, shardable
from passes.types.units import format_seconds


def explained(
    plan: Plan,
    step: LoweredStep,
    ctx: Context,
    representatives: Mapping[str, str],
    gains: Mapping[str, str],
    gains_of_slices: Mapping[str, str],
    gains_of_moves: Mapping[str, str],
) -> Plan:
    """The plan with its prediction and the reason of every decision.

    ``representatives``: for each parameter that is not in the graphs, the parameter with its
    figures. ``gains``, ``gains_of_slices``, ``gains_of_moves``: by name of a parameter, the gain of
    its decision, of its slices, and of activations that move (``gains.py``).
    """
    gathers: dict[str, tuple[float, float]] = {}
    reductions: dict[str, tuple[float, float]] = {}
    tokens: dict[str, tuple[float, float]] = {}
    for simulation in step.simulations:
        for node, late in simulation.exposed.items():
            purpose = COLLECTIVE.of(node)
            seconds = simulation.end[node] - simulation.start[node]
            kind = gathers if purpose.gathers else reductions
            if purpose.tokens:
                kind = tokens
            for name in map(parameter_of, purpose.names):
                before = kind.get(name, (0.0, 0.0))
                kind[name] = (before[0] + seconds, before[1] + late)
    rows = []
    for row in plan.parameters:
        parts = []
        if not shardable(row.shape, ctx.ranks_of_a_host or ctx.world_size):
            parts.append("too small to shard")
        elif gains.get(row.name) and row.moves is Moves.WEIGHT:
            parts.append(gains[row.name])
        if gains_of_slices.get(row.name):
            parts.append(f"slices: {gains_of_slices[row.name]}")
        if gains_of_moves.get(row.name):
            parts.append(gains_of_moves[row.name])
        for what, kind in (("gather", gathers), ("reduce", reductions), ("tokens", tokens)):
            if (seen := representatives.get(row.name, row.name)) in kind:
                seconds, late = kind[seen]
                hidden = "hidden" if late < 0.05 * seconds else f"{format_seconds(late)} exposed"
                parts.append(f"{what} {format_seconds(seconds)}, {hidden}")
        rows.append(dataclasses.replace(row, reason="; ".join(parts)))
    return plan.replace(parameters=tuple(rows), prediction=step.prediction)

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

#: dtypes as people call them.
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


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
    collectives = _collectives(step)
    dtypes = _dtypes_of_gathers(step)
    rows = []
    for row in plan.parameters:
        parts = []
        ranks = ctx.ranks_of_a_host or ctx.world_size
        if ranks > 1 and not shardable(row.shape, ranks):
            parts.append("too small to shard")
        elif gains.get(row.name) and row.moves is Moves.WEIGHT:
            parts.append(gains[row.name])
        slices = gains_of_slices.get(row.name)
        parts += [f"slices: {slices}"] if slices else []
        moves = gains_of_moves.get(row.name)
        parts += [moves] if moves else []
        seen = representatives.get(row.name, row.name)
        dtype = dtypes.get(seen, row.dtype)
        parts += [f"gathered in {_SHORT.get(dtype, dtype)}"] if dtype != row.dtype else []
        for what, kind in collectives.items():
            if seen in kind:
                seconds, late = kind[seen]
                hidden = "hidden" if late < 0.05 * seconds else f"{format_seconds(late)} exposed"
                parts.append(f"{what} {format_seconds(seconds)}, {hidden}")
        rows.append(dataclasses.replace(row, reason="; ".join(parts)))
    return plan.replace(parameters=tuple(rows), prediction=step.prediction)


def _collectives(step: LoweredStep) -> dict[str, dict[str, tuple[float, float]]]:
    """By kind and parameter, the seconds of its collectives, and those that are exposed."""
    found: dict[str, dict[str, tuple[float, float]]] = {"gather": {}, "reduce": {}, "tokens": {}}
    for simulation in step.simulations:
        for node, late in simulation.exposed.items():
            purpose = COLLECTIVE.of(node)
            seconds = simulation.end[node] - simulation.start[node]
            what = "gather" if purpose.gathers else "reduce"
            kind = found["tokens" if purpose.tokens else what]
            for name in map(parameter_of, purpose.names):
                before = kind.get(name, (0.0, 0.0))
                kind[name] = (before[0] + seconds, before[1] + late)
    return found


def _dtypes_of_gathers(step: LoweredStep) -> dict[str, str]:
    """By name of a parameter, the dtype in which it is gathered."""
    found: dict[str, str] = {}
    for simulation in step.simulations:
        for node in simulation.exposed:
            purpose = COLLECTIVE.of(node)
            if purpose.gathers_weights:
                dtype = str(node.meta["val"].dtype).removeprefix("torch.")
                found.update(dict.fromkeys(map(parameter_of, purpose.names), dtype))
    return found

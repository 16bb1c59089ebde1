"""Gains: the bytes and the seconds that a decision saves, in words for users.

Alike parameters with one decision are one group. A gain is that of the group, against the fastest
other decision for it, as the prices forecast it (``passes/pricing/prices.py``).
"""

from __future__ import annotations

from passes.candidates.parameter_groups import alike
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.prices import Forecast, Reference
from passes.types.decision import Decision
from passes.types.units import format_bytes, format_seconds

#: A smaller difference is none.
_LEAST_SECONDS = 1e-6


def gains(evaluator: PlanEvaluator, reference: Reference) -> dict[str, str]:
    """By name of a parameter, the gain of the decision that the reference's candidate has for it.

    Without a memory limit, and where the limit does not restrict the search, it has seconds only. A
    parameter without another possible decision has no gain.
    """
    key, ctx = reference.key, evaluator.ctx
    now = reference.judge(key)
    found: dict[str, str] = {}
    for members in alike(ctx.parameters):
        by_decision: dict[Decision, list[int]] = {}
        for index in members:
            by_decision.setdefault(key.decisions[index], []).append(index)
        for decision, own in by_decision.items():
            others = [
                (reference.judge(key.deciding([(i, one.decision) for i in own], ctx)), one.decision)
                for one in evaluator.choices[own[0]]
                if one.decision != decision
            ]
            if others:
                fastest, other = min(others, key=lambda pair: pair[0].seconds)
                said = _gain(now, fastest, other)
                found.update((ctx.parameters[index].name, said) for index in own)
    return found


def _gain(now: Forecast, other: Forecast, decision: Decision) -> str:
    """The gain of a decision against another one; empty: the forecast sees none."""
    longer_seconds = other.seconds - now.seconds
    saved_bytes = other.peak_bytes - now.peak_bytes
    if abs(longer_seconds) < _LEAST_SECONDS:
        return f"as fast as {decision.text}"
    if longer_seconds < 0 < saved_bytes:
        return (
            f"saves {format_bytes(saved_bytes)} at the peak for {format_seconds(-longer_seconds)}"
        )
    if saved_bytes < 0 < longer_seconds:
        return (
            f"saves {format_seconds(longer_seconds)} for {format_bytes(-saved_bytes)} at the peak"
        )
    if longer_seconds < 0:
        return ""  # a simulation said otherwise
    return f"saves {format_seconds(longer_seconds)} against {decision.text}"

"""Gains: the bytes and the seconds that decisions and slices save, in words for users.

Alike parameters with one decision are one group. A gain is that of the group, against the fastest
other decision for it, as the prices forecast it (``passes/pricing/prices.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.candidates.candidate import Candidate
from passes.candidates.move_groups import MoveGroup
from passes.candidates.parameter_groups import alike
from passes.pricing.evaluator import PlanEvaluator
from passes.pricing.prices import Reference
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
                longer_seconds = fastest.seconds - now.seconds
                said = _gain(longer_seconds, fastest.peak_bytes - now.peak_bytes, other.text)
                found.update((ctx.parameters[index].name, said) for index in own)
    return found


def gains_of_slices(evaluator: PlanEvaluator, key: Candidate) -> dict[str, str]:
    """By name of a parameter in slices, the gain of its slice group's slices against none.

    Both ways are simulated.
    """
    found: dict[str, str] = {}
    if not key.splits:
        return found
    now, ctx = evaluator.evaluate(key).prediction, evaluator.ctx
    for group in evaluator.slice_groups:
        if key.slices_of(group, ctx)[0] > 1:
            whole = evaluator.evaluate(key.slicing(group, 1, None, ctx)).prediction
            longer_seconds = whole.step_seconds - now.step_seconds
            said = _gain(longer_seconds, whole.peak_bytes - now.peak_bytes, "whole operators")
            found.update(dict.fromkeys(group.names, said))
    return found


def gains_of_moves(evaluator: PlanEvaluator, key: Candidate) -> dict[str, str]:
    """By name of a parameter of a move group, what activations gain, or why weights move.

    Of a group to which activations move, both ways are simulated.
    """
    ctx, found = evaluator.ctx, dict[str, str]()
    for name, reason in evaluator.move_groups.refused.items():
        found[name] = f"its weight moves: {reason}"
    for groups in evaluator.move_groups.by_weights:
        moves = key.moves_on(groups[0]) is not None
        changed = [(key.moving(group, not moves, ctx), group) for group in groups]
        other, group = min(changed, key=lambda pair: evaluator.evaluated_rank(pair[0]))
        now, then = (evaluator.evaluate(one).prediction for one in (key, other))
        longer_seconds = then.step_seconds - now.step_seconds
        if moves:
            saved_bytes = then.peak_bytes - now.peak_bytes
            said = "activations: " + _gain(longer_seconds, saved_bytes, "moving weights")
            said += _gain_of_chunks(evaluator, key, groups)
            if group.alone:
                said += f"; alone: {evaluator.move_groups.refused[min(group.dims)]}"
        else:
            times = group.token_bytes / (2 * group.weight_bytes)
            said = f"its weight moves: activations would be {times:.2g}x the bytes of the weights"
            if longer_seconds > _LEAST_SECONDS:
                said += f", and the step {format_seconds(longer_seconds)} longer"
            elif not evaluator.fits(then):
                said += ", and the peak above the limit"
        found.update(dict.fromkeys(group.dims, said))
    return found


def _gain_of_chunks(evaluator: PlanEvaluator, key: Candidate, groups: Sequence[MoveGroup]) -> str:
    """What chunks of tokens gain against whole ones; empty: the tokens travel whole.

    ``groups``: of the same weights.
    """
    own = next(group for group in groups if key.moves(group))
    chunks = key.chunks_of(own)
    if chunks == 1:
        return ""
    now = evaluator.evaluate(key).prediction
    whole = evaluator.evaluate(key.moving(own, True, evaluator.ctx)).prediction
    longer_seconds = whole.step_seconds - now.step_seconds
    said = _gain(longer_seconds, whole.peak_bytes - now.peak_bytes, "whole tokens")
    return f"; {chunks} chunks: {said}" if said else f"; {chunks} chunks"


def _gain(longer_seconds: float, saved_bytes: int, instead: str) -> str:
    """The gain of a decision against another one; empty: there is none.

    Args:
        longer_seconds: how much longer the step is with the other decision.
        saved_bytes: how much higher its peak is.
        instead: the other decision in words.
    """
    more, longer = format_bytes(abs(saved_bytes)), format_seconds(abs(longer_seconds))
    if abs(longer_seconds) < _LEAST_SECONDS:
        return f"as fast as {instead}"
    if longer_seconds < 0:  # without a saved byte, another simulation said otherwise
        return f"saves {more} at the peak for {longer}" if saved_bytes > 0 else ""
    if saved_bytes < 0:
        return f"saves {longer} for {more} at the peak"
    both = f"{more} at the peak and {longer}" if saved_bytes else longer
    return f"saves {both} against {instead}"

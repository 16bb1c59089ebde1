"""Folded slices: whether a folded step can run in slices as the whole step does.

Needs: a folded step. Leaves: the step unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.capture.captured_step import lay_out
from passes.capture.fold_layers import Folded, gathers_in_time, put_in
from passes.pipeline import Pass
from passes.split.split_operators import split
from passes.types.context import Context, Phase
from passes.types.plan import Plan


def stays_foldable(folded: Folded, plan: Plan, ctx: Context, passes: Sequence[Pass]) -> bool:
    """Whether the few layers stand for all layers of the step in a plan's slices.

    ``split`` puts slices together, behind gathers that need none of them. If that takes the gathers
    of all later layers ahead, the whole step holds more of them than the few layers do.
    """
    laid = lay_out(folded.captured, folded.without_inner(plan), ctx, passes)
    put_in(laid, folded, plan, ctx)
    return all(
        gathers_in_time(folded, split(gm, ctx.replace(plan=plan, phase=phase)).graph, phase)
        for gm, phase in ((laid.forward, Phase.FORWARD), (laid.backward, Phase.BACKWARD))
    )

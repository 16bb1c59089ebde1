"""Warnings of lowering, as of a graph above the limit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from osdp_compile.tracking.session import Session
from osdp_compile.tracking.step_timer import CompiledStep
from passes.ops.markers import unshard_of, unshards
from passes.ops.slicing import parameter_of
from passes.types.context import Phase
from passes.types.plan import OF_INPUT
from passes.types.units import format_bytes

log = logging.getLogger("osdp_compile")


def of_weights_that_travel(reasons: Mapping[str, str]) -> None:
    """Warn of weights that travel in a graph, although the plan leaves them where they are."""
    for name, reason in sorted(reasons.items())[:1]:
        log.warning(
            "%d of the weights that stay where they are travel in this graph: %r, %s",
            len(reasons),
            name,
            reason,
        )


def of_whole_tokens(reasons: Mapping[str, str]) -> None:
    """Warn of tokens that travel whole in a graph, although the plan has chunks."""
    for name, reason in sorted(reasons.items())[:1]:
        log.warning("tokens travel whole in this graph, not in chunks: %r, %s", name, reason)


def of_not_recomputed(forward: fx.GraphModule, missing: Sequence[str], session: Session) -> None:
    """Warn of tensors that the plan recomputes and this graph does not save."""
    plan = session.plan
    read = {unshard_of(node).name for node in unshards(forward.graph)}
    gathered = {name for name in read if plan.decision(name).sharded}
    order = plan.order.get("forward", ())
    planned = {parameter_of(name) for one in order if one.gathers_weights for name in one.names}
    # A frame behind a graph break, which the plan does not cover, saves none of them.
    own = len(missing) < len(plan.recompute) and not session.frames
    if missing and (own or gathered == planned):
        log.warning(
            "of %d tensors that the plan recomputes, this graph does not save %d, the first of "
            "them %r: it is not the graph that was planned on, and may take more memory than was "
            "predicted. Make the first call with the shapes of later ones, or make a new plan",
            len(plan.recompute),
            len(missing),
            missing[0],
        )


def of_rows_at_once(forward: fx.GraphModule, read: frozenset[str], session: Session) -> None:
    """Warn of parameters whose operators cannot run in slices of rows: the shapes are dynamic."""
    inputs = forward.graph.find_nodes(op="placeholder")
    if not any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs):
        return
    by_rows = [p for p in session.plan.parameters if p.slices > 1 and p.along == OF_INPUT]
    names = [p.name for p in by_rows if p.name in read]
    if names:
        log.warning(
            "the plan slices the rows (tokens) of the operators that read %s, and this graph is "
            "for any number of rows: it multiplies all rows at once, and may take more memory than "
            "predicted. torch.compile(..., dynamic=False) slices, with a graph for each length",
            ", ".join(names),
        )


def above_limit(
    session: Session, step: CompiledStep, phase: Phase, peak_bytes: int, difference: str
) -> None:
    """Warn once for a step whose graphs are above the limit, with the cause."""
    limit_bytes = session.options.memory_limit_bytes
    if limit_bytes is None or peak_bytes <= limit_bytes or step.is_above:
        return
    step.is_above = True
    cause = difference
    if not cause and session.options.plan is not None:
        cause = "so much takes the plan that was given. Plan anew under this limit, or raise it"
    elif not cause:
        said = session.plan.prediction
        cause = (
            "its plan predicts "
            f"{format_bytes(said.peak_bytes) if said is not None else 'nothing'}. Lower the limit "
            "to leave room"
        )
    session.watch.above(phase.value, peak_bytes, limit_bytes, cause)

"""Predict: what a plan costs, by running the real passes and simulating what they emit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from passes.capture import Captured, lay_out
from passes.context import Context, Phase
from passes.decisions import Plan, Prediction
from passes.fold import Folded, Seconds, put_in, recomputed_of, seconds_of
from passes.graph import shared_values
from passes.lent import returned_bytes
from passes.memory import MEMORY
from passes.pipeline import Pass, Stage, run
from passes.recompute import recomputed
from passes.simulate import Simulation, simulate

#: Gradients of earlier backwards, which a backward adds its own to.
EARLIER_GRADIENTS = "earlier gradients"
#: What other models of the process hold.
OTHER_MODELS = "other models"


@dataclasses.dataclass(frozen=True)
class Step:
    """A plan's lowered graphs, how they ran in the simulator, and the sum of it."""

    prediction: Prediction
    forward: fx.GraphModule
    backward: fx.GraphModule
    simulations: tuple[Simulation, Simulation]


def state_bytes(ctx: Context, plan: Plan) -> dict[str, int]:
    """Bytes one rank holds between steps, by kind (``parameters``, ``optimizer``, ``gradients``).

    Gradients are here as they are before the optimizer's step; rank 0's share is counted,
    the largest.
    """
    total = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for parameter in ctx.parameters:
        local = parameter.shard_bytes(ctx.cut(plan.decision(parameter.name)).ranks)
        total["parameters"] += local
        if parameter.requires_grad:
            total["gradients"] += local
            share = local / parameter.full_bytes if parameter.full_bytes else 1.0
            total["optimizer"] += round(parameter.optimizer_bytes * share)
    return total


def held_between_steps(ctx: Context, plan: Plan) -> dict[str, int]:
    """Bytes that one rank holds during both graphs beside ``ctx.base_bytes``, by kind."""
    state = state_bytes(ctx, plan)
    held = {"parameters": state["parameters"], "optimizer": state["optimizer"]}
    if ctx.adds_gradients:
        held[EARLIER_GRADIENTS] = state["gradients"]
    return held


def optimizer_temporary_bytes(ctx: Context, plan: Plan) -> int:
    """Bytes an optimizer's step allocates and frees: two tensors of the largest local parameter.

    Adam's single-tensor step in torch makes ``sqrt(v) / c`` and ``+ eps`` out of place.
    """
    return 2 * max(
        (
            p.shard_bytes(ctx.cut(plan.decision(p.name)).ranks)
            for p in ctx.parameters
            if p.requires_grad
        ),
        default=0,
    )


def gradient_bytes(ctx: Context, plan: Plan, kept_bytes: int) -> int:
    """Bytes of the gradients that an optimizer's step finds.

    ``kept_bytes``: what the backward leaves. That is more than the parameters' own size where a
    small gradient is a view of the bucket that it came in, and another was copied out of it.
    """
    return max(state_bytes(ctx, plan)["gradients"], kept_bytes)


def optimizer_seconds(ctx: Context, plan: Plan) -> float:
    """Seconds of an optimizer's step on what one rank holds.

    Of a plan that shards nothing on plain tensors, as the backend leaves them; after
    ``osdp_compile.shard`` they are DTensors all the same.
    """
    trained = sum(parameter.requires_grad for parameter in ctx.parameters)
    held_bytes = sum(state_bytes(ctx, plan).values())
    return ctx.hardware.update_seconds(held_bytes, trained, plain=not plan.shards)


def predict(
    captured: Captured | Folded, plan: Plan, ctx: Context, passes: Sequence[Pass]
) -> Step:
    """Lower a captured step as the plan says, and simulate it.

    ``captured``: or folded; then the graphs lack layers, and the prediction does not.
    ``ctx.deciding``: search for the order of collectives; otherwise the plan's is followed.
    ``ctx.base_bytes``: bytes of buffers, the batch, and of whatever else is held besides
    parameters and optimizer state.
    """
    folded = captured if isinstance(captured, Folded) else None
    graphs = captured.captured if isinstance(captured, Folded) else captured
    with shared_values(graphs.values):
        return _predict(graphs, folded, plan, ctx, passes)


def _predict(
    captured: Captured, folded: Folded | None, plan: Plan, ctx: Context, passes: Sequence[Pass]
) -> Step:
    laid = lay_out(captured, folded.without_inner(plan) if folded else plan, ctx)
    if folded is not None:
        put_in(laid, folded, plan, ctx)
    state = held_between_steps(ctx, plan)
    held = ctx.base_bytes + sum(state.values())
    returned = returned_bytes(laid.forward.graph, laid.backward.graph)
    lowered: list[fx.GraphModule] = []
    simulations: list[Simulation] = []
    for gm, phase, extra in (
        (laid.forward, Phase.FORWARD, 0),
        (laid.backward, Phase.BACKWARD, returned),
    ):
        local = ctx.replace(plan=plan, phase=phase, base_bytes=held + extra)
        gm = run(passes, Stage.PARTS, gm, local, recompile=False)
        lowered.append(gm)
        simulations.append(simulate(gm.graph, gm.meta.pop(MEMORY, None)))
    forward, backward = simulations
    unseen = Seconds(0.0, 0.0)
    if folded is not None:
        for gm, simulation in zip(lowered, simulations, strict=True):
            unseen = unseen.plus(seconds_of(folded, plan, gm.graph, simulation))
    update_seconds = optimizer_seconds(ctx, plan)
    base = {**state, **base_kinds(ctx)}
    base = {kind: size_bytes for kind, size_bytes in base.items() if size_bytes}
    peaks = [
        _sum(base, forward.memory.peak),
        _sum(base, backward.memory.peak, {"returned": returned}),
        _sum(base, _between(ctx, forward)),
        {
            **{kind: held for kind, held in base.items() if kind != EARLIER_GRADIENTS},
            "gradients": gradient_bytes(ctx, plan, backward.memory.kept_bytes),
            "optimizer step": optimizer_temporary_bytes(ctx, plan),
        },
    ]
    peak = {k: v for k, v in max(peaks, key=lambda kinds: sum(kinds.values())).items() if v}
    step_seconds = forward.step_seconds + backward.step_seconds + unseen.step
    compute_seconds = forward.compute_seconds + backward.compute_seconds + unseen.compute
    if folded is None:
        recomputed_bytes, recomputed_seconds = recomputed(lowered[1].graph.nodes)
    else:
        recomputed_bytes, recomputed_seconds = recomputed_of(folded, lowered[1].graph)
    prediction = Prediction(
        step_seconds=step_seconds + update_seconds,
        compute_seconds=compute_seconds + update_seconds,
        exposed_seconds=step_seconds - compute_seconds,
        peak_bytes=sum(peak.values()),
        peak=peak,
        recomputed_bytes=recomputed_bytes,
        recomputed_seconds=recomputed_seconds,
    )
    return Step(prediction, lowered[0], lowered[1], (forward, backward))


def _between(ctx: Context, forward: Simulation) -> dict[str, int]:
    """What there is between the two graphs, where another model runs there, by kind."""
    if not ctx.between_bytes:
        return {}
    return {"saved": forward.memory.kept_bytes, OTHER_MODELS: ctx.between_bytes}


def base_kinds(ctx: Context) -> dict[str, int]:
    """The planner's ``ctx.base_bytes`` by kind."""
    named = {"accumulated": ctx.accumulated_bytes, OTHER_MODELS: ctx.other_models_bytes}
    return {"inputs": ctx.base_bytes - sum(named.values()), **named}


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    """Bytes by kind, all together."""
    total: dict[str, int] = {}
    for part in parts:
        for kind, size_bytes in part.items():
            total[kind] = total.get(kind, 0) + size_bytes
    return total

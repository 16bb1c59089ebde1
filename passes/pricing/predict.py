"""Predict: the time and memory of a plan, from a simulation of the real passes' output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.annotate.training_state import (
    IN_FLIGHT,
    OTHER_MODELS,
    at_optimizer,
    base_kinds,
    held_between_steps,
    more_earlier_gradients,
    optimizer_seconds,
)
from passes.capture.captured_step import lay_out
from passes.capture.fold_layers import Folded, Seconds, put_in, recomputed_of, seconds_of
from passes.graph.captured import Captured
from passes.graph.fx_utils import copy_module, is_collective, shared_values
from passes.graph.metadata import MEMORY, UNSCHEDULED
from passes.pipeline import Pass, Stage, run
from passes.recompute.recompute_activations import recomputed
from passes.simulate.lent import output_bytes, returned_bytes
from passes.simulate.simulator import Simulation, idle_after, simulate
from passes.types.context import Context, Phase
from passes.types.plan import Plan, Prediction


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """The lowered graphs of a plan, their simulations, and the prediction for the step."""

    prediction: Prediction
    forward: fx.GraphModule
    backward: fx.GraphModule
    simulations: tuple[Simulation, Simulation]
    #: Bytes of the base in the forward and in the backward, and the bytes at the optimizer's step.
    base_bytes: tuple[int, int, int]
    #: The base by kind, and the bytes that the forward returns to its caller.
    base: Mapping[str, int]
    returned_bytes: int
    #: Of a folded step: the time of the layers left out, in the forward and in the backward.
    unseen: tuple[Seconds, Seconds]

    def bytes_at(self, places: tuple[Mapping[str, int], Mapping[str, int]]) -> np.ndarray:
        """Bytes alive at each captured node while no collective overlaps compute, then at the
        optimizer's step.

        ``places``: by captured node's name, its place in the forward and in the backward. A node
        that lowering adds counts for the captured node before it.
        """
        curves = []
        for gm, simulation, place_of, base in zip(
            (self.forward, self.backward), self.simulations, places, self.base_bytes, strict=False
        ):
            names = [node.name for node in gm.graph.nodes]
            # Without collectives there is only one schedule.
            own = list(zip(names, simulation.memory.curve, strict=True))
            curve = np.zeros(len(place_of), dtype=np.int64)
            place = 0
            for name, alive_bytes in UNSCHEDULED.get(gm, own):
                place = place_of.get(name, place)
                curve[place] = max(curve[place], base + alive_bytes)
            curves.append(curve)
        return np.concatenate([*curves, [self.base_bytes[2]]])

    def seconds_at(self, places: tuple[Mapping[str, int], Mapping[str, int]]) -> np.ndarray:
        """Seconds of computing at each captured node; 0 at the optimizer's step.

        A model's own collective counts if it leaves our links free.
        """
        found = []
        for gm, place_of in zip((self.forward, self.backward), places, strict=True):
            seconds = np.zeros(len(place_of))
            place = 0
            for node in gm.graph.nodes:
                place = place_of.get(node.name, place)
                cost = cost_of(node)
                if not (is_collective(node) or cost.beside):
                    seconds[place] += cost.seconds
            found.append(seconds)
        return np.concatenate([*found, [0.0]])


def predict(
    captured: Captured | Folded, plan: Plan, ctx: Context, passes: Sequence[Pass]
) -> LoweredStep:
    """Lower a captured step with a plan, and simulate it.

    ``captured``: for a folded step, the graphs lack layers but the prediction covers all of them.
    ``ctx.deciding``: search for an order of collectives; otherwise follow the plan's order.
    ``ctx.base_bytes``: bytes of buffers, the batch, and everything else that is held in addition
    to parameters and optimizer state.
    """
    folded = captured if isinstance(captured, Folded) else None
    graphs = captured.captured if isinstance(captured, Folded) else captured
    with shared_values(graphs.values):
        return _predict(graphs, folded, plan, ctx, passes)


def _predict(
    captured: Captured, folded: Folded | None, plan: Plan, ctx: Context, passes: Sequence[Pass]
) -> LoweredStep:
    laid = lay_out(captured, folded.without_inner(plan) if folded else plan, ctx, passes)
    if folded is not None:
        put_in(laid, folded, plan, ctx)
    state = held_between_steps(ctx, plan)
    returned = returned_bytes(laid.forward.graph, laid.backward.graph)
    buffer_bytes = ctx.gradient_buffers * output_bytes(laid.forward.graph, laid.backward.graph)
    in_flight = buffer_bytes + in_flight_bytes(
        laid.forward, returned, ctx.replace(plan=plan), passes
    )
    held = ctx.base_bytes + sum(state.values()) + in_flight
    lowered: list[fx.GraphModule] = []
    simulations: list[Simulation] = []
    for gm, phase, extra in (
        (laid.forward, Phase.FORWARD, 0),
        (laid.backward, Phase.BACKWARD, returned),
    ):
        local = ctx.replace(plan=plan, phase=phase, base_bytes=held + extra)
        gm = run(passes, Stage.PARTS, gm, local, recompile=False)
        lowered.append(gm)
        simulations.append(simulate(gm.graph, MEMORY.pop(gm), idle_after(simulations)))
    forward, backward = simulations
    unseen = _unseen(folded, plan, lowered, simulations)
    all_unseen = unseen[0].plus(unseen[1])
    update_seconds = optimizer_seconds(ctx, plan)
    base = {**state, **base_kinds(ctx), IN_FLIGHT: in_flight}
    base = _sum(base, more_earlier_gradients(ctx, plan, backward.memory.kept_bytes))
    base = {kind: size_bytes for kind, size_bytes in base.items() if size_bytes}
    peaks = [
        _sum(base, forward.memory.peak),
        _sum(base, backward.memory.peak, {"returned": returned}),
        _sum(base, _between(ctx, forward)),
        at_optimizer(ctx, plan, base, backward.memory.kept_bytes),
    ]
    peak = {k: v for k, v in max(peaks, key=lambda kinds: sum(kinds.values())).items() if v}
    step_seconds = forward.step_seconds + backward.step_seconds + all_unseen.step
    compute_seconds = forward.compute_seconds + backward.compute_seconds + all_unseen.compute
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
    held_bytes = sum(base.values())
    return LoweredStep(
        prediction,
        lowered[0],
        lowered[1],
        (forward, backward),
        (held_bytes, held_bytes + returned, sum(peaks[3].values())),
        base,
        returned,
        unseen,
    )


def in_flight_bytes(
    forward: fx.GraphModule, returned_bytes: int, ctx: Context, passes: Sequence[Pass]
) -> int:
    """Bytes that calls whose backward is still to come hold, beside the one in the graphs.

    ``forward``: before lowering; unchanged. ``returned_bytes``: that it returns to its caller.
    """
    others = ctx.calls_in_flight - 1
    if not others:
        return 0
    kept_bytes = kept_bytes_of(forward, ctx.replace(phase=Phase.FORWARD), passes)
    return others * (kept_bytes + returned_bytes)


def kept_bytes_of(graph: fx.GraphModule, ctx: Context, passes: Sequence[Pass]) -> int:
    """Bytes that a graph leaves alive, whatever the limit.

    ``graph``: before lowering; unchanged.
    """
    unlimited = ctx.replace(limit_bytes=None)
    lowered = run(passes, Stage.PARTS, copy_module(graph), unlimited, recompile=False)
    return simulate(lowered.graph, MEMORY.pop(lowered)).memory.kept_bytes


def _unseen(
    folded: Folded | None,
    plan: Plan,
    lowered: Sequence[fx.GraphModule],
    simulations: Sequence[Simulation],
) -> tuple[Seconds, Seconds]:
    """The time of the layers left out, in the forward and in the backward."""
    ahead, behind = (
        Seconds(0.0, 0.0) if folded is None else seconds_of(folded, plan, gm.graph, simulation)
        for gm, simulation in zip(lowered, simulations, strict=True)
    )
    return ahead, behind


def _between(ctx: Context, forward: Simulation) -> dict[str, int]:
    """Bytes by kind between the two graphs, if another model runs there; else empty."""
    if not ctx.between_bytes:
        return {}
    return {"saved": forward.memory.kept_bytes, OTHER_MODELS: ctx.between_bytes}


def _sum(*parts: dict[str, int]) -> dict[str, int]:
    """The sum of several maps of bytes by kind."""
    total: dict[str, int] = {}
    for part in parts:
        for kind, size_bytes in part.items():
            total[kind] = total.get(kind, 0) + size_bytes
    return total

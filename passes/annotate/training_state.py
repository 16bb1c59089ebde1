"""Training state: bytes of parameters, gradients and optimizer state; the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from passes.annotate.owner_ranks import orthogonal_bytes, orthogonal_seconds
from passes.types.context import Context, Parameter
from passes.types.plan import Plan

#: Reduced gradients of earlier backwards; a backward adds its own to them.
EARLIER_GRADIENTS = "earlier gradients"
#: Bytes held by other models of the process.
OTHER_MODELS = "other models"
LIBRARIES = "libraries"
#: Saved by calls of the model whose backward is still to come (``Context.calls_in_flight``).
IN_FLIGHT = "other microbatches"


def shard_bytes(ctx: Context, plan: Plan, parameter: Parameter) -> int:
    """Bytes of a parameter's largest shard in a plan."""
    row = plan[parameter.name]
    return parameter.shard_bytes(ctx.cut(row.decision).ranks, row.dim)


def state_bytes(ctx: Context, plan: Plan) -> dict[str, int]:
    """Bytes of training state on one rank by kind (``parameters``, ``gradients``, ``optimizer``).

    Gradients count as before the optimizer's step. The bytes are those of rank 0, which has the
    largest shards.
    """
    total = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for parameter in ctx.parameters:
        local = shard_bytes(ctx, plan, parameter)
        total["parameters"] += local
        if parameter.requires_grad:
            total["gradients"] += local
            share = local / parameter.full_bytes if parameter.full_bytes else 1.0
            total["optimizer"] += round(parameter.optimizer_bytes * share)
    return total


def held_between_steps(ctx: Context, plan: Plan) -> dict[str, int]:
    """Bytes that one rank holds during both graphs beside the planner's ``base_bytes``, by kind."""
    state = state_bytes(ctx, plan)
    held = {"parameters": state["parameters"], "optimizer": state["optimizer"]}
    if ctx.adds_gradients:
        held[EARLIER_GRADIENTS] = state["gradients"]
    return held


def optimizer_temporary_bytes(ctx: Context, plan: Plan) -> int:
    """Bytes that an optimizer's step allocates and frees.

    Muon's whole matrices count beside those of :class:`StepBytes`.
    """
    shards = [shard_bytes(ctx, plan, p) for p in ctx.parameters if p.requires_grad]
    most_bytes = StepBytes(ctx).most(np.array(shards, dtype=np.int64))
    return most_bytes + orthogonal_bytes(ctx.parameters, ctx.world_size)


class StepBytes:
    """Bytes that an optimizer's step allocates and frees, of any local shards.

    Source: Adam's step in torch makes ``sqrt(v)`` and ``/ c`` out of place. Its loop over the
    parameters holds this result until the next one's replaces it. On a GPU it takes all parameters
    together (``foreach``): ``sqrt(v)`` of all of them is there at once.
    """

    def __init__(self, ctx: Context) -> None:
        at_once_by_default = ctx.hardware.device_type != "cpu"
        steps = [one.step_tensors for one in ctx.parameters if one.requires_grad]
        together = [at_once_by_default if one.foreach is None else one.foreach for one in steps]
        self._together = np.array(together, dtype=bool)
        self._at_once = np.array([one.at_once for one in steps], dtype=np.int64)
        self._one_by_one = np.array([one.one_by_one for one in steps], dtype=np.int64)

    def most(self, shards: np.ndarray) -> int:
        """The most bytes at a time.

        ``shards``: bytes of all trained local shards, in the order of the parameters.
        """
        before = np.concatenate([[0], shards])[:-1]
        number = self._one_by_one
        alone = np.where(number > 1, (number - 1) * shards + before, number * shards)
        at_once = (self._at_once * shards)[self._together].sum()
        return int(max(at_once, alone[~self._together].max(initial=0)))


def at_optimizer(
    ctx: Context, plan: Plan, base: Mapping[str, int], kept_bytes: int
) -> dict[str, int]:
    """Bytes by kind at the optimizer's step.

    It sees one gradient: those of earlier backwards are in it, and no call is in flight.

    ``base``: bytes by kind that this rank holds beside the graphs. ``kept_bytes``: bytes that the
    backward leaves.
    """
    ended = EARLIER_GRADIENTS, IN_FLIGHT
    return {
        **{kind: size_bytes for kind, size_bytes in base.items() if kind not in ended},
        "gradients": gradient_bytes(ctx, plan, kept_bytes),
        "optimizer step": optimizer_temporary_bytes(ctx, plan),
    }


def gradient_bytes(ctx: Context, plan: Plan, kept_bytes: int) -> int:
    """Bytes of gradients at the start of an optimizer's step.

    ``kept_bytes``: bytes that the backward leaves. It exceeds the gradients' own bytes if a small
    gradient is a view of its bucket and another gradient was copied out of this bucket.
    """
    return max(state_bytes(ctx, plan)["gradients"], kept_bytes)


def more_earlier_gradients(ctx: Context, plan: Plan, kept_bytes: int) -> dict[str, int]:
    """Bytes of earlier gradients beyond those of :func:`held_between_steps`, by kind; often none.

    ``kept_bytes``: bytes that a backward leaves (:func:`gradient_bytes`). Gradients of an earlier
    backward keep their buckets, too; the next backward adds to them in place.
    """
    if not ctx.adds_gradients:
        return {}
    own_bytes = state_bytes(ctx, plan)["gradients"]
    return {EARLIER_GRADIENTS: max(0, kept_bytes - own_bytes)}


def optimizer_seconds(ctx: Context, plan: Plan) -> float:
    """Seconds of an optimizer's step on one rank, with the learned time of the loop around it.

    A plan that shards nothing is priced with plain tensors, as the backend leaves them. After
    ``osdp_compile.shard`` they are DTensors anyway.
    """
    trained = sum(parameter.requires_grad for parameter in ctx.parameters)
    held_bytes = sum(state_bytes(ctx, plan).values())
    seconds = ctx.hardware.update_seconds(held_bytes, trained, plain=not plan.shards)
    seconds += ctx.hardware.in_force.update_factor * orthogonal_seconds(ctx, plan)
    return seconds + ctx.hardware.in_force.loop_seconds


def base_kinds(ctx: Context) -> dict[str, int]:
    """The bytes of the planner's ``ctx.base_bytes`` by kind."""
    named = {
        "accumulated": ctx.accumulated_bytes,
        OTHER_MODELS: ctx.other_models_bytes,
        LIBRARIES: ctx.hardware.library_bytes,
    }
    return {"inputs": ctx.base_bytes - sum(named.values()), **named}

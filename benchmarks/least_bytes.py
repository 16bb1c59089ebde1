"""The least bytes that a rank sends in a step, with weights or activations moving.

A gradient leaves its rank and the sum comes back: ``2 (N-1)/N`` of a weight's bytes with N ranks.
The weights of a move group (``passes/candidates/move_groups.py``) send nothing if activations move
to them. Of each group, the fewer bytes count.
"""

from __future__ import annotations

import dataclasses

from benchmarks.train import Work
from osdp_compile.planning.traced_step import trace
from passes.candidates.move_groups import find_move_groups
from passes.types.hardware import wire_bytes
from passes.types.hardware_presets import PRESETS


def least_bytes(work: Work, ranks: int) -> tuple[float, float]:
    """The least bytes that a rank sends in a step of some work.

    With activations or weights moving, and with weights alone.
    """
    step = dataclasses.replace(trace(work.model(), work.inputs_of(0)), tensor_parallel=True)
    ctx = step.context({"ranks": ranks}, PRESETS["cpu-gloo"], None)
    weights = {one.name: wire_bytes("all_reduce", one.full_bytes, ranks) for one in ctx.parameters}
    of_weights = sum(weights.values())
    spared = 0.0
    for own in find_move_groups(step.captured, ctx).by_weights:
        of_group = sum(weights[name] for name in own[0].dims)
        of_tokens = min(group.token_bytes * len(group.layers) for group in own)
        spared += max(0.0, of_group - of_tokens)
    return of_weights - spared, of_weights

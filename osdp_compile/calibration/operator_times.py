"""Operator times: measured seconds of a step's large operators.

FLOPs over a peak rate are a poor estimate for a thin matrix product, a convolution or an attention:
on a CPU up to ten times off. An operator that Inductor does not fuse is one of torch's own kernels,
so it runs here on made-up inputs of the same shapes and strides.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from osdp_compile.calibration.timed_collectives import synchronize
from osdp_compile.runtime.model_collectives import groups_named
from passes.annotate.annotate_costs import annotate, cost_of, stands_alone
from passes.annotate.kernel_key import kernel_key
from passes.graph.captured import Captured
from passes.graph.fx_utils import bytes_of, concrete
from passes.types.context import Context
from passes.types.hardware import Hardware

log = logging.getLogger("osdp_compile")
_aten = torch.ops.aten

_ROUNDS = 5
#: Runs between two synchronizations with a GPU, which take as long as a small operator.
_RUNS_ON_GPU = 10
#: Operators that add to rows of their first argument; the indices are a list among the others.
_PUTS = {_aten.index_put.default, _aten._unsafe_masked_index_put_accumulate.default}


def with_kernel_seconds(
    captured: Captured, ctx: Context, device: torch.device, seconds: float, most_bytes: int
) -> Hardware:
    """The profile with measured seconds of a step's distinct large operators.

    Args:
        captured: the step; operators with the highest cost by formula are measured first.
        seconds: approximate total duration.
        most_bytes: limit of one operator's inputs and outputs; larger operators are left out.

    The result is the median over several rounds of all operators, because a shared machine has slow
    moments. Operators with times in the profile are not measured again. Operators that are left
    out, or that fail on made-up inputs, keep their cost by formula.
    """
    hardware = ctx.hardware
    for gm in (captured.forward, captured.backward):
        annotate(gm, ctx)
    found = large_operators(captured, most_bytes)
    wanted = [
        (key, node)
        for key, node in sorted(found.items(), key=lambda item: -cost_of(item[1]).seconds)
        if key not in hardware.kernel_seconds
    ]
    taken: dict[str, list[float]] = {}
    deadline = time.perf_counter() + seconds
    for _ in range(_ROUNDS):
        for key, node in list(wanted):
            if time.perf_counter() > deadline:
                break
            try:
                taken.setdefault(key, []).append(_run(node, device))
            except (RuntimeError, TypeError, ValueError) as error:
                log.debug("%s does not run on made-up inputs, priced by formula: %s", key, error)
                wanted.remove((key, node))
    measured = {key: statistics.median_high(times) for key, times in taken.items() if times}
    return dataclasses.replace(hardware, kernel_seconds={**hardware.kernel_seconds, **measured})


def large_operators(captured: Captured, most_bytes: int) -> dict[str, fx.Node]:
    """The distinct operators of a step that run on one rank, by ``kernel_key``.

    These are kernels of torch's own, and custom ones that name no process group.

    ``most_bytes``: limit of one operator's inputs and outputs; larger operators are left out.
    """
    found: dict[str, fx.Node] = {}
    for gm in (captured.forward, captured.backward):
        for node in gm.graph.nodes:
            if not stands_alone(node) or groups_named(node):  # one rank alone would wait for ever
                continue
            held = (node, *node.all_input_nodes)
            if sum(bytes_of(one.meta.get("val")) for one in held) <= most_bytes:
                found.setdefault(kernel_key(node), node)
    return found


def on_made_up_inputs(node: fx.Node, device: torch.device) -> Callable[[], Any]:
    """A function that runs an operator on made-up inputs of its shapes and strides."""
    args: Any = fx.node.map_arg(node.args, lambda source: _like(source.meta["val"], device))
    if node.target in _PUTS:
        args = (args[0], *(_spread(one, args[0].shape) for one in args[1:]))
    kwargs = fx.node.map_arg(node.kwargs, lambda source: _like(source.meta["val"], device))
    operator = node.target
    assert callable(operator)

    def run() -> Any:
        with torch.no_grad():
            return operator(*args, **kwargs)

    return run


def _run(node: fx.Node, device: torch.device) -> float:
    """Seconds of an operator on made-up inputs, after one warm-up run."""
    run = on_made_up_inputs(node, device)
    run()
    runs = _RUNS_ON_GPU if device.type == "cuda" else 1
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    synchronize(device)
    return (time.perf_counter() - begin) / runs


def _spread(value: Any, shape: torch.Size) -> Any:
    """Indices into a tensor of this shape, which differ as those of a batch's words do.

    Additions to one row alone wait for each other: on a GPU ten times as long.

    ``value``: an argument of an operator in ``_PUTS``. Only a list holds indices. All else stays.
    """
    if not isinstance(value, list):
        return value
    return [
        one
        if one is None or one.dtype not in (torch.int32, torch.int64)
        else torch.arange(one.numel(), device=one.device).remainder(size).view(one.shape).to(one)
        for one, size in zip(value, shape, strict=False)
    ]


def _like(value: Any, device: torch.device) -> Any:
    """A real value for a fake one: small floats (no denormals), zeros for other types.

    A tensor of a step on a GPU may be the CPU's, such as the seed of an attention's dropout.
    """
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            device = value.device
        shape, stride = concrete(value.shape), concrete(value.stride())
        made = torch.empty_strided(shape, stride, dtype=value.dtype, device=device)
        return made.fill_(0.01) if value.dtype.is_floating_point else made.zero_()
    if isinstance(value, torch.SymInt):
        return concrete([value])[0]
    return value

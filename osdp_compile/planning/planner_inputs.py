"""Planner inputs: a model's parameters, held bytes and captured step, from its Dynamo graph."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from osdp_compile.errors import OptionError
from osdp_compile.model.find_modules import find_roots, static_inputs
from osdp_compile.model.mixed_precision import Precision
from osdp_compile.model.model_parameters import (
    ModelParameter,
    buffers_of,
    check_shardable,
    model_parameters,
)
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.optim.state_sizes import state_bytes_per_element
from osdp_compile.optim.step_tensors import most_of, step_tensors_of
from osdp_compile.planning.capture import capture
from osdp_compile.runtime.current_call import Call, with_whole_models
from passes.graph.captured import Captured
from passes.pipeline import Pass
from passes.types.context import Context, Parameter, StepTensors

#: Memory that no graph shows: Adam's step counters, and small tensors that a collective's thread
#: frees a moment late.
UNSEEN_BYTES = 1 << 16


def owned_parameters(
    gm: fx.GraphModule, inputs: Sequence[Any], call: Call | None = None
) -> tuple[list[tuple[str, nn.Module]], list[ModelParameter]]:
    """The modules that own the graph's parameters, and all parameters of these modules.

    ``call``: the call if the graph is only a part of it; then the modules are whole models.

    Raises:
        OsdpError: naming a parameter that cannot be sharded.
    """
    roots = step_roots(gm, inputs, call)
    entries = model_parameters(roots)
    check_shardable(entries)
    return roots, entries


def step_roots(
    gm: fx.GraphModule, inputs: Sequence[Any], call: Call | None
) -> list[tuple[str, nn.Module]]:
    """The modules that own the graph's parameters; with ``call``, the whole models.

    Raises:
        OsdpError: naming a parameter that belongs to no module.
    """
    roots = find_roots(gm, inputs)
    return roots if call is None else with_whole_models(roots, call)


def captured_step(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    entries: Sequence[ModelParameter],
    context: Context,
    passes: Sequence[Pass],
) -> Captured:
    """The graph's training step with whole parameters; see :mod:`osdp_compile.planning.capture`."""
    by_id = {id(entry.parameter): entry.name for entry in entries}
    names = {i: by_id[id(value)] for i, value in enumerate(inputs) if id(value) in by_id}
    static = {**static_inputs(gm, inputs), **names}
    return capture(gm, inputs, names, static, context, passes)


def described(
    entry: ModelParameter, optimizers: OptimizerIndex | None, optimizer: int | str | None
) -> Parameter:
    """The passes' description of a parameter.

    ``optimizer``: a name, or bytes of state per element. ``optimizers``: the live optimizers, which
    count if ``optimizer`` is None.
    """
    parameter = entry.parameter
    return Parameter(
        name=entry.name,
        shape=tuple(entry.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        numel=entry.shape.numel(),
        element_bytes=parameter.element_size(),
        requires_grad=parameter.requires_grad,
        optimizer_bytes=_optimizer_bytes(entry, optimizers, optimizer),
        orthogonalized=_orthogonalized(parameter, optimizers, optimizer),
        step_tensors=_step_tensors(parameter, optimizers, optimizer),
    )


def _step_tensors(
    parameter: nn.Parameter, optimizers: OptimizerIndex | None, optimizer: int | str | None
) -> StepTensors:
    """Temporary tensors of the optimizer's step, present or future."""
    if isinstance(optimizer, str):
        return step_tensors_of(optimizer)
    holding = optimizers.holding(parameter) if optimizers is not None and optimizer is None else []
    if optimizers is None or not holding:
        return StepTensors()
    return most_of([optimizers.step_tensors(parameter, one) for one in holding])


def _orthogonalized(
    parameter: nn.Parameter, optimizers: OptimizerIndex | None, optimizer: int | str | None
) -> bool:
    """Whether Muon steps the parameter, as the live optimizers or the option say."""
    if parameter.dim() != 2 or not parameter.requires_grad:
        return False
    if optimizer is not None or optimizers is None:
        return optimizer == "muon"
    return any(isinstance(one, torch.optim.Muon) for one in optimizers.holding(parameter))


def _optimizer_bytes(
    entry: ModelParameter, optimizers: OptimizerIndex | None, optimizer: int | str | None
) -> int:
    """Bytes of optimizer state of the parameter about which the plan decides, present or future."""
    parameter, numel = entry.parameter, entry.shape.numel()
    if not parameter.requires_grad:
        return 0
    if isinstance(optimizer, int):
        return optimizer * numel
    holding = optimizers.holding(parameter) if optimizers is not None and optimizer is None else []
    if optimizers is not None and holding:
        whole_bytes = sum(optimizers.state_bytes(parameter, one) for one in holding)
        return whole_bytes * numel // max(1, parameter.numel())
    per_element = state_bytes_per_element(optimizer or "adamw", parameter.element_size())
    return per_element * numel


def slices_of(
    patterns: Mapping[str, int | tuple[int, int]] | None, parameters: Sequence[Parameter]
) -> tuple[tuple[str, int, int], ...] | None:
    """User-forced slices: (parameter, number of slices, slices kept gathered); None: no force.

    ``patterns``: the option ``slices``. The last matching pattern counts.

    Raises:
        OptionError: naming a pattern that no parameter matches.
    """
    if patterns is None:
        return None
    found: dict[str, tuple[int, int]] = {}
    for pattern, given in patterns.items():
        names = fnmatch.filter([one.name for one in parameters], pattern)
        if not names:
            raise OptionError(f"option 'slices': no parameter's name matches {pattern!r}", "slices")
        found.update(dict.fromkeys(names, (given, 0) if isinstance(given, int) else given))
    return tuple((name, *given) for name, given in sorted(found.items()))


def stays_of(
    patterns: bool | tuple[str, ...], parameters: Sequence[Parameter]
) -> bool | tuple[str, ...]:
    """The option ``tensor_parallel`` with the names of parameters in place of patterns.

    Raises:
        OptionError: naming a pattern that no parameter matches.
    """
    if isinstance(patterns, bool):
        return patterns
    found: dict[str, None] = {}
    for pattern in patterns:
        names = fnmatch.filter([one.name for one in parameters], pattern)
        if not names:
            raise OptionError(
                f"option 'tensor_parallel': no parameter's name matches {pattern!r}",
                "tensor_parallel",
            )
        found.update(dict.fromkeys(names))
    return tuple(found)


def accumulated_bytes_of(entries: Sequence[ModelParameter], precision: Precision) -> int:
    """Bytes of whole gradients for :func:`osdp_compile.no_sync`: twice their size.

    The accumulated gradients, and those of a backward, which all exist before the first is added.
    """
    trained = (entry for entry in entries if entry.parameter.requires_grad)
    return 2 * sum(
        one.shape.numel() * precision.gradient_dtype(one.parameter).itemsize for one in trained
    )


def held_bytes_of(
    roots: Sequence[tuple[str, nn.Module]], inputs: Sequence[Any], entries: Sequence[ModelParameter]
) -> int:
    """Bytes held during the whole step, without parameters and optimizer state.

    Buffers, the batch, and :data:`UNSEEN_BYTES` for memory that no graph shows.
    """
    buffers = {id(one): one for one in buffers_of(roots)}
    buffer_bytes = sum(t.numel() * t.element_size() for t in buffers.values())
    return input_bytes_of(roots, inputs, entries) + buffer_bytes + UNSEEN_BYTES


def input_bytes_of(
    roots: Sequence[tuple[str, nn.Module]], inputs: Sequence[Any], entries: Sequence[ModelParameter]
) -> int:
    """Bytes of the batch."""
    own = {id(entry.parameter) for entry in entries} | {id(one) for one in buffers_of(roots)}
    held = {id(t): t for t in inputs if isinstance(t, torch.Tensor) and id(t) not in own}
    return sum(t.numel() * t.element_size() for t in held.values())

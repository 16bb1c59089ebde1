"""Captured training steps of small models, made as in the first call, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from osdp_compile.model.find_modules import static_inputs
from osdp_compile.planning.capture import capture
from passes.graph.captured import Captured
from passes.pipeline import default_passes
from passes.types.context import Context
from passes.types.hardware import Hardware
from passes.types.plan import Plan
from tests.passes import graphs


def context_of(
    model: nn.Module, world_size: int, hardware: Hardware | None = None, **changes: Any
) -> Context:
    """A context to plan a model's step: no limit, Adam."""
    return Context(
        plan=Plan((), world_size=world_size),
        hardware=hardware or graphs.hardware(),
        parameters=tuple(
            graphs.parameter(name, p.shape, p.dtype, p.requires_grad)
            for name, p in model.named_parameters()
        ),
        world_size=world_size,
        rank=0,
        group_name=graphs.GROUP,
        **changes,
    )


def capture_step(
    model: nn.Module,
    batch: torch.Tensor,
    *,
    world_size: int = 4,
    hardware: Hardware | None = None,
    **changes: Any,
) -> tuple[Captured, Context]:
    """A model's captured step on a batch, and a context to plan it: no limit, Adam."""
    names = {id(p): name for name, p in model.named_parameters()}
    ctx = context_of(model, world_size, hardware, **changes)
    found: list[Captured] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        mine = {i: names[id(value)] for i, value in enumerate(inputs) if id(value) in names}
        static = {**static_inputs(gm, inputs), **mine}
        found.append(capture(gm, inputs, mine, static, ctx, default_passes()))
        return gm.forward

    torch.compiler.reset()
    torch.compile(model, backend=backend, dynamic=False)(batch)
    torch.compiler.reset()
    (captured,) = found
    return captured, ctx

"""In-place sharding: replace a model's parameters by DTensors as a plan says.

A ``DTensor`` parameter of the same name (``Shard`` or ``Replicate()``) replaces every parameter.
All are on one mesh, because ``clip_grad_norm_`` supports no mix: on the flat mesh over all ranks,
or on the mesh of hosts and ranks if the plan shards within hosts. If a plan shards nothing, all
parameters stay plain tensors, as in DDP: an optimizer's step dispatches a dozen operators for each
parameter, and for a small DTensor the dispatch takes longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.model.model_parameters import ModelParameter
from osdp_compile.model.other_dims import local_before
from osdp_compile.optim.checks import replaced
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.optim.replaced_parameter import stands_for
from osdp_compile.runtime.meshes import local_part, placed_like
from osdp_compile.sharding.dtensor_layout import lay_out
from osdp_compile.sharding.parameter_reads import Reading, read_through_markers
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.shard_layout import ShardLayout


def shard_in_place(
    parameters: Sequence[ModelParameter],
    mesh: DeviceMesh,
    ctx: Context,
    optimizers: OptimizerIndex,
    reading: Reading,
) -> list[nn.Parameter]:
    """Replace every parameter by a DTensor parameter with the plan's layout.

    ``mesh``: over all ranks, with the two dimensions of ``ctx.mesh_dims`` if the plan shards within
    hosts; its groups must be registered in eager_markers. ``ctx``: with the plan.

    Optimizers that hold the old parameters get the new ones, and their state gets the same layout.
    Every rank must hold the same values (:mod:`osdp_compile.model.synchronize`). Meta tensors stay
    on the meta device. The old objects of sharded parameters lose their values.

    Returns the new parameters, in the order of ``parameters``.
    """
    renewed: list[nn.Parameter] = []
    for entry in parameters:
        old = entry.parameter
        decision = ctx.plan.decision(entry.name)
        cut = ctx.layout_of(entry.name)
        laid_out = lay_out(old.detach(), mesh, decision, cut, entry.others)
        new = nn.Parameter(laid_out, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)  # user attributes
        if old.grad is not None:
            local = laid_out.to_local().detach()
            new.grad = placed_like(laid_out, _mean_gradient(entry, local, decision, cut))
            old.grad = None
        for module, attribute in entry.places:
            module._parameters[attribute] = new
        optimizers.rebind(
            old, new, partial(lay_out, mesh=mesh, decision=decision, cut=cut, others=entry.others)
        )
        _hand_on_gradients(entry, new, decision, cut)
        replaced(old, entry.name)
        if decision.sharded and old.device.type != "meta":
            _free_whole(old)
        renewed.append(new)
    read_through_markers(parameters, ctx, reading, mesh)
    for entry, new in zip(parameters, renewed, strict=True):
        stands_for(entry.parameter, new)
    return renewed


def keep_in_place(
    parameters: Sequence[ModelParameter],
    ctx: Context,
    reading: Reading,
    renewing: OptimizerIndex | None = None,
) -> list[nn.Parameter]:
    """Keep all parameters plain tensors, for a plan that shards nothing; read them by markers.

    ``renewing``: given if earlier code of the step may have read the parameters already. Then new
    parameter objects of the same memory replace them, in these optimizers too, and get the
    gradients of the old ones.

    Returns the parameters in the given order.
    """
    kept: list[nn.Parameter] = []
    for entry in parameters:
        parameter, decision = entry.parameter, ctx.plan.decision(entry.name)
        cut = ctx.layout_of(entry.name)
        mean = None
        if parameter.grad is not None:
            mean = _mean_gradient(entry, parameter.detach(), decision, cut)
        if renewing is not None:
            old = parameter
            parameter = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
            parameter.__dict__.update(old.__dict__)
            for module, attribute in entry.places:
                module._parameters[attribute] = parameter
            renewing.rebind(old, parameter, lambda value: value)
            _hand_on_gradients(entry, parameter, decision, cut)
            replaced(old, entry.name)
        parameter.grad = mean
        kept.append(parameter)
    read_through_markers(parameters, ctx, reading, None)
    if renewing is not None:
        for entry, new in zip(parameters, kept, strict=True):
            stands_for(entry.parameter, new)
    return kept


def _free_whole(old: nn.Parameter) -> None:
    """Free the memory of a sharded parameter's old object, which the graph and its inputs hold.

    So at most one parameter has both whole and sharded memory at a time. Parameters that autograd
    saved, for example for a penalty computed before the first call, are kept.
    """
    before = local_before(old)
    if before is not None:
        _free(before)
    if not _torch.autograd.is_saved(old):
        _free(old)


def _free(whole: Tensor) -> None:
    """Free a tensor's memory.

    A later read gives no stale values: floating-point values are NaN.
    """
    single = torch.empty((), dtype=whole.dtype, device=whole.device)
    if whole.is_floating_point() and whole.element_size() > 1:  # not all 1-byte types have NaN
        single.fill_(float("nan"))
    whole.data = single.expand(whole.shape)


def _hand_on_gradients(
    entry: ModelParameter, new: nn.Parameter, decision: Decision, cut: ShardLayout
) -> None:
    """Reduce gradients that reach the old parameter, and add them to the new one.

    In the step of the first call, eager code may read the old parameter before any compilation.
    """
    name, held = entry.name, new.detach()
    local = local_part(held)

    def hand_on(old: Tensor) -> None:
        gradient = _torch.autograd.take_gradient(old)
        mean: Tensor = torch.ops.osdp.reduce_grad(
            gradient, local, name, decision.sharded, *cut.marks
        )
        add_gradient(new, mean)

    if entry.parameter.requires_grad:
        entry.parameter.register_post_accumulate_grad_hook(hand_on)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add this rank's part of a gradient to the parameter's gradient."""
    if parameter.grad is not None:
        there = parameter.grad
        local_part(there).add_(gradient)
    elif isinstance(parameter, DTensor):
        parameter.grad = placed_like(parameter, gradient)
    else:
        parameter.grad = gradient


def _mean_gradient(
    entry: ModelParameter, local: Tensor, decision: Decision, cut: ShardLayout
) -> Tensor:
    """The mean over ranks of the parameter's present gradients, in the layout of ``local``."""
    mean: Tensor = torch.ops.osdp.reduce_grad(
        entry.parameter.grad, local, entry.name, decision.sharded, *cut.marks
    )
    return mean

"""Adafactor on parameters that are DTensors: torch's own step, with what it takes over rows whole.

Source: ``torch.optim.Adafactor``, whose arithmetic this has, parameter by parameter. It takes
norms over a gradient's rows and over its columns and goes on with these in place, which DTensors
refuse, as they would have to be summed over the ranks first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def step_on_rows(
    param: DTensor,
    grad: DTensor,
    row_var: Tensor | None,
    col_var: Tensor | None,
    variance: Tensor | None,
    step: Tensor,
    *,
    d: float,
    lr: Tensor | float,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    **_: Any,
) -> None:
    """One parameter's step, in place, and that of its state. Collective.

    Args:
        row_var, col_var: of a parameter ``[..., rows, columns]``, as ``[..., rows, 1]`` and
            ``[..., 1, columns]``, whole (DTensors or not).
        variance: of a vector, a DTensor as the parameter.
        d, lr, beta2_decay, weight_decay, eps1, eps2, maximize: ``torch.optim.Adafactor``'s.
    """
    if maximize:
        grad = -grad  # type: ignore[assignment]
    if eps1 is None:
        eps1 = torch.finfo(param.dtype).eps
    step += 1
    steps, lr = step.item(), float(lr)
    share = steps**beta2_decay
    root = param.numel() ** 0.5
    alpha = max(eps2, _norm(param) / root) * min(lr, steps**-0.5)
    if weight_decay != 0:
        param.mul_(1 - lr * weight_decay)
    if grad.dim() > 1:
        assert row_var is not None and col_var is not None
        estimate = _factored(param, grad * grad, row_var, col_var, share, eps1)
    else:
        assert isinstance(variance, DTensor)
        variance.lerp_(grad * grad, share)
        estimate = variance.to_local().clone()
    own = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad.to_local())
    update = DTensor.from_local(
        own,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    param.to_local().add_(own, alpha=-alpha / max(1.0, _norm(update) / (root * d)))


def _factored(
    param: DTensor, squares: Tensor, row_var: Tensor, col_var: Tensor, share: float, eps1: float
) -> Tensor:
    """This rank's rows of the estimate of the gradient's squares; the factors go on."""
    rows = _go_on(row_var, squares.sum(-1, keepdim=True) / squares.size(-1), share)
    columns = _go_on(col_var, squares.sum(-2, keepdim=True) / squares.size(-2), share)
    rows = rows / rows.mean(dim=-2, keepdim=True).clamp_(min=eps1)
    # Parameters are cut along their first dimension, which a matrix' columns do not have.
    return _part(rows, param) @ (columns if param.dim() == 2 else _part(columns, param))


def _go_on(factor: Tensor, now: Tensor, share: float) -> Tensor:
    """A factor moved by ``share`` towards what it is now, in place; returns it whole."""
    assert isinstance(now, DTensor)
    whole = factor.full_tensor() if isinstance(factor, DTensor) else factor
    moved = whole.lerp(now.full_tensor().to(whole.dtype), share)
    if isinstance(factor, DTensor):  # of a matrix of one row or column it is cut as this is
        factor.to_local().copy_(_part(moved, factor))
    else:
        factor.copy_(moved)
    return moved


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """What this rank has of a whole tensor that is cut along its first dimension as another."""
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements).to_local()


def _norm(tensor: Tensor) -> float:
    """Over all ranks' rows."""
    norm = torch.linalg.vector_norm(tensor)
    assert isinstance(norm, DTensor)
    return norm.full_tensor().item()

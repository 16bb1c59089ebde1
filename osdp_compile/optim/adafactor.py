"""Adafactor's step for DTensor parameters, with whole row and column factors on every rank.

Source of the arithmetic: ``torch.optim.Adafactor``, one parameter at a time. Torch updates the
means over a gradient's rows and columns in place. DTensors refuse that, because these means need a
sum over the ranks first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from osdp_compile.errors import OsdpError
from osdp_compile.runtime.meshes import placed_like


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
    """One step of a parameter and its state, in place. Collective.

    Args:
        row_var, col_var: whole factors ``[..., rows, 1]`` and ``[..., 1, columns]`` of a parameter
            ``[..., rows, columns]`` (DTensors or not).
        variance: of a vector; a DTensor with the parameter's placements.
        d, lr, beta2_decay, weight_decay, eps1, eps2, maximize: as in ``torch.optim.Adafactor``.
    """
    sharded = [one for one in param.placements if not one.is_replicate()]
    if len({one.dim for one in sharded if isinstance(one, Shard)}) > 1 or (
        any(one != sharded[0] for one in sharded)
    ):
        raise OsdpError(
            "torch.optim.Adafactor does not work on parameters that several mesh dimensions "
            "shard (parallelize_module beside backend='osdp'): use another optimizer, such as AdamW"
        )
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
    update = placed_like(param, own)
    param.to_local().add_(own, alpha=-alpha / max(1.0, _norm(update) / (root * d)))


def _factored(
    param: DTensor, squares: Tensor, row_var: Tensor, col_var: Tensor, share: float, eps1: float
) -> Tensor:
    """Update both factors; return this rank's rows of the estimated squared gradient."""
    rows = _go_on(row_var, squares.sum(-1, keepdim=True) / squares.size(-1), share)
    columns = _go_on(col_var, squares.sum(-2, keepdim=True) / squares.size(-2), share)
    rows = rows / rows.mean(dim=-2, keepdim=True).clamp_(min=eps1)
    last = param.dim() - 1
    return _along(rows, param, last) @ _along(columns, param, last - 1)


def _along(factor: Tensor, param: DTensor, reduced: int) -> Tensor:
    """This rank's part of a whole factor; all of it, if ``param`` is cut where it is reduced."""
    cut = any(isinstance(one, Shard) and one.dim == reduced for one in param.placements)
    return factor if cut else _part(factor, param)


def _go_on(factor: Tensor, now: Tensor, share: float) -> Tensor:
    """Move a factor by ``share`` towards ``now``, in place; return the whole factor."""
    assert isinstance(now, DTensor)
    whole = factor.full_tensor() if isinstance(factor, DTensor) else factor
    moved = whole.lerp(now.full_tensor().to(whole.dtype), share)
    if isinstance(factor, DTensor):  # for one row or column: sharded like the parameter
        factor.to_local().copy_(_part(moved, factor))
    else:
        factor.copy_(moved)
    return moved


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor under the placements of ``like``."""
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements).to_local()


def _norm(tensor: Tensor) -> float:
    """The norm over all ranks' rows."""
    norm = torch.linalg.vector_norm(tensor)
    assert isinstance(norm, DTensor)
    return norm.full_tensor().item()

"""Muon's step of sharded or replicated matrices: each is orthogonalized by its owner.

Source of the arithmetic: ``torch.optim.Muon``. The momentum is that of this rank's rows. Torch's
own step makes every rank orthogonalize every matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from osdp_compile import _torch
from osdp_compile.optim.owner_ranks import is_shared, share, update_by_owners
from osdp_compile.runtime.meshes import local_part
from passes.types.context import Context

_handled: list[bool] = []


def share_matrices(parameters: Iterable[tuple[str, nn.Parameter]], ctx: Context) -> None:
    """Record how the ranks share the updates of matrices, and step these by owners from now on.

    ``parameters``: with their names in the plan.
    """
    for name, parameter in parameters:
        share(parameter, name, ctx)
    if not _handled:
        _handled.append(True)
        _torch.optimizers.handle_muon(is_shared, step_by_owners)


def step_by_owners(
    held: Sequence[tuple[nn.Parameter, Tensor, Tensor, float]],
    *,
    orthogonalized: Callable[[Tensor], Tensor],
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """One step of matrices and their momentums, in place. Collective.

    Args:
        held: matrices (:func:`osdp_compile.optim.owner_ranks.is_shared`), each with its gradient,
            its momentum and the learning rate for its shape.
        orthogonalized: of a whole update, in bfloat16.
        decay: factor of the parameters before the update.
        momentum, nesterov: as in ``torch.optim.Muon``.
    """
    by_id = {id(one[0]): one[1:] for one in held}

    def update(parameter: nn.Parameter) -> Tensor:
        grad, moving = map(local_part, by_id[id(parameter)][:2])
        moving.lerp_(grad, 1 - momentum)
        return (grad.lerp(moving, momentum) if nesterov else moving).to(torch.bfloat16, copy=True)

    def apply(parameter: nn.Parameter, part: Tensor) -> None:
        local = local_part(parameter)
        local.mul_(decay)
        local.add_(part, alpha=-by_id[id(parameter)][2])

    parameters = [one[0] for one in held]
    update_by_owners(parameters, update, lambda _, whole: orthogonalized(whole), apply)

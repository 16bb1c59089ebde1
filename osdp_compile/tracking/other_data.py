"""Other data: refuse a mesh that leaves out ranks which train the same parameters on other data.

Gradients are averaged over the ranks of ``options={"mesh": ...}``. A model may communicate with
ranks outside of it. With tensor parallelism these have the same batch: a parameter that is equal on
them has equal gradients there. With a sequence that is sharded over them (context parallelism), or
with batches of their own (expert parallelism), its gradients differ, and the copies would diverge.
So these ranks compare values and gradients before an optimizer's first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.model.other_dims import other_dims_of
from osdp_compile.runtime.meshes import local_part
from osdp_compile.tracking.session import Session, find

#: Equal gradients may round differently on another machine.
_TOLERANCE = 1e-3


def check_same_data(stepping: Sequence[nn.Parameter]) -> None:
    """Refuse a step if ranks outside of a model's mesh have other gradients. Collective.

    ``stepping``: parameters with gradients.

    Raises:
        OsdpError: on every rank of the group, naming the first such parameter.
    """
    models: dict[int, tuple[Session, dict[str, nn.Parameter]]] = {}
    for parameter in stepping:
        found = find(parameter)
        if found is not None and parameter.is_floating_point():
            models.setdefault(id(found[1]), (found[1], {}))[1][found[0]] = parameter
    for session, parameters in models.values():
        if session.mesh is None:  # one rank
            continue
        averaged = set(session.mesh.mesh.flatten().tolist())
        names: Sequence[Any] = session.model_groups
        for name in names:
            group = _torch.distributed.process_group(name)
            ranks = dist.get_process_group_ranks(group)
            if not averaged.issuperset(ranks):
                _check(session, parameters, group, ranks)


def _check(
    session: Session,
    parameters: dict[str, nn.Parameter],
    group: dist.ProcessGroup,
    ranks: Sequence[int],
) -> None:
    names = [one.name for one in session.context.parameters]
    device = next(iter(parameters.values())).device
    # All ranks send the same number of values, also for parameters without gradients.
    own = torch.stack([_figures(parameters.get(name), device) for name in names])
    bounds = torch.stack([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds[0], -bounds[1]
    is_equal = (most[:, :3] == least[:, :3]).all(1)
    differs = (most[:, 3] - least[:, 3]) > _TOLERANCE * most[:, 3]
    wrong = (is_equal & differs).tolist()
    name = next((name for name, one in zip(names, wrong, strict=True) if one), None)
    if name is not None:
        averaged = session.mesh.mesh.flatten().tolist() if session.mesh is not None else []
        raise OsdpError(
            f"parameter {name!r} is equal on the ranks {list(ranks)}, between which the model "
            "communicates, and its gradient differs there: they train it on other data, and "
            f"gradients are averaged over the ranks {averaged}. Give the mesh dimensions of all "
            "ranks with data of their own, such as options={'mesh': mesh['dp', 'cp']}; where the "
            "ranks have the same batch, as with tensor parallelism, correct the model"
        )


def _figures(parameter: nn.Parameter | None, device: torch.device) -> Tensor:
    """Two sums over the values, whether the values may be compared, and the gradient's size.

    Of a parameter that is not compared, or has no gradient, the gradient's size is zero.
    """
    found = torch.zeros(4, dtype=torch.float64, device=device)
    if parameter is None or parameter.grad is None or parameter.grad.layout != torch.strided:
        return found
    values = local_part(parameter.detach()).double()
    if not _is_compared(parameter, values):
        return found
    gradient = local_part(parameter.grad)
    found[0], found[1], found[2] = values.sum(), values.abs().sum(), 1
    found[3] = gradient.detach().double().abs().sum()
    return found


def _is_compared(parameter: nn.Parameter, values: Tensor) -> bool:
    """Whether equal values on all ranks mean that the ranks hold copies of one parameter.

    Each rank's part of a parameter may be constant, as that of a bias is at first.
    """
    others = other_dims_of(parameter)
    if others is not None:
        return all(isinstance(one, Replicate) for one in others.placements)
    return values.numel() > 1 and bool(values.min() < values.max())

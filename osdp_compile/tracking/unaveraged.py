"""Unaveraged: gradients of replicated parameters that differ between ranks, found before a step.

A plan that shards nothing leaves the parameters plain tensors, and gradients are averaged where a
forward reads them. What a script computes with one outside of a forward, ``h @ model.out.weight.T``
say, goes past that: each rank would add its own gradient, and the replicas would drift apart. (With
DTensors torch refuses it.) So before an optimizer's first step ranks compare their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.tracking.session import Session, find

#: Gradients that were averaged are the same to the last bit; what every rank adds of the weights
#: alone may round otherwise on another machine.
_TOLERANCE = 1e-3


def check_averaged(stepping: Sequence[nn.Parameter]) -> None:
    """Refuse a step by gradients of plain parameters that differ between ranks. Collective.

    ``stepping``: parameters with gradients.

    Raises:
        OsdpError: on every rank, naming the first one.
    """
    models: dict[int, tuple[Session, dict[str, nn.Parameter]]] = {}
    for parameter in stepping:
        found = find(parameter)
        if found is not None and not isinstance(parameter, DTensor):
            name, session = found
            models.setdefault(id(session), (session, {}))[1][name] = parameter
    for session, parameters in models.values():
        names = [one.name for one in session.context.parameters]
        differing = _first_that_differs(names, parameters, session.mesh.get_group())
        if differing is not None:
            raise OsdpError(
                f"the gradient of parameter {differing!r} differs between ranks: it was used "
                "outside of a forward, where nothing averages its gradient. Use it inside the "
                "model's forward, or compile the function that does, a loss say: "
                "torch.compile(loss_of, backend='osdp')"
            )


def _first_that_differs(
    names: Sequence[str], parameters: dict[str, nn.Parameter], group: dist.ProcessGroup
) -> str | None:
    device = next(iter(parameters.values())).device
    # All ranks send as many figures, whichever gradients they have.
    sizes = torch.stack([_size(parameters.get(name), device) for name in names])
    least_and_most = torch.cat([-sizes, sizes])
    dist.all_reduce(least_and_most, op=dist.ReduceOp.MAX, group=group)
    least, most = -least_and_most[: len(names)], least_and_most[len(names) :]
    differs = (most - least) > _TOLERANCE * most
    return next((name for name, one in zip(names, differs.tolist(), strict=True) if one), None)


def _size(parameter: nn.Parameter | None, device: torch.device) -> Tensor:
    if parameter is None or parameter.grad is None or parameter.grad.layout != torch.strided:
        return torch.zeros((), dtype=torch.float64, device=device)
    return parameter.grad.detach().abs().sum(dtype=torch.float64)

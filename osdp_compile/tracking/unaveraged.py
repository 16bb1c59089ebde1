"""Unaveraged gradients: refuse a step if gradients of replicated parameters differ between ranks.

A plan that shards nothing leaves the parameters plain tensors. Their gradients are averaged where a
forward reads the parameters. Code that reads a parameter outside of a forward,
``h @ model.out.weight.T`` say, bypasses the average: each rank would add its own gradient, and the
replicas would diverge. (For DTensors torch raises an error.) So ranks compare their gradients
before an optimizer's first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.tracking.session import Session, find

#: Averaged gradients are bitwise equal. A term of the weights alone, which every rank adds by
#: itself, may round differently on another machine.
_TOLERANCE = 1e-3


def check_averaged(stepping: Sequence[nn.Parameter]) -> None:
    """Refuse a step if gradients of plain parameters differ between ranks. Collective.

    ``stepping``: parameters with gradients.

    Raises:
        OsdpError: on every rank, naming the first such parameter.
    """
    models: dict[int, tuple[Session, dict[str, nn.Parameter]]] = {}
    for parameter in stepping:
        found = find(parameter)
        if found is not None and not isinstance(parameter, DTensor):
            name, session = found
            models.setdefault(id(session), (session, {}))[1][name] = parameter
    for session, parameters in models.values():
        if session.mesh is None:  # one rank
            continue
        names = [one.name for one in session.context.parameters]
        differing = _first_that_differs(names, parameters, session.mesh.get_group())
        if differing is not None:
            raise OsdpError(
                f"the gradient of parameter {differing!r} differs between ranks: it was used "
                "outside of a forward, or inside by parameters() and not as an attribute, where "
                "nothing averages its gradient. Use it as an attribute inside the model's forward, "
                "or compile the function that uses it, such as a loss: "
                "torch.compile(loss_of, backend='osdp')"
            )


def _first_that_differs(
    names: Sequence[str], parameters: dict[str, nn.Parameter], group: dist.ProcessGroup
) -> str | None:
    device = next(iter(parameters.values())).device
    # All ranks send the same number of values, also for parameters without gradients.
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

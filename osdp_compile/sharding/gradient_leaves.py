"""Gradient leaves: accumulate whole gradients inside ``no_sync``, without reduction.

Inside :func:`osdp_compile.no_sync` the gradient of a parameter goes to a leaf tensor of the whole
parameter's shape, which takes no memory itself. The leaves belong to the model's
:class:`osdp_compile.sharding.parameter_reads.Reading`. Dynamo guards on them where the traced read
of a parameter looks its leaf up, so it never takes a graph that reduces for one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError


def new_leaves(
    parameters: Iterable[tuple[str, Sequence[int], torch.dtype]], device: torch.device
) -> dict[str, Tensor]:
    """A leaf for each parameter, by name.

    ``parameters``: name, shape before our sharding, and data type of the accumulated gradient.
    """
    return {
        name: torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
        for name, shape, dtype in parameters
    }


def gradients_of(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The accumulated gradients by name. A later backward to these leaves is an error."""
    for leaf in leaves.values():
        leaf.register_hook(_too_late)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _too_late(gradient: Tensor) -> NoReturn:
    raise OsdpError(
        "a backward of what was computed inside no_sync came after it, where its gradients would "
        "be lost: call backward inside, too"
    )


def to_leaf(leaf: Tensor, full: Tensor) -> Tensor:
    """The whole parameter; its gradient goes to a leaf."""
    whole: Tensor = _ToLeaf.apply(full, leaf)  # type: ignore[no-untyped-call, unused-ignore]
    return whole


# Frames that Dynamo could not trace call it; Dynamo must not compile it by itself.
_torch.dynamo.skip_code(to_leaf.__code__)


class _ToLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, leaf: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.to(ctx.dtype)

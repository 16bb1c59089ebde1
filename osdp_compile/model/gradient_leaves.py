"""Gradient leaves: accumulate whole gradients inside ``no_sync``, without reduction.

Inside :func:`osdp_compile.no_sync` the gradient of a parameter goes to a leaf tensor of the whole
parameter's shape, which takes no memory itself. Code that Dynamo traces looks the leaves up, so
they are globals: Dynamo guards on globals, and never takes a graph that reduces for one that does
not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError

#: Keys of the readings (:class:`osdp_compile.model.shard_in_place.Reading`) of models that do not
#: reduce now.
_active: tuple[int, ...] = ()
#: ``"KEY.NAME"`` -> leaf; the key of a reading, the name of a parameter.
_leaves: dict[str, Tensor] = {}


def begin(key: int, parameters: Iterable[tuple[str, Tensor, torch.dtype]]) -> None:
    """Begin to accumulate whole gradients of the parameters of a reading.

    ``parameters``: name, parameter, and the data type of its accumulated gradient.
    """
    global _active
    for name, parameter, dtype in parameters:
        leaf = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)
        _leaves[f"{key}.{name}"] = leaf.requires_grad_()
    _active = (*_active, key)


def end(key: int) -> dict[str, Tensor]:
    """End the accumulation; return the accumulated gradients by name, and drop the leaves."""
    global _active
    _active = tuple(one for one in _active if one != key)
    own = [name for name in _leaves if name.startswith(f"{key}.")]
    leaves = {name.removeprefix(f"{key}."): _leaves.pop(name) for name in own}
    for leaf in leaves.values():
        leaf.register_hook(_too_late)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _too_late(gradient: Tensor) -> NoReturn:
    raise OsdpError(
        "a backward of what was computed inside no_sync came after it, where its gradients would "
        "be lost: call backward inside, too"
    )


def is_active(key: int, name: str | None = None) -> bool:
    """Whether gradients of a reading, or of one of its parameters, accumulate now."""
    return key in _active and (name is None or f"{key}.{name}" in _leaves)


def to_leaf(key: int, name: str, full: Tensor) -> Tensor:
    """The whole parameter; its gradient goes to its leaf."""
    whole: Tensor = _ToLeaf.apply(full, _leaves[f"{key}.{name}"])
    return whole


# Frames that Dynamo could not trace call these two; Dynamo must not compile them by themselves.
_torch.skip_code(is_active.__code__)
_torch.skip_code(to_leaf.__code__)


class _ToLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, leaf: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.to(ctx.dtype)

"""Accumulated: where the gradients of whole parameters add up while nothing is reduced.

Inside :func:`osdp_compile.no_sync` a parameter is read so that its gradient goes to a leaf of the
whole parameter's shape, which takes no memory itself. What is there of them is read by code that
Dynamo traces, so it is kept in globals: on those Dynamo guards, and a graph that reduces is not
taken for one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from osdp_compile import _torch
from osdp_compile.errors import OsdpError

#: The readings (:class:`osdp_compile.model.shard_in_place.Reading`) of models that do not reduce,
#: by their keys.
_active: tuple[int, ...] = ()
#: By the reading's key and the parameter's name.
_leaves: dict[str, Tensor] = {}


def begin(key: int, parameters: Iterable[tuple[str, Tensor, torch.dtype]]) -> None:
    """From now on gradients of the parameters so read add up.

    ``parameters``: name, parameter, and the type in which its gradients add up.
    """
    global _active
    for name, parameter, dtype in parameters:
        leaf = torch.zeros((), dtype=dtype, device=parameter.device).expand(parameter.shape)
        _leaves[f"{key}.{name}"] = leaf.requires_grad_()
    _active = (*_active, key)


def end(key: int) -> dict[str, Tensor]:
    """Gradients are reduced again; gives those that were added up, by name, and keeps none."""
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
    """Whether gradients of parameters that are read so, or of one of them, add up."""
    return key in _active and (name is None or f"{key}.{name}" in _leaves)


def to_leaf(key: int, name: str, full: Tensor) -> Tensor:
    """A whole parameter whose gradient goes to its leaf."""
    whole: Tensor = _ToLeaf.apply(full, _leaves[f"{key}.{name}"])
    return whole


# Called by a frame that Dynamo could not trace, these are not the model's code.
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

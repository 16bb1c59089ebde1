"""Replaced parameters: the objects of before the sharding stand for the parameters of after it.

A list that was made before the first call holds the old objects::

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    ...
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)

The old objects get no gradients, so this would clip nothing. So every operation on an old object,
a read or a write of ``.grad`` too, is one on the new parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from osdp_compile import _torch
from osdp_compile.errors import OsdpError

_NEW = "_osdp_new"


class ReplacedParameter(nn.Parameter):
    """A parameter of before the sharding; operations run on the parameter that replaced it."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _refuse_in_forward()
        args, kwargs = _torch.tensors.tree_map_only(
            ReplacedParameter, _new_of, (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override, unused-ignore]
        return repr(_new_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_new_of(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_of(self).__reduce_ex__(protocol)


def _new_of(old: nn.Parameter) -> nn.Parameter:
    new: nn.Parameter = old.__dict__[_NEW]
    return new


# Dynamo calls this during the trace and does not trace it: the error ends the compilation.
@torch.compiler.assume_constant_result
def _refuse_in_forward() -> NoReturn:
    _torch.dynamo.raise_to_user(
        OsdpError(
            "a forward reads a parameter from a list or another place outside of its module, which "
            "was filled before the model was sharded: read it as the module's attribute, or make "
            "the list an nn.ParameterList"
        )
    )


def stands_for(old: nn.Parameter, new: nn.Parameter) -> None:
    """Run every operation on ``old`` on ``new`` from now on."""
    old.__dict__[_NEW] = new
    old.__class__ = ReplacedParameter

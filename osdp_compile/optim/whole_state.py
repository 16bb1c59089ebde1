"""Whole optimizer state, loaded after the sharding: each rank keeps its part.

``optimizer.load_state_dict`` also takes the tensors of a training without sharding. They fail in
the next step of a sharded parameter. Every rank loads the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile.optim.rebind import stays_whole

#: Sharded parameters -> the function that lays out a whole tensor as the parameter.
_lay_out: Any = WeakTensorKeyDictionary()


def is_laid_out(parameter: nn.Parameter, lay_out: Callable[[Tensor], DTensor]) -> None:
    """Record how a parameter is laid out. ``lay_out`` takes a tensor of the parameter's shape."""
    _lay_out[parameter] = lay_out


def take_parts(optimizer: torch.optim.Optimizer) -> None:
    """Lay out state that is whole, now and after each ``load_state_dict``. Call it once.

    Of torch's optimizers. Those of others may keep whole state at the owner of a parameter.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    _take_parts(optimizer)
    optimizer.register_load_state_dict_post_hook(_take_parts)


def _take_parts(optimizer: torch.optim.Optimizer) -> None:
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        lay_out, state = _lay_out.get(parameter), optimizer.state.get(parameter)
        if lay_out is None or not state:
            continue
        for key, value in state.items():
            if _is_whole(value, parameter) and not stays_whole(key):
                state[key] = lay_out(value)


def _is_whole(value: Any, parameter: nn.Parameter) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.shape == parameter.shape
    )

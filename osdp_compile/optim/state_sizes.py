"""Bytes of state that each known optimizer keeps for a parameter.

Source: the state initialisation of each optimizer in ``torch.optim`` (the tensors of the
parameter's shape in ``state[parameter]``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Optimizer -> number of state tensors of the parameter's shape and dtype.
_TENSORS: dict[str, int] = {
    "adadelta": 2,  # square_avg, acc_delta
    "adafactor": 0,  # not counted: factors of a matrix (one row, one column), a vector's variance
    "adagrad": 1,  # sum
    "adam": 2,  # exp_avg, exp_avg_sq
    "adam_amsgrad": 3,  # and max_exp_avg_sq
    "adamax": 2,  # exp_avg, exp_inf
    "adamw": 2,
    "adamw_amsgrad": 3,
    "asgd": 1,  # ax
    "muon": 1,  # momentum_buffer
    "nadam": 2,  # exp_avg, exp_avg_sq
    "radam": 2,
    "rmsprop": 1,  # square_avg
    "rmsprop_centered": 2,  # and grad_avg
    "rmsprop_momentum": 2,  # and momentum_buffer
    "rprop": 2,  # prev, step_size
    "sgd": 0,
    "sgd_momentum": 1,  # momentum_buffer
}


def known_optimizers() -> list[str]:
    """The allowed names in ``options={"optimizer": name}``."""
    return sorted(_TENSORS)


def state_bytes_per_element(name: str, element_bytes: int) -> int:
    """Bytes of optimizer state for one element of a parameter.

    Raises:
        ValueError: for an unknown name; lists the known ones.
    """
    if name not in _TENSORS:
        raise ValueError(
            f"optimizer {name!r} is not known: give the bytes of state it keeps for one element of "
            f"a parameter (8 for fp32 AdamW), or one of {', '.join(known_optimizers())}"
        )
    return _TENSORS[name] * element_bytes


def optimizer_name(class_name: str, group: Mapping[str, Any]) -> str:
    """The name in this file for an optimizer's class and options.

    An unknown class counts as ``adamw``, the largest of the common ones.
    """
    name = class_name.lower()
    if name == "sgd" and group.get("momentum"):
        return "sgd_momentum"
    if name in ("adam", "adamw") and group.get("amsgrad"):
        return f"{name}_amsgrad"
    if name == "rmsprop" and group.get("momentum"):
        return "rmsprop_momentum"
    if name == "rmsprop" and group.get("centered"):
        return "rmsprop_centered"
    return name if name in _TENSORS else "adamw"

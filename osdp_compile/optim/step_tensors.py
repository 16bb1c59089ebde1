"""Temporary tensors that each known optimizer's step makes.

Source: measured with torch 2.13 (``tests/osdp_compile/optim/test_step_tensors.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from osdp_compile.optim.state_sizes import optimizer_name
from passes.types.context import StepTensors

#: Optimizer -> tensors of a step that takes one parameter after the other, and of one that takes
#: all together, each in tensors of the parameter's size.
_TENSORS: dict[str, tuple[int, int]] = {
    "adadelta": (3, 2),
    "adafactor": (3, 1),
    "adagrad": (2, 2),
    "adam": (3, 1),
    "adam_amsgrad": (3, 1),
    "adamax": (1, 1),
    "adamw": (3, 1),
    "adamw_amsgrad": (3, 1),
    "asgd": (0, 1),
    "muon": (3, 1),
    "nadam": (3, 1),
    "radam": (2, 1),
    "rmsprop": (2, 1),
    "rmsprop_centered": (2, 1),
    "rmsprop_momentum": (2, 1),
    "rprop": (3, 2),
    "sgd": (0, 0),
    "sgd_momentum": (0, 0),
}
#: The least that is counted of a step that takes one parameter after the other: AdamW's.
_LEAST = 3
#: Optimizers that keep the changed gradients of all parameters beside their other tensors.
_KEEPS_GRADIENTS = ("adadelta", "asgd", "nadam", "rmsprop", "sgd")


def step_tensors_of(name: str) -> StepTensors:
    """Of an optimizer that is known by its name in ``options={"optimizer": name}``."""
    one_by_one, at_once = _TENSORS[name]
    foreach = False if name == "muon" else None
    return StepTensors(max(_LEAST, one_by_one), at_once, foreach)


def step_tensors_in(class_name: str, group: Mapping[str, Any]) -> StepTensors:
    """Of an optimizer's class and the options of a parameter group.

    An unknown class counts as ``adamw``. It takes one parameter after the other if it has no option
    ``foreach``.
    """
    if group.get("fused"):
        return StepTensors(_LEAST, 0, foreach=False)
    name = optimizer_name(class_name, group)
    one_by_one, at_once = _TENSORS[name]
    # A decayed, negated or corrected gradient is a tensor of its own.
    decays = group.get("weight_decay") and not name.startswith("adamw")
    if decays or group.get("maximize"):
        one_by_one += bool(decays) + 2 * bool(group.get("maximize"))
        at_once += name.startswith(_KEEPS_GRADIENTS)
    one_by_one += bool(group.get("nesterov"))
    foreach = group.get("foreach", False)
    return StepTensors(max(_LEAST, one_by_one), at_once, foreach)


def most_of(steps: list[StepTensors]) -> StepTensors:
    """Of a parameter that several optimizers step in turn."""
    apart = [one.foreach for one in steps]
    return StepTensors(
        max(one.one_by_one for one in steps),
        max(one.at_once for one in steps),
        True if True in apart else None if None in apart else False,
    )

"""Optimizers built before the first call: found, read for their state, given the new parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from osdp_compile.live_objects import living
from osdp_compile.optim.state_sizes import optimizer_name, state_bytes_per_element

#: State of torch's optimizers that is one number, whatever the parameter, and Adafactor's factors.
_WHOLE = frozenset({"step", "mu_product", "eta", "mu", "row_var", "col_var"})


def stays_whole(name: str) -> bool:
    """Whether an optimizer's state of this name is never cut, whatever its parameter's shape."""
    return name in _WHOLE


class OptimizerIndex:
    """Every living optimizer that holds one of some parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        self.optimizers: list[torch.optim.Optimizer] = [
            candidate
            for candidate in living(torch.optim.Optimizer)
            if _has_groups_of_its_own(candidate)
            and any(id(p) in wanted for group in candidate.param_groups for p in group["params"])
        ]

    def holding(self, parameter: nn.Parameter) -> list[torch.optim.Optimizer]:
        """The optimizers with this parameter in one of their groups."""
        return [
            optimizer
            for optimizer in self.optimizers
            if any(p is parameter for group in optimizer.param_groups for p in group["params"])
        ]

    def rebind(
        self, old: nn.Parameter, new: nn.Parameter, lay_out: Callable[[Tensor], Tensor]
    ) -> None:
        """Put ``new`` where an optimizer holds ``old``, its state laid out by ``lay_out``.

        State with the parameter's shape is laid out like it; step counts and other
        small things stay as they are, also where the parameter is as small.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new] = {
                    key: lay_out(value)
                    if isinstance(value, Tensor)
                    and value.shape == old.shape
                    and not stays_whole(key)
                    else value
                    for key, value in state.items()
                }

    def state_bytes(self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
        """Bytes of state an optimizer holds or will hold for a whole parameter.

        What is there already is counted; before the first step it follows from the class
        and the group's options.
        """
        state = optimizer.state.get(parameter)
        if state:
            return sum(
                v.numel() * v.element_size()
                for v in state.values()
                if isinstance(v, Tensor) and v.dim() > 0
            )
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        per_element = state_bytes_per_element(
            optimizer_name(type(optimizer).__name__, group), parameter.element_size()
        )
        return per_element * parameter.numel()


def _has_groups_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """False for what passes on another optimizer's, which is living too, as accelerate's does."""
    return "param_groups" in vars(optimizer)

"""Optimizers built before the first call: find them, size their state, rebind parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from osdp_compile.live_objects import living
from osdp_compile.optim.state_sizes import optimizer_name, state_bytes_per_element
from osdp_compile.optim.step_tensors import step_tensors_in
from passes.types.context import StepTensors

#: State that stays whole for any parameter: torch's scalar states and Adafactor's factors.
_WHOLE = frozenset({"step", "mu_product", "eta", "mu", "row_var", "col_var"})


def stays_whole(name: str) -> bool:
    """Whether optimizer state of this name is never sharded, for any parameter shape."""
    return name in _WHOLE


class OptimizerIndex:
    """All live optimizers that hold one of the given parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        self.optimizers: list[torch.optim.Optimizer] = [
            candidate
            for candidate in living(torch.optim.Optimizer)
            if _has_groups_of_its_own(candidate)
            and any(id(p) in wanted for group in candidate.param_groups for p in group["params"])
        ]

    def holding(self, parameter: nn.Parameter) -> list[torch.optim.Optimizer]:
        """The optimizers that hold this parameter."""
        return [
            optimizer
            for optimizer in self.optimizers
            if any(p is parameter for group in optimizer.param_groups for p in group["params"])
        ]

    def rebind(
        self, old: nn.Parameter, new: nn.Parameter, lay_out: Callable[[Tensor], Tensor]
    ) -> None:
        """Replace ``old`` by ``new`` in all optimizers; ``lay_out`` shards the state.

        State of the parameter's shape gets the parameter's layout. Other state stays as it is, and
        so do scalars and factors (:func:`stays_whole`) of the parameter's shape.
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
        """Bytes of optimizer state for a whole parameter.

        Counts existing tensors with dimensions; before the first step the bytes follow from the
        optimizer's class and the group's options.
        """
        state = optimizer.state.get(parameter)
        if state:
            return sum(
                v.numel() * v.element_size()
                for v in state.values()
                if isinstance(v, Tensor) and v.dim() > 0
            )
        per_element = state_bytes_per_element(
            optimizer_name(type(optimizer).__name__, _group_of(parameter, optimizer)),
            parameter.element_size(),
        )
        return per_element * parameter.numel()

    def step_tensors(
        self, parameter: nn.Parameter, optimizer: torch.optim.Optimizer
    ) -> StepTensors:
        """Temporary tensors of the optimizer's step on the parameter."""
        return step_tensors_in(type(optimizer).__name__, _group_of(parameter, optimizer))


def _group_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The parameter group that holds the parameter."""
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def _has_groups_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """False for wrappers that forward another live optimizer's groups (accelerate's)."""
    return "param_groups" in vars(optimizer)

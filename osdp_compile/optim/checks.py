"""Optimizer checks: refuse optimizers that would fail with an unclear error, or do nothing.

An optimizer may be built before or after the first call, and may hold the parameters of before the
sharding. So each optimizer is checked right before a step: its first one, and the next one after
its number of parameters changes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.optim.adafactor import step_on_rows
from osdp_compile.optim.dtensor_values import handle_values
from osdp_compile.optim.step_hooks import before_steps
from osdp_compile.optim.whole_state import take_parts
from osdp_compile.optim.written_rows import keep_writes
from osdp_compile.runtime.written_reads import refuse_written_gathered

#: Optimizers whose steps DTensors refuse, with an error that does not help the user.
_NOT_ON_ROWS = ("LBFGS", "Rprop", "SparseAdam")
#: Elementwise in-place operators without a DTensor sharding strategy in torch.
_ON_ROWS_AS_THEY_ARE = ("_fused_sgd_", "_fused_adagrad_")

#: Parameters that sharding replaced -> their names.
_replaced: Any = WeakTensorKeyDictionary()
#: Checked optimizers -> their number of parameters at the check.
_looked_at: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_watching: list[Any] = []


def check_works_on_rows(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not support DTensor parameters.

    Raises:
        OsdpError: naming the optimizer.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _NOT_ON_ROWS:
        raise OsdpError(
            f"torch.optim.{kind.__name__} does not work on a rank's rows of a sharded parameter: "
            "use another one, such as AdamW, or shard nothing, options={'plan': "
            "Plan.uniform(model.named_parameters(), 'replicate', world_size=...)}"
        )


def replaced(old: nn.Parameter, name: str) -> None:
    """Record a parameter that sharding replaced, and check every optimizer from now on."""
    _replaced[old] = name
    if not _watching:
        _watching.append(before_steps(_before_step))
        for operator in _ON_ROWS_AS_THEY_ARE:
            _torch.dtensor.handle_operator(getattr(torch.ops.aten, operator).default, _on_rows)
        _torch.optimizers.handle_adafactor(step_on_rows)
        handle_values()
        keep_writes()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    refuse_written_gathered()
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    looked_at = _looked_at.get(optimizer)
    if looked_at == len(held):
        return
    for parameter in held:
        name = _replaced.get(parameter)
        if name is not None:
            raise OsdpError(
                f"the optimizer holds parameter {name!r} of the unsharded model, which gets no "
                "gradients: build the optimizer from model.parameters()"
            )
    if any(isinstance(parameter, DTensor) for parameter in held):
        check_works_on_rows(optimizer)
    if looked_at is None:
        take_parts(optimizer)
    _looked_at[optimizer] = len(held)


def _on_rows(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operator on the local tensor of each DTensor."""
    local = _torch.tensors.tree_map_only(DTensor, lambda one: one.to_local(), (args, kwargs))
    return operator(*local[0], **local[1])

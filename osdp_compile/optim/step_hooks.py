"""Step hooks: functions that run before or after the step of every optimizer of the user's.

A compiled ``optimizer.step`` would trace a hook, and Dynamo fails on what hooks look at. Dynamo
skips these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

#: Takes an optimizer, and the arguments and keyword arguments of its step.
StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]

#: Optimizers that the package makes to time their steps.
_own: WeakSet[torch.optim.Optimizer] = WeakSet()


def leave_out(optimizer: torch.optim.Optimizer) -> None:
    """Run no hook for this optimizer. Some hooks look for their models among all objects."""
    _own.add(optimizer)


def before_steps(hook: StepHook) -> RemovableHandle:
    """Run a hook before every optimizer's step, until its handle is removed."""
    return register_optimizer_step_pre_hook(_of_users(hook))


def after_steps(hook: StepHook) -> RemovableHandle:
    """Run a hook after every optimizer's step, until its handle is removed."""
    return register_optimizer_step_post_hook(_of_users(hook))


def _of_users(hook: StepHook) -> StepHook:
    def hook_of_users(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in _own:
            hook(optimizer, args, kwargs)

    disabled: StepHook = torch.compiler.disable(hook_of_users)
    return disabled

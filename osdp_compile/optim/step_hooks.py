"""Step hooks: functions that run before or after the step of every optimizer.

A compiled ``optimizer.step`` would trace a hook, and Dynamo fails on what hooks look at. Dynamo
skips these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

#: Takes an optimizer, and the arguments and keyword arguments of its step.
StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]


def before_steps(hook: StepHook) -> RemovableHandle:
    """Run a hook before every optimizer's step, until its handle is removed."""
    return register_optimizer_step_pre_hook(torch.compiler.disable(hook))


def after_steps(hook: StepHook) -> RemovableHandle:
    """Run a hook after every optimizer's step, until its handle is removed."""
    return register_optimizer_step_post_hook(torch.compiler.disable(hook))

"""Test whether code runs inside a forward, where a module's parameters read as whole tensors.

The read of a sharded parameter as a whole tensor is a collective: every rank must do it. In a
forward all ranks do. Elsewhere one rank alone may read, for example to print, and would wait for
the others for ever. There the read returns the stored parameter.

The Python stack decides, at the moment of the read. These count as a forward:

* a call of any module, and a direct call of a module's ``forward``;
* a call of the result of ``torch.compile`` for a function or a method;
* the backward of an ``autograd.Function``, and the recomputation of ``torch.utils.checkpoint``:
  on a GPU the backward runs in a thread of its own, without a forward on its stack.

A parametrization (``torch.nn.utils.parametrize``) computes the weight at every read, by a call of
a module. Such a call counts only if the read itself is inside a forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize

from osdp_compile import _torch

#: Ids of code objects: Python does not cache the hash of a code object.
_FORWARDS = frozenset(
    map(
        id,
        (
            *_torch.dynamo.MODULE_CALLS,
            *_torch.dynamo.COMPILED_CALLS,
            *_torch.autograd.CUSTOM_BACKWARDS,
        ),
    )
)
_CHECKPOINT = torch.utils.checkpoint.__file__
#: The property of a parametrized weight.
_PARAMETRIZE, _PARAMETRIZED = parametrize.__file__, "get_parametrized"


def is_inside_forward() -> bool:
    """Whether the caller runs inside a forward (see the module's docstring)."""
    # Read frame locals last: reading them may keep them alive until the frame ends.
    caller = sys._getframe(1)
    return _is_under(caller, _is_known) or _is_under(caller, _is_a_modules_forward)


def _is_under(frame: FrameType | None, is_forward: Callable[[FrameType], bool]) -> bool:
    """Whether the frame or a frame above it is a forward that no parametrization called."""
    found = False
    while frame is not None:
        if not found:
            found = is_forward(frame)
        elif frame.f_code.co_name == _PARAMETRIZED and frame.f_code.co_filename == _PARAMETRIZE:
            found = False
        frame = frame.f_back
    return found


def _is_known(frame: FrameType) -> bool:
    return id(frame.f_code) in _FORWARDS or frame.f_code.co_filename == _CHECKPOINT


def _is_a_modules_forward(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name != "forward" or code.co_argcount == 0:
        return False
    return isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module)

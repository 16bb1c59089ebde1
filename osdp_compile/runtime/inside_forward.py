"""Whether code runs inside a forward: there a module's parameters are read as whole tensors.

Reading a whole tensor is a collective where the parameter is sharded: every rank must read it.
In a forward all ranks do. Elsewhere one rank alone may read, to print say, and the others would
never answer; there a module gives the parameter as it lies.

The Python stack tells, at the moment of the read. What counts as a forward:

* a call of any module, and a method called ``forward`` that is called by itself;
* a call of what ``torch.compile`` returned for a function or a method;
* the backward of an ``autograd.Function``, and what ``torch.utils.checkpoint`` computes again:
  on a GPU the backward runs in a thread of its own, with no forward on its stack.

A parametrization (``torch.nn.utils.parametrize``) computes the weight whenever it is read, and is
a module that is called: it counts only where it is itself read inside a forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize

from osdp_compile import _torch

#: By identity: Python computes the hash of code anew each time.
_FORWARDS = frozenset(
    map(id, (*_torch.MODULE_CALLS, *_torch.COMPILED_CALLS, *_torch.CUSTOM_BACKWARDS))
)
_CHECKPOINT = torch.utils.checkpoint.__file__
#: The property of a parametrized weight.
_PARAMETRIZE, _PARAMETRIZED = parametrize.__file__, "get_parametrized"


def is_inside_forward() -> bool:
    """Whether the caller runs inside a forward, see the module's docstring."""
    # A frame's locals are looked at last: Python may keep them alive until the frame ends.
    caller = sys._getframe(1)
    return _is_under(caller, _is_known) or _is_under(caller, _is_a_modules_forward)


def _is_under(frame: FrameType | None, is_forward: Callable[[FrameType], bool]) -> bool:
    """Whether a frame, or one that leads to it, is a forward and no parametrization's own."""
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

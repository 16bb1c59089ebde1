"""Module path: the module that a node was traced in, as users name it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

#: Attributes by which torch and libraries reach a submodule.
_BETWEEN = ("_modules", "__dict__")


def module_path(stack: Mapping[str, Any] | None) -> str:
    """The innermost module of a node's ``nn_module_stack``, as ``blocks.0.up``; empty if unknown.

    The caller's name for the model is left out.
    """
    return _path(str(list(stack.values())[-1][0])) if stack else ""


@functools.lru_cache(maxsize=4096)
def _path(expression: str) -> str:
    """``L['self'].__dict__['_modules']['blocks']._modules['0'].up`` as ``blocks.0.up``."""
    parts = re.findall(r"\['?(\w+)'?\]|\.(\w+)", re.sub(r"^[LG]\['\w+'\]", "", expression))
    names = (one or other for one, other in parts)
    return ".".join(name for name in names if name not in _BETWEEN)

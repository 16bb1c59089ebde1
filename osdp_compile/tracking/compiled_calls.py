"""Compiled calls: the operators that compiled code calls, and the run of its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def operator_name(operator: Any) -> str:
    """The name of an operator, equal for its variants in place and with an output."""
    packet = getattr(operator, "overloadpacket", operator)
    return str(packet).removesuffix("_out").rstrip("_")


def around_backward(
    outputs: Sequence[Any], begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """Call ``begin`` before the backward of a compiled function, and ``end`` after it.

    ``outputs``: of its forward. After an error in the backward, autograd does not call ``end``.
    """
    node = next((one.grad_fn for one in outputs if isinstance(one, Tensor) and one.grad_fn), None)
    if node is not None:
        node.register_prehook(lambda _: begin())
        node.register_hook(lambda *_: end())

"""Workspace: temporary memory of an operator while it runs, beside its inputs and results."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from passes.graph.fx_utils import bytes_of, concrete

_aten = torch.ops.aten


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a kernel allocates and frees on a CPU; 0 for an operator without a formula.

    Convolutions only: oneDNN copies operands and results to and from blocked layouts.

    - Forward: the larger of weight + input and the result; transposed, of two results.
    - Backward: the larger of the weight and input + the result's gradient.
    - Backward if oneDNN multiplies columns: at least four weights and the columns that the kernel
      covers in one row of the batch. It does so for kernels wider than 14, and on some CPUs (it
      chooses an algorithm by the instruction set) for inputs lower than the kernel in batches of
      several rows; others take the usual amount.

    Exact for most convolutions of 16 channels, or a multiple; up to 16 times too low or too high
    for others. ``Context.workspaces`` has measured figures.

    Source: memory measured with torch 2.13 on two kinds of CPU.
    """
    if node.target is _aten.convolution.default:
        source, weight = _size(node.args[0]), _size(node.args[1])
        results = 2 if node.args[6] else 1
        return max(source + weight, results * bytes_of(node.meta["val"]))
    elif node.target is _aten.convolution_backward.default:
        gradient, source, weight = (_size(arg) for arg in node.args[:3])
        usual_bytes = max(weight, source + gradient)
        if not _multiplies_columns(node):
            return usual_bytes
        return max(usual_bytes, 4 * weight + _column_bytes(node))
    return 0


#: The widest kernel of oneDNN's direct algorithms for the gradient of a weight.
_WIDEST_DIRECT = 14


def _multiplies_columns(backward: fx.Node) -> bool:
    source, weight = (_shape(arg) for arg in backward.args[1:3])
    if weight[-1] > _WIDEST_DIRECT:
        return True
    return len(source) == 4 and source[0] > 1 and source[2] < weight[2]


def _column_bytes(backward: fx.Node) -> int:
    """Bytes of the kernel's windows at all places of the result, for one row of the batch."""
    gradient, _, weight = (_shape(arg) for arg in backward.args[:3])
    element_bytes: int = _value(backward.args[2]).element_size()
    return prod(weight[1:]) * prod(gradient[2:]) * element_bytes


def _shape(argument: object) -> list[int]:
    return concrete(_value(argument).shape)


def _size(argument: object) -> int:
    return bytes_of(_value(argument))


def _value(argument: object) -> Any:
    assert isinstance(argument, fx.Node)
    return argument.meta["val"]

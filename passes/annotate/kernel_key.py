"""Kernel key: a text for a kernel of torch's own, under which its measurements are kept."""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.fx_utils import concrete


def kernel_key(node: fx.Node) -> str:
    """A text key for a kernel: operator, dtypes, shapes, strides and other arguments."""

    def described(source: fx.Node) -> str:
        value = source.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return str(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{concrete(value.shape)}@{concrete(value.stride())}"

    args = fx.node.map_arg(node.args, described)
    kwargs = fx.node.map_arg(node.kwargs, described)
    return f"{node.target} {args} {kwargs if kwargs else ''}".rstrip()

"""Narrow: a weight that every reader casts down is cast before its gather.

Needs: a joint graph with one ``unshard`` per parameter. Leaves: ``dtype`` on the ``unshard`` of
these weights, and none of their casts.

Before::                              After::

    w = unshard(p)                        w = unshard(p, dtype=bf16)
    a = mm(x, bf16(w))                    a = mm(x, w)
    b = mm(y, bf16(w))                    b = mm(y, w)

Autocast gives such readers, or a model that casts its weights itself. A cast changes each element
by itself, so the numbers are the same. The gather moves half the bytes, and a gathered weight that
is kept takes half the memory. The gradient is reduced in its own dtype, or in ``reduce_dtype``.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.fx_utils import is_cast, set_value
from passes.ops.markers import unshards
from passes.types.context import Context


def narrow(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Move casts of weights before their gathers. See the module's docstring."""
    for node in unshards(gm.graph):
        dtype = _read_as(node)
        if dtype is None:
            continue
        casts = list(node.users)
        node.kwargs = {**node.kwargs, "dtype": dtype}
        set_value(node)
        for one in casts:
            one.replace_all_uses_with(node)
            gm.graph.erase_node(one)
    return gm


def _read_as(node: fx.Node) -> torch.dtype | None:
    """The narrower dtype to which all readers of a weight cast it; None: there is none."""
    whole = node.meta["val"]
    read = {user.meta["val"].dtype if is_cast(user) else None for user in node.users}
    dtype = read.pop() if len(read) == 1 else None
    if dtype not in (torch.bfloat16, torch.float16) or "dtype" in node.kwargs:
        return None
    moved = any(user.meta["val"].device != whole.device for user in node.users)
    return None if moved or dtype.itemsize >= whole.dtype.itemsize else dtype

"""Dynamic shapes: memory of a call with inputs larger than those that the graph was compiled with.

One compiled graph serves all sizes. Its peak is predicted for the sizes of the call that compiled
it. The sizes of the tensors alive at that peak are expressions of symbols. A later call gives the
symbols other values, and so the same tensors have other bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from osdp_compile import _torch
from passes.graph.fx_utils import bytes_of

#: Symbols of a graph's sizes by the index of the input that gives their value.
Symbols = Mapping[int, Any]


def symbols_of(inputs: Sequence[Any]) -> Symbols:
    """The symbols whose values a Dynamo graph takes as inputs; empty: all sizes are fixed."""
    return {
        index: value.node.expr
        for index, value in enumerate(inputs)
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol
    }


def of_symbolic_size(values: Any) -> list[torch.Tensor]:
    """The tensors in nested containers with a symbolic size; they hold no memory."""
    return [
        one
        for one in _torch.tensors.tree_leaves(values)
        if isinstance(one, torch.Tensor)
        and any(isinstance(size, torch.SymInt) for size in one.shape)
    ]


class GrowingPeak:
    """The tensors of symbolic size that are alive at a graph's predicted peak.

    ``graph``: the lowered graph. ``alive``: names of its nodes that are alive at the peak.
    ``inputs``: the Dynamo graph's inputs :func:`of_symbolic_size`. The caller holds them during
    the whole graph.
    """

    def __init__(
        self,
        graph: fx.Graph,
        alive: Collection[str],
        inputs: Sequence[torch.Tensor],
        symbols: Symbols,
    ) -> None:
        self._symbols = symbols
        held = [node.meta.get("val") for node in graph.nodes if node.name in alive]
        values = [*of_symbolic_size(held), *inputs]
        self._predicted_bytes = sum(map(bytes_of, values))
        self._bytes: Any = sum(map(_symbolic_bytes, values))
        self._known: dict[tuple[int, ...], int] = {}

    def more_bytes(self, args: Sequence[Any]) -> int:
        """Bytes at the predicted peak for this call, minus the prediction.

        ``args``: the arguments of the Dynamo graph.
        """
        if isinstance(self._bytes, int):
            return 0
        numbers = tuple(int(args[index]) for index in self._symbols)
        if numbers not in self._known:
            found = self._bytes.subs(dict(zip(self._symbols.values(), numbers, strict=True)))
            # A size that depends on data (a nonzero's) is known at run time only.
            self._known[numbers] = (
                int(found) - self._predicted_bytes if not found.free_symbols else 0
            )
        return self._known[numbers]


def _symbolic_bytes(value: torch.Tensor) -> Any:
    """Bytes as an expression of the graph's symbols."""
    count: Any = value.element_size()
    for size in value.shape:
        count = count * (size.node.expr if isinstance(size, torch.SymInt) else size)
    return count

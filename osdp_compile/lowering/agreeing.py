"""Agree on the tokens of a step: activations move only if all ranks send equal shapes.

A graph in which weights stay where they are gathers the tokens of all ranks
(``passes/move/move_activations.py``), so every rank must send as many. A rank's batch may be
smaller, or a rank may run another graph. So before every call of a graph that reads such a weight,
the ranks compare what they would send: 8 bytes each. If it is equal, the graph runs. If not, every
rank runs another graph for this call, which gathers these weights as it gathers
others. That graph is compiled when it is first needed, for the sizes of the call.

The comparison is the first message of a call. It counts on every graph that reads one of these
weights, whether its own activations move or not, so that all ranks take part in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import checksum, equal_on_all, on_every_rank
from osdp_compile.tracking.larger_inputs import Symbols
from passes.graph.metadata import COLLECTIVE

log = logging.getLogger("osdp_compile")

#: A collective of tokens, as text, and the sizes of its result.
Line = tuple[str, list[Any]]
#: The key of a graph that gathers all weights.
GATHERS_ALL = 0


class Sent:
    """The tokens that graphs send: purposes, operators, shapes and types.

    ``symbols``: symbols of sizes, by the index of the argument that has their value.
    """

    def __init__(
        self, graphs: Iterable[fx.Graph], symbols: Symbols, lines: Sequence[Line] = ()
    ) -> None:
        """``lines``: in place of graphs, those of an earlier start."""
        self._symbols = symbols
        self.lines: list[Line] = list(lines) or [
            (
                f"{COLLECTIVE.of(node)} {node.target} {node.meta['val'].dtype}",
                [
                    size.node.expr if isinstance(size, torch.SymInt) else size
                    for size in node.meta["val"].shape
                ],
            )
            for graph in graphs
            for node in graph.nodes
            if COLLECTIVE.is_set(node) and COLLECTIVE.of(node).tokens
        ]
        self._known: dict[tuple[int, ...], int] = {}

    def key(self, args: Sequence[Any], rank: int) -> int:
        """A number for what a call with these arguments sends. Equal on ranks that send alike."""
        if not self.lines:
            return GATHERS_ALL
        numbers = tuple(int(args[index]) for index in self._symbols)
        if numbers not in self._known:
            values = dict(zip(self._symbols.values(), numbers, strict=True))
            sizes = [
                [size if isinstance(size, int) else size.subs(values) for size in shape]
                for _, shape in self.lines
            ]
            flat = [size for shape in sizes for size in shape]
            if any(not isinstance(size, int) and size.free_symbols for size in flat):
                self._known[numbers] = -1 - rank  # its size is known at run time only
            else:
                text = [
                    f"{line} {list(map(int, shape))}"
                    for (line, _), shape in zip(self.lines, sizes, strict=True)
                ]
                self._known[numbers] = checksum(text)
        return self._known[numbers]


def _size(argument: Any) -> Any:
    """What a compiled graph is for, of an argument."""
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride()
    return argument


def agreeing(
    function: Callable[..., Any],
    key: Callable[[Sequence[Any]], int],
    gathering: Callable[..., Callable[..., Any]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[..., Any]:
    """Wrap a compiled function: ranks that would send other tokens gather weights instead.

    ``key``: gives :meth:`Sent.key` for arguments. ``gathering``: compiles the function that gathers
    all weights, for the inputs of a call. If that fails on a rank, it is an error on every rank.
    """
    made: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by sizes, for which each is compiled

    def agreed(*args: Any, **kwargs: Any) -> Any:
        own = key(args)
        if equal_on_all(own, group, device):
            return function(*args, **kwargs)
        if own != GATHERS_ALL and not made:
            log.warning(
                "the ranks' batches differ in this step: weights that stay where they are travel "
                "in steps like it"
            )
        gathers = on_every_rank(lambda: _gathering(own, args), group)
        return gathers(*args, **kwargs)

    def _gathering(own: int, args: tuple[Any, ...]) -> Callable[..., Any]:
        if own == GATHERS_ALL:
            return function
        sizes = tuple(map(_size, args))
        try:
            if sizes not in made:
                made[sizes] = gathering(*args)
        except Exception as error:
            raise OsdpError(
                "the ranks' batches differ in this step, and the graph that gathers all weights "
                f"does not compile: {error}"
            ) from error
        return made[sizes]

    return _torch.aot_autograd.with_attributes(agreed, function)

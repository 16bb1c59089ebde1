"""Agree on the tokens of a step: activations move only if all ranks send equal shapes.

A graph in which weights stay where they are gathers the tokens of all ranks
(``passes/move/move_activations.py``), so every rank must send as many. A rank's batch may be
smaller, or a rank may run a graph for any batch size. So before every call of a graph that reads
such a weight, the ranks compare what they would send: 8 bytes each. If it is equal, the graph runs.
If not, every rank runs another graph for this call, which gathers these weights as it gathers
others. That graph is compiled when it is first needed.

The comparison is the first message of a call. It counts on every graph that reads one of these
weights, whether its own activations move or not, so that all ranks take part in it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import on_every_rank
from osdp_compile.runtime.collectives import all_gather_single
from passes.graph.metadata import COLLECTIVE

log = logging.getLogger("osdp_compile")

#: The key of a graph that gathers all weights.
GATHERS_ALL = 0


def key_of(graphs: Iterable[fx.Graph]) -> int:
    """A number for the tokens that graphs send: purposes, operators, shapes and types."""
    lines = [
        f"{COLLECTIVE.of(node)} {node.target} {tuple(node.meta['val'].shape)} "
        f"{node.meta['val'].dtype}"
        for graph in graphs
        for node in graph.nodes
        if COLLECTIVE.is_set(node) and COLLECTIVE.of(node).tokens
    ]
    if not lines:
        return GATHERS_ALL
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:7], "little") + 1


def agreeing(
    function: Callable[..., Any],
    key: Callable[[], int],
    gathering: Callable[..., Callable[..., Any]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[..., Any]:
    """Wrap a compiled function: ranks that would send other tokens gather weights instead.

    ``key``: returns :func:`key_of` its graphs. ``gathering``: compiles the function that gathers
    all weights, for the inputs of a call. If that fails on a rank, it is an error on every rank.
    """
    made: list[Callable[..., Any]] = []

    def agreed(*args: Any, **kwargs: Any) -> Any:
        own = key()
        mine = torch.tensor([own], dtype=torch.int64, device=device)
        keys = mine.new_empty([group.size()])
        all_gather_single(keys, mine, group=group)
        if bool((keys == own).all()):
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
        try:
            made.extend([] if made else [gathering(*args)])
        except Exception as error:
            raise OsdpError(
                "the ranks' batches differ in this step, and the graph that gathers all weights "
                f"does not compile: {error}"
            ) from error
        return made[0]

    # Copy the attributes that AOTAutograd sets for Dynamo.
    vars(agreed).update(getattr(function, "__dict__", {}))
    return agreed

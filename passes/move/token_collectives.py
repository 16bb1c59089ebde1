"""Token collectives: the tokens of all ranks, and the own tokens of all ranks' parts.

Gathered tokens are gathered once. Constants are repeated, not gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.annotate.collectives import by_all_to_all
from passes.graph.fx_utils import ALL_TO_ALL, REDUCE_SCATTER, bytes_of, call, compact
from passes.move.placed import Refused
from passes.ops.p2p import EXCHANGE
from passes.ops.packing import SUM_RANKS
from passes.ops.slicing import slice_name
from passes.ops.tables import TOKENS_OF
from passes.shard.lower_markers import after_wait, flat, gather, reduce_rows
from passes.types.plan import Collective

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten


def all_tokens(mover: Mover, tokens: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node:
    """The tokens of all ranks along the first dimension.

    ``node``: the operator that reads them, for these weights.
    """
    found = mover.gathered.get(tokens)
    if found is None:
        found = mover.gathered[tokens] = _gathered(mover, tokens, node, names)
    return found


def _gathered(mover: Mover, tokens: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node:
    if not all(isinstance(size, int) for size in tokens.meta["val"].shape[1:]):
        raise mover.refused(node, "the size of a token is symbolic (dynamic=True)")
    if tokens in mover.constants:
        times = [mover.ranks, *[1] * (tokens.meta["val"].dim() - 1)]
        return mover.emit(_aten.repeat.default, (tokens, times))
    graph, ctx = mover.graph, mover.ctx
    own = tokens if tokens.meta["val"].is_contiguous() else compact(graph, tokens)
    purpose = _purpose(mover, names, gathers=True)
    wait, sent = gather(graph, [own], mover.group, purpose, ctx)
    inner = list(own.meta["val"].shape[1:])
    if sent is None:
        return after_wait(call(graph, _aten.view.default, (wait, [-1, *inner])))
    return after_wait(call(graph, TOKENS_OF, (wait, inner, sent)))


def combined(
    mover: Mover, part: fx.Node, sizes: Sequence[Any], names: frozenset[str], combine: Any
) -> fx.Node:
    """The own tokens of all ranks' parts, which an operator of ``packing`` combines."""
    graph, ctx = mover.graph, mover.ctx
    target = REDUCE_SCATTER
    if ctx.uses_p2p:
        target = EXCHANGE
    elif combine is not SUM_RANKS or by_all_to_all(bytes_of(part.meta["val"]), mover.group, ctx):
        target = ALL_TO_ALL
    is_static = all(isinstance(size, int) for size in part.meta["val"].shape)
    if target is ALL_TO_ALL and not is_static:
        if combine is not SUM_RANKS:
            raise Refused("its largest features are of any number of tokens (dynamic=True)", names)
        target = REDUCE_SCATTER
    purpose = _purpose(mover, names, gathers=False)
    own = part if part.meta["val"].is_contiguous() else compact(graph, part)
    rows = reduce_rows(graph, target, flat(graph, own), mover.ranks, mover.group, purpose, combine)
    return after_wait(call(graph, _aten.view.default, (rows, list(sizes))))


def _purpose(mover: Mover, names: frozenset[str], gathers: bool) -> Collective:
    """The purpose of a collective of tokens. A weight with several has numbers."""
    name = min(names)
    number = mover.purposes.get((gathers, name), 0)
    mover.purposes[gathers, name] = number + 1
    return Collective((slice_name(name, number),), gathers=gathers, tokens=True)

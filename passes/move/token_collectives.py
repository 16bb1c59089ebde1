"""Token collectives: the tokens of all ranks, and the own tokens of all ranks' parts.

Gathered tokens are gathered once. Constants are repeated, not gathered. The chunks of a tensor
(``passes/chunk/chunk_tokens.py``) are gathered one after the other, before the first one is read.
The whole tensor is then joined from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from passes.annotate.collectives import by_all_to_all
from passes.graph.fx_utils import (
    ALL_TO_ALL,
    REDUCE_SCATTER,
    RESHAPES,
    WAIT,
    bytes_of,
    call,
    compact,
)
from passes.graph.metadata import CHUNK
from passes.graph.step_module import saved_input, saved_name
from passes.move.placed import Back, PartialSum, Refused
from passes.ops.p2p import EXCHANGE
from passes.ops.packing import SUM_RANKS
from passes.ops.slicing import slice_name
from passes.ops.tables import TOKENS_OF
from passes.shard.lower_markers import after_wait, flat, gather, reduce_rows, start_collective
from passes.split.split_rules import arguments_of, permuted_dims
from passes.types.plan import Collective

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

_aten = torch.ops.aten


def all_tokens(mover: Mover, tokens: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node:
    """The tokens of all ranks along the first dimension.

    ``node``: the operator that reads them, for these weights.
    """
    if tokens in mover.gathered:
        return mover.gathered[tokens]
    kept = None if mover.kept is None else mover.kept.read_for(mover, tokens)
    if kept is not None:
        mover.gathered[tokens] = kept
        return kept
    _collect(mover, tokens, mover.gathered, lambda one: _gathered(mover, one, node, names))
    return mover.gathered[tokens]


def _collect(
    mover: Mover,
    tokens: fx.Node,
    found: dict[fx.Node, fx.Node],
    collective: Callable[[fx.Node], fx.Node],
) -> None:
    """Add to ``found`` what a collective gives for tokens; one collective for each chunk of them.

    ``found``: by local tensor, the result for the tokens of all ranks.
    """
    whole = tokens.all_input_nodes[0] if CHUNK.is_set(tokens) else tokens
    chunks = _chunks_of(whole, tokens)
    for one in chunks or [tokens]:
        if one not in found:
            found[one] = collective(one)
    if chunks and tokens is whole:
        found[whole] = joined_tokens(mover, [found[one] for one in chunks])


def _chunks_of(whole: fx.Node, tokens: fx.Node) -> list[fx.Node]:
    """The chunks of a tensor in their order: those beside a chunk, else the fewest.

    Attention and an MLP that read the same tensor may have chunks of other sizes.
    """
    found = [one for one in whole.users if CHUNK.is_set(one) and one.target is _aten.slice.Tensor]
    sets: list[list[fx.Node]] = []
    for one in sorted(found, key=lambda one: CHUNK.of(one).index):
        mark, start = CHUNK.of(one), one.args[2]
        before = [s for s in sets if s[-1].args[3] == start and CHUNK.of(s[-1]).count == mark.count]
        if mark.index == 0:
            sets.append([one])
        elif before:
            before[0].append(one)
    beside = [own for own in sets if tokens in own]
    return min(beside or sets, key=len, default=[])


def joined_tokens(mover: Mover, parts: Sequence[fx.Node]) -> fx.Node:
    """Tensors of the tokens of all ranks, joined along each rank's tokens.

    ``parts``: each ``[ranks x tokens, ...]``, the tokens of one rank together.
    """
    by_rank = [_by_rank(mover, one) for one in parts]
    joined = mover.emit(_aten.cat.default, (by_rank, 1))
    return _of_all_ranks(mover, joined)


def sliced_tokens(mover: Mover, node: fx.Node, start: int, stop: int) -> fx.Node:
    """Some tokens of each rank, of a tensor of the tokens of all ranks.

    ``start``, ``stop``: of a rank's own tokens.
    """
    found = mover.emit(_aten.slice.Tensor, (_by_rank(mover, node), 1, start, stop))
    return _of_all_ranks(mover, found)


def _by_rank(mover: Mover, node: fx.Node) -> fx.Node:
    tokens, *inner = node.meta["val"].shape
    sizes = [mover.ranks, tokens // mover.ranks, *inner]
    return mover.emit(_aten.reshape.default, (node, sizes))


def _of_all_ranks(mover: Mover, node: fx.Node) -> fx.Node:
    ranks, tokens, *inner = node.meta["val"].shape
    return mover.emit(_aten.reshape.default, (node, [ranks * tokens, *inner]))


class KeptTokens:
    """Gathered tokens of a forward that the backward reads in place of gathering them again.

    ``read``: by tokens of the forward that the backward reads, the input of the backward.
    """

    def __init__(self, mover: Mover) -> None:
        """``mover``: of the forward. Constants and symbolic sizes are left out."""
        self._gathered: dict[tuple[Any, ...], fx.Node] = {}
        self._chunks: dict[tuple[Any, ...], dict[int, tuple[int, fx.Node]]] = {}
        self.read: dict[fx.Node, fx.Node] = {}
        for own, made in mover.gathered.items():
            if not made.users or own in mover.constants:
                continue
            is_chunk = CHUNK.is_set(own)
            for one, steps in _identities(own.all_input_nodes[0] if is_chunk else own):
                if is_chunk:
                    first, last = arguments_of(own)[2:4]
                    ranges = self._chunks.setdefault((one.name, steps), {})
                    ranges.setdefault(first, (last, made))
                else:
                    self._gathered[one.name, steps] = made

    def read_for(self, mover: Mover, tokens: fx.Node) -> fx.Node | None:
        """The tokens of all ranks in the backward, for this rank's own.

        None: the forward did not gather them, so the backward does.
        """
        for one, steps in _identities(tokens):
            key = saved_name(one), steps
            if one.op != "placeholder":
                continue
            if key in self._gathered:
                return self._input(tokens.graph, self._gathered[key])
            if key in self._chunks:
                place, inputs = 0, []
                while place in self._chunks[key]:
                    place, made = self._chunks[key][place]
                    inputs.append(self._input(tokens.graph, made))
                return joined_tokens(mover, inputs)
        return None

    def _input(self, graph: fx.Graph, made: fx.Node) -> fx.Node:
        """The input of the backward for a tensor of the forward."""
        if made not in self.read:
            first = next(one for one in graph.nodes if isinstance(one.meta.get("val"), Tensor))
            with graph.inserting_before(first):
                self.read[made] = saved_input(graph, made)
        return self.read[made]


def _identities(tokens: fx.Node) -> Iterator[tuple[fx.Node, tuple[tuple[int, ...], ...]]]:
    """The tensors that a tensor is another shape of, each with the changes of shape.

    The forward and the backward have equal ones for equal tokens. None for symbolic sizes.
    """
    source: Any = tokens
    steps = [tuple(tokens.meta["val"].shape)]
    if not all(isinstance(size, int) for size in steps[0]):
        return
    yield source, tuple(steps)
    while source.target in RESHAPES or source.target is _aten.permute.default:
        if source.target is _aten.permute.default:
            steps += [tuple(permuted_dims(source)), tuple(source.args[0].meta["val"].shape)]
        source = source.args[0]
        yield source, tuple(steps)


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


def all_stacked(
    mover: Mover, tokens: fx.Node, node: fx.Node, names: frozenset[str], by_expert: bool
) -> fx.Node:
    """The tokens of all ranks along dimension 1, of ``[experts, tokens, features]``.

    ``by_expert``: for this rank's experts only. Tokens that all experts read are gathered once.
    ``node``: the operator that reads them, for these weights.
    """
    key = tokens, by_expert
    if key not in mover.stacks:
        mover.stacks[key] = _all_stacked(mover, tokens, node, names, by_expert)
    return mover.stacks[key]


def _all_stacked(
    mover: Mover, tokens: fx.Node, node: fx.Node, names: frozenset[str], by_expert: bool
) -> fx.Node:
    experts, *each = tokens.meta["val"].shape
    source: Any = tokens.args[0] if tokens.target is _aten.expand.default else tokens
    if list(source.meta["val"].shape) not in (each, [1, *each]):
        source = tokens
    is_shared = source is not tokens or experts == 1
    if by_expert and not is_shared:
        sizes = [experts // mover.ranks, *each]
        received = _exchanged(mover, tokens, sizes, names, gathers=True)
        turned = mover.emit(_aten.permute.default, (received, [1, 0, 2, 3]))
        whole = [sizes[0], mover.ranks * each[0], each[1]]
        return mover.emit(_aten.reshape.default, (turned, whole))
    if source.meta["val"].dim() == 2:
        gathered = all_tokens(mover, source, node, names)
        stack = mover.emit(_aten.unsqueeze.default, (gathered, 0))
    else:
        turned = mover.emit(_aten.permute.default, (source, [1, 0, 2]))
        gathered = all_tokens(mover, turned, node, names)
        stack = mover.emit(_aten.permute.default, (gathered, [1, 0, 2]))
    if source is tokens:
        return stack
    own = experts // mover.ranks if by_expert else experts
    return mover.emit(_aten.expand.default, (stack, [own, -1, -1]))


def stack_of_own_tokens(mover: Mover, found: PartialSum) -> fx.Node:
    """The results of all experts for the own tokens: each rank has those of its experts."""
    experts, total, features = found.part.meta["val"].shape
    by_rank = [experts, mover.ranks, total // mover.ranks, features]
    turned = mover.emit(_aten.reshape.default, (found.part, by_rank))
    turned = mover.emit(_aten.permute.default, (turned, [1, 0, 2, 3]))
    return _exchanged(mover, turned, by_rank[2:], found.names, gathers=False)


def added_stack(mover: Mover, found: PartialSum) -> fx.Node:
    """The own tokens of the sum of all ranks' parts, of ``[experts, tokens, features]``."""
    turned = mover.emit(_aten.permute.default, (found.part, [1, 0, 2]))
    sizes = [-1, *turned.meta["val"].shape[1:]]
    own = combined(mover, turned, sizes, found.names, SUM_RANKS)
    return compact(mover.graph, mover.emit(_aten.permute.default, (own, [1, 0, 2])))


#: By number of dimensions, and by the dimensions of tokens and features: how the own tokens of a
#: stack come back, by expert and by hidden size.
STACKS: dict[tuple[int, int | None, int], Back] = {
    (3, 1, 0): stack_of_own_tokens,
    (3, 1, 2): added_stack,
}


def features_of_all(mover: Mover, tokens: fx.Node, node: fx.Node, names: frozenset[str]) -> fx.Node:
    """This rank's features of the tokens of all ranks: ``[T, F]`` to ``[N T, F/N]``.

    If the ranks do not divide F, the last ones' features travel with zeros behind them.

    ``node``: the operator that reads them, for these weights.
    """
    features = tokens.meta["val"].shape[1]
    if not isinstance(features, int):
        raise mover.refused(node, "its features are of any number (dynamic=True)")
    most = _most_features(mover, features, names)

    def exchanged(one: fx.Node) -> fx.Node:
        sizes = [-1, mover.ranks, most]
        padded = _padded(mover, one, features, mover.ranks * most)
        by_rank = mover.emit(_aten.reshape.default, (padded, sizes))
        turned = mover.emit(_aten.permute.default, (by_rank, [1, 0, 2]))
        received = _exchanged(mover, turned, sizes[2:], names, gathers=True)
        if mover.divides(features):
            return received
        return mover.emit(_aten.slice.Tensor, (received, 1, 0, mover.layout.own_rows(features)))

    _collect(mover, tokens, mover.exchanged, exchanged)
    return mover.exchanged[tokens]


def own_tokens(mover: Mover, found: PartialSum) -> fx.Node:
    """The features of all ranks for the own tokens: ``[N T, F/N]`` to ``[T, F]``.

    If the ranks do not divide F, the last ones' features travel with zeros behind them.
    """
    tokens, features = found.part.meta["val"].shape[0], found.sizes[-1]
    if not isinstance(tokens, int):
        raise Refused("its tokens are of any number (dynamic=True)", found.names)
    most, own = _most_features(mover, features, found.names), tokens // mover.ranks
    padded = _padded(mover, found.part, features, most)
    received = _exchanged(mover, padded, [own, most], found.names, gathers=False)
    turned = mover.emit(_aten.permute.default, (received, [1, 0, 2]))
    whole = mover.emit(_aten.reshape.default, (turned, [own, mover.ranks * most]))
    if mover.divides(features):
        return whole
    return compact(mover.graph, mover.emit(_aten.slice.Tensor, (whole, 1, 0, features)))


def _most_features(mover: Mover, features: int, names: frozenset[str]) -> int:
    """The most features of a rank.

    Raises:
        Refused: the parts of hosts differ: they are not where equal parts would be.
    """
    layout = mover.layout
    if layout.hosts > 1 and not mover.divides(features):
        raise Refused(f"{mover.ranks} ranks of hosts do not divide the {features} features", names)
    return layout.most_rows(features)


def _padded(mover: Mover, node: fx.Node, features: int, width: int) -> fx.Node:
    """A tensor ``[tokens, ...]`` with zeros behind, up to a width; as it is for equal parts.

    All ranks pad if one does, so that their graphs have the same nodes.
    """
    if mover.divides(features):
        return node
    behind = width - node.meta["val"].shape[1]
    return mover.emit(_aten.constant_pad_nd.default, (node, [0, behind], 0))


def _exchanged(
    mover: Mover, rows: fx.Node, sizes: Sequence[Any], names: frozenset[str], gathers: bool
) -> fx.Node:
    """This rank's part of the rows of every rank, each of some sizes, in an all-to-all."""
    graph, shape = mover.graph, rows.meta["val"].shape
    if not all(isinstance(size, int) for size in shape):
        raise Refused("its tokens are of any number (dynamic=True)", names)
    own = rows if rows.meta["val"].is_contiguous() else compact(graph, rows)
    packed, purpose = flat(graph, own), _purpose(mover, names, gathers)
    if mover.ctx.uses_p2p:
        start = start_collective(graph, EXCHANGE, (packed, mover.ranks, mover.group), purpose)
        wait = call(graph, WAIT, (start,), "exchanged")
        return after_wait(call(graph, TOKENS_OF, (wait, list(sizes), packed)))
    splits = [math.prod(shape) // mover.ranks] * mover.ranks
    start = start_collective(graph, ALL_TO_ALL, (packed, splits, splits, mover.group), purpose)
    wait = call(graph, WAIT, (start,), "exchanged")
    return after_wait(call(graph, _aten.view.default, (wait, [-1, *sizes])))


def _purpose(mover: Mover, names: frozenset[str], gathers: bool) -> Collective:
    """The purpose of a collective of tokens. A weight with several has numbers."""
    name = min(names)
    number = mover.purposes.get((gathers, name), 0)
    mover.purposes[gathers, name] = number + 1
    return Collective((slice_name(name, number),), gathers=gathers, tokens=True)

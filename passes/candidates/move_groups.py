"""Move groups: the weights that can stay where they are together, while activations move.

Needs: a captured step. Leaves: the step unchanged.

A group begins with a weight whose rows, or columns, are features of its product's result. A trial
(``passes/move/move_activations.py``) says which other weights would have to stay too: the bias of
the product, a gate beside it, the weight that contracts the features. A stack of experts' weights
begins a group by expert, and another one by hidden size. The group is complete when
the trial needs no more, in the forward and in the backward. Examples: the two linears of an MLP,
with the first one's bias; the three of a gated MLP; a head with its bias. The table of an embedding
is a group by itself, also where it is the head.
A matrix in no such group is one alone, if that sends fewer bytes than its weight would.
No weight is in two groups: of groups that share one, the one counts that sends fewer bytes for its
weights.

Layers whose names differ only in a number have the same groups.

With hosts of several ranks (``ctx.mesh_dims``), groups are found for the ranks of a host. Each
stands twice where all ranks can share it too: within hosts, and over all ranks. And each of these
stands twice where the backward can read the tokens that the forward gathered: gathering them again,
and keeping them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from passes.annotate.annotate_costs import collective_full_bytes
from passes.candidates.parameter_groups import alike
from passes.chunk.chunk_tokens import run_in_chunks
from passes.graph.captured import Captured
from passes.graph.fx_utils import copy_module, empty_value, fake_mode_of, is_collective
from passes.graph.metadata import COLLECTIVE
from passes.move.experts import ways_to_share
from passes.move.move_activations import rewrite
from passes.move.placed import Refused
from passes.move.spread import constants_of
from passes.ops.markers import REDUCE_GRAD, reduce_grad_of, unshard_of, unshards
from passes.split.split_rules import read_along
from passes.types.context import Context
from passes.types.decision import Decision

_TABLES = {torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default}
#: The most weights and biases of a layer in one group: attention with biases has seven.
_MOST_TOGETHER = 8
#: Tokens are kept if the others are at most this share of all that the group sends.
_MOST_OF = 0.95


@dataclasses.dataclass(frozen=True)
class MoveGroup:
    """Parameters that stay where they are together, in the same way in every layer.

    ``layers``: for each layer, the names and the dimension that the ranks share.
    ``weight_bytes``: of the weights of a layer.
    ``token_bytes``: that a rank sends in a step for a layer, if activations move.
    ``decision``: the ranks that share the weights (all of them, or those of a host), and whether
    the backward reads the gathered tokens of the forward.
    ``has_chunks``: tokens may travel in chunks (``passes/chunk/chunk_tokens.py``).
    ``alone``: the group is one weight. Any operator may read its product
    (``passes/move/products.py``).
    """

    layers: tuple[tuple[tuple[str, int], ...], ...]
    weight_bytes: int
    token_bytes: int
    decision: Decision = Decision.SHARD_REGATHER
    has_chunks: bool = False
    alone: bool = False

    @property
    def more_bytes(self) -> int:
        """Bytes that activations send above those of weights.

        Weights are gathered once, and their gradients reduced.
        """
        return (self.token_bytes - 2 * self.weight_bytes) * len(self.layers)

    @functools.cached_property
    def dims(self) -> dict[str, int]:
        """The dimension of every parameter of the group."""
        return {name: dim for layer in self.layers for name, dim in layer}


@dataclasses.dataclass(frozen=True)
class MoveGroups:
    """The groups of a step, and by weight the reason why it is in none, or in one alone."""

    groups: tuple[MoveGroup, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def by_weights(self) -> list[list[MoveGroup]]:
        """The groups, those of the same weights together."""
        found: dict[tuple[tuple[tuple[str, int], ...], ...], list[MoveGroup]] = {}
        for group in self.groups:
            found.setdefault(group.layers, []).append(group)
        return list(found.values())


def find_move_groups(
    captured: Captured, ctx: Context, left_out: Collection[str] = ()
) -> MoveGroups:
    """All move groups of a step, in the order of the parameters.

    With hosts, the groups within hosts come first.

    ``left_out``: the parameters of the layers that a folded step leaves out.
    """
    decision = Decision.SHARD_HOST_REGATHER if ctx.mesh_dims else Decision.SHARD_REGATHER
    found: list[MoveGroup] = []
    refused: dict[str, str] = {}
    readers = {unshard_of(node).name: node for node in unshards(captured.forward.graph)}
    together = [[ctx.parameters[index].name for index in own] for own in alike(ctx.parameters)]
    constants = constants_of(captured.forward.graph)
    for names in together:
        if not all(one in readers or one in left_out for one in names):
            continue
        dims, reason = _starts(readers[names[0]], ctx, found, constants)
        for dim in dims:
            try:
                found.append(_group(captured, ctx, together, names, dim, decision))
            except Refused as error:
                reason = reason or error.reason
        if reason and not any(names[0] in group.dims for group in found):
            refused.update(dict.fromkeys(names, reason))
    for names in together:
        if names[0] in refused and len(ctx.parameter(names[0]).shape) == 2:
            lone = _lone_group(captured, ctx, names, decision)
            if lone is not None:
                found.append(lone)
    groups = _apart(found)
    if ctx.mesh_dims:
        groups += [other for one in groups if (other := _over_all(captured, ctx, one)) is not None]
    groups += [other for one in groups if (other := _keeping(captured, ctx, one)) is not None]
    return MoveGroups(tuple(groups), refused)


def _starts(
    reader: fx.Node, ctx: Context, found: Sequence[MoveGroup], constants: Collection[fx.Node]
) -> tuple[list[int], str]:
    """The dimensions along which a weight may begin a group, and the reason if there are none.

    ``reader``: its ``unshard``. ``found``: the groups before. ``constants``: tensors that are equal
    on all ranks.
    """
    name = unshard_of(reader).name
    rank = len(ctx.parameter(name).shape)
    if rank == 3:
        return ([], "") if any(name in group.dims for group in found) else ways_to_share(reader)
    tables = [user for user in reader.users if user.target in _TABLES]
    if any(user.args[1] in constants for user in tables):
        return [], "its ids are the same on all ranks"
    along = 0 if tables else read_along(reader)
    if rank != 2 or along is None or any(group.dims.get(name) == along for group in found):
        return [], ""
    return [along], ""


def _lone_group(
    captured: Captured, ctx: Context, names: Sequence[str], decision: Decision
) -> MoveGroup | None:
    """These weights of all layers, each as a group alone; None: their weights are fewer bytes.

    Along the dimension that sends fewer bytes.
    """
    weight_bytes = ctx.parameter(names[0]).full_bytes
    found: list[MoveGroup] = []
    for dim in (0, 1):
        layers = tuple(((name, dim),) for name in names)
        group = MoveGroup(layers, weight_bytes, 0, decision, alone=True)
        try:
            _check_shared(group.dims, ctx, decision)
            token_bytes = _trial(captured, ctx, dict(layers[0]), decision, alone=True)
            if len(layers) > 1:
                _trial(captured, ctx, group.dims, decision, alone=True)
        except Refused:
            continue
        found.append(dataclasses.replace(group, token_bytes=token_bytes))
    fewest = min(found, key=lambda one: one.token_bytes, default=None)
    if fewest is None:
        return None
    least = _keeping(captured, ctx, fewest) or fewest
    if least.more_bytes >= 0:
        return None
    return dataclasses.replace(fewest, has_chunks=_has_chunks(captured, ctx, fewest))


def _over_all(captured: Captured, ctx: Context, group: MoveGroup) -> MoveGroup | None:
    """A group within hosts as one that all ranks share; None: they cannot."""
    decision = Decision.SHARD_REGATHER
    try:
        _check_shared(dict(group.layers[0]), ctx, decision)
        token_bytes = _trial_of_layer(captured, ctx, group, decision)
        if len(group.layers) > 1:
            _trial(captured, ctx, group.dims, decision, alone=group.alone)
    except Refused:
        return None
    return dataclasses.replace(group, token_bytes=token_bytes, decision=decision)


def _keeping(captured: Captured, ctx: Context, group: MoveGroup) -> MoveGroup | None:
    """A group whose gathered tokens are kept; None: the backward gathers hardly any of them again.

    Of an embedding it gathers the ids.
    """
    decision = dataclasses.replace(group.decision, keep=True)
    token_bytes = _trial_of_layer(captured, ctx, group, decision)
    if token_bytes > _MOST_OF * group.token_bytes:
        return None
    return dataclasses.replace(group, token_bytes=token_bytes, decision=decision)


def _apart(found: Sequence[MoveGroup]) -> list[MoveGroup]:
    """Groups that share no weight. Groups that send fewer bytes for their weights come first."""
    chosen: dict[int, MoveGroup] = {}
    for index, group in sorted(
        enumerate(found), key=lambda one: one[1].token_bytes / one[1].weight_bytes
    ):
        if all(group.dims.keys().isdisjoint(other.dims) for other in chosen.values()):
            chosen[index] = group
    return [group for _, group in sorted(chosen.items())]


def _group(
    captured: Captured,
    ctx: Context,
    together: Sequence[Sequence[str]],
    names: Sequence[str],
    dim: int,
    decision: Decision,
) -> MoveGroup:
    """The group that begins with these weights of all layers; the first layer decides.

    ``dim``: the dimension of these weights that the ranks share.

    Raises:
        Refused: there is no such group.
    """
    chosen = {names[0]: dim}
    token_bytes: int | None
    while True:
        _check_shared(chosen, ctx, decision)
        try:
            token_bytes = _trial(captured, ctx, chosen, decision)
            break
        except Refused as error:
            more = {name: dim for name, dim in error.needs if name not in chosen}
            if not more and error.adds and len(names) > 1:
                token_bytes = None  # the trial of all layers gives it
                break
            if not more or len(chosen) + len(more) > _MOST_TOGETHER:
                raise
            chosen |= more
    members = {own[0]: own for own in together}
    if any(name not in members or len(members[name]) != len(names) for name in chosen):
        raise Refused("its layers are not alike")
    layers = tuple(
        tuple((members[name][place], dim) for name, dim in chosen.items())
        for place in range(len(names))
    )
    weight_bytes = sum(ctx.parameter(name).full_bytes for name in chosen)
    found = MoveGroup(layers, weight_bytes, token_bytes or 0, decision)
    if len(layers) > 1:
        of_all = _trial(captured, ctx, found.dims, decision)
        if token_bytes is None:
            found = dataclasses.replace(found, token_bytes=of_all // len(layers))
    return dataclasses.replace(found, has_chunks=_has_chunks(captured, ctx, found))


def _check_shared(dims: Mapping[str, int], ctx: Context, decision: Decision) -> None:
    """Refuse parameters of which a rank would have nothing.

    Raises:
        Refused: naming the first one.
    """
    layouts = [ctx.cut(decision)]
    if ctx.mesh_dims and not decision.within_host:
        layouts.append(dataclasses.replace(layouts[0], hosts=ctx.mesh_dims[0].size))
    for name, dim in dims.items():
        size = ctx.parameter(name).shape[dim]
        if not all(one.fewest_rows(size) for one in layouts):
            raise Refused(f"{layouts[0].ranks} ranks are too many for the {size} of {name}")


def _has_chunks(captured: Captured, ctx: Context, group: MoveGroup) -> bool:
    """Whether tokens may travel to a group in chunks: tried with two."""
    try:
        _trial_of_layer(captured, ctx, group, group.decision, chunks=2)
    except Refused:
        return False
    return True


def _trial_of_layer(
    captured: Captured, ctx: Context, group: MoveGroup, decision: Decision, chunks: int = 1
) -> int:
    """The bytes of a layer: of the first one alone, or of all of them if one cannot be alone.

    Raises:
        Refused: an operator has no rule.
    """
    count = len(group.layers)
    try:
        return _trial(captured, ctx, dict(group.layers[0]), decision, chunks, group.alone)
    except Refused as error:
        if not error.adds or count == 1:
            raise
    return _trial(captured, ctx, group.dims, decision, chunks, group.alone) // count


def _trial(
    captured: Captured,
    ctx: Context,
    dims: Mapping[str, int],
    decision: Decision,
    chunks: int = 1,
    alone: bool = False,
) -> int:
    """The bytes that a rank sends for activations that move to these weights.

    ``alone``: each of them is a group.

    Raises:
        Refused: an operator has no rule.
    """
    lone = frozenset(dims) if alone else frozenset[str]()
    graphs = [copy_module(captured.forward), copy_module(captured.backward)]
    for gm in graphs:
        _set_shards(gm.graph, ctx, dims, decision)
    if chunks > 1:
        weights = {n: (d, chunks) for n, d in dims.items() if len(ctx.parameter(n).shape) > 1}
        whole = run_in_chunks(graphs, weights, lone)
        if whole:
            raise Refused(min(whole.values()), frozenset(whole))
    layout = ctx.cut(decision)
    rewrite(graphs, dims, ctx, layout, decision.keep, lone)
    full_bytes = sum(
        collective_full_bytes(node)
        for gm in graphs
        for node in gm.graph.nodes
        if is_collective(node) and COLLECTIVE.of(node).tokens
    )
    return full_bytes * (layout.ranks - 1) // layout.ranks


def _set_shards(graph: fx.Graph, ctx: Context, dims: Mapping[str, int], decision: Decision) -> None:
    """Give the parameters the shapes of their shards."""
    shards = {unshard_of(node).shard: unshard_of(node).name for node in unshards(graph)}
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        shards[reduce_grad_of(node).shard] = reduce_grad_of(node).name
    with fake_mode_of(graph):
        for shard, name in shards.items():
            if name in dims:
                local = list(ctx.parameter(name).shape)
                local[dims[name]] = ctx.cut(decision).own_rows(local[dims[name]])
                shard.meta["val"] = empty_value(shard.meta["val"], local)

"""Slice groups: the parameters that can run in slices, in groups that are split together.

Needs: a captured step. Leaves: the step unchanged.

A large weight can be sliced along the dimension that becomes a dimension of its product's result
(the output features of a linear). If a later product contracts that dimension, its weight must be
sliced in the same way; otherwise the slices are joined in between. Examples: the two linears of an
MLP, and a gate beside the first. A trial split (``passes/split/split_operators.py``) finds these
groups: each tensor that it must cut slices from leads to the weight that decides the tensor's size.

If the product of a weight is larger than the weight (such as a head with a large vocabulary), the
rows of its input can be sliced instead. Saved tensors after the product are then recomputed,
because otherwise they exist as a whole.

Layers whose names differ only in a number are split in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx
from torch import fx

from passes.candidates.parameter_groups import alike
from passes.graph.captured import Captured
from passes.graph.dependencies import dependency_graph
from passes.graph.fx_utils import bytes_of, copy_module, root_of
from passes.ops.markers import unshard_of, unshards
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.split.split_operators import Splitter
from passes.split.split_rules import PRODUCTS, along_weight, read_along
from passes.types.context import Context, Parameter
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT, Plan, Split, shardable

#: The most weights of a layer in one group: a gated MLP has three.
_MOST_TOGETHER = 3
#: Do not split weights smaller than this share of the largest weight.
_SMALL = 0.1
#: Least ratio of the longer to the shorter dimension of a head's weight.
_MANY = 4


@dataclasses.dataclass(frozen=True)
class SliceGroupInstance:
    """The part of a slice group in one layer.

    ``along``: for each parameter its name, the sliced dimension, and the parameter whose rows are
    sliced in the same way, or None (:class:`passes.types.plan.Split`).
    ``size_bytes``: bytes alive at once without slices: the weights, or the product if the rows of
    its input are sliced.
    ``recompute``: keys of the saved tensors that must be recomputed for slices to save memory.
    """

    along: tuple[tuple[str, int, str | None], ...]
    size_bytes: int
    recompute: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SliceGroup:
    """Parameters that are split together, in the same way in every layer."""

    layers: tuple[SliceGroupInstance, ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of all parameters in the group."""
        return frozenset(name for layer in self.layers for name, _, _ in layer.along)

    @property
    def recompute(self) -> tuple[str, ...]:
        """The keys to recompute, of all layers."""
        return tuple(key for layer in self.layers for key in layer.recompute)

    @property
    def layer_bytes(self) -> int:
        """Bytes alive at once without slices, of the largest layer."""
        return max(layer.size_bytes for layer in self.layers)

    @property
    def of_input(self) -> bool:
        """Whether the rows of the input are sliced, and not the weights."""
        return self.layers[0].along[0][1] == OF_INPUT

    def is_in(self, other: SliceGroup) -> bool:
        """Whether ``other`` slices all parameters of this group.

        If there are several, the dimensions must agree too.
        """
        own, theirs = (
            {name: along for name, along, _ in slice_group.layers[0].along}
            for slice_group in (self, other)
        )
        return own.keys() <= theirs.keys() and (len(own) == 1 or own.items() <= theirs.items())

    def into(self, slices: int) -> tuple[Split, ...]:
        """The splits of all its parameters into this number of slices."""
        return tuple(
            Split(name, slices, along, like)
            for layer in self.layers
            for name, along, like in layer.along
        )

    def most_kept(self, slices: int) -> int:
        """The number of slices of all weights of a layer: the most that can be kept gathered."""
        return slices * len(self.layers[0].along)

    def keeping(self, slices: int, kept: int) -> dict[str, int]:
        """By weight, the number of kept slices, if each layer keeps ``kept`` slices.

        The last weight of a layer comes first: the backward reads it first, before any compute
        that its gather could hide behind.
        """
        return {
            name: min(max(kept - place * slices, 0), slices)
            for layer in self.layers
            for place, (name, _, _) in enumerate(reversed(layer.along))
        }


def find_slice_groups(
    captured: Captured, ctx: Context, left_out: Collection[str] = ()
) -> list[SliceGroup]:
    """All slice groups, the largest first, without weights much smaller than the largest.

    ``left_out``: parameters that a folded step leaves out. They are split as the others of their
    layers are.
    """
    largest = max((one.full_bytes for one in ctx.parameters if len(one.shape) > 1), default=0)
    return _families(captured, ctx, round(_SMALL * largest), left_out)


def _families(
    captured: Captured, ctx: Context, least_bytes: int = 0, left_out: Collection[str] = ()
) -> list[SliceGroup]:
    """Slice groups, the largest first, without those contained in a larger one.

    A single matrix is contained in a group that slices it. Several matrices are contained in a
    group that slices them along the same dimensions. (In a GPT, the two linears of an MLP can be
    sliced along their hidden dimension, or together with the weight before along the residual
    stream: these are two groups.) Groups that slice the rows of an input, and groups with weights
    of more than two dimensions, always stay.

    ``least_bytes``: ignore weights smaller than this.
    """
    found = sorted(_all(captured, ctx, least_bytes, left_out), key=lambda one: -one.layer_bytes)
    kept: list[SliceGroup] = []
    for one in found:
        within = any(one.is_in(other) for other in kept if not other.of_input)
        batched = any(len(ctx.parameter(name).shape) > 2 for name in one.names)
        if one.of_input or batched or not within:
            kept.append(one)
    return kept


def _all(
    captured: Captured, ctx: Context, least_bytes: int, left_out: Collection[str]
) -> Iterator[SliceGroup]:
    graph = captured.forward.graph
    readers = {unshard_of(node).name: node for node in unshards(graph)}
    read = {*readers, *left_out}
    groups = [[ctx.parameters[index] for index in own] for own in alike(ctx.parameters)]
    for members in groups:
        large = [one for one in members if len(one.shape) > 1 and one.name in read]
        first = members[0]
        if len(large) < len(members) or not _sliceable(first.shape, ctx):
            continue
        if first.full_bytes < least_bytes:
            continue
        along = read_along(readers[first.name])
        if along is not None:
            yield _together(captured, ctx, groups, members, along)
        if len(members) == 1:
            yield from _by_input(captured, readers[first.name], first)


def _sliceable(shape: tuple[int, ...], ctx: Context) -> bool:
    """Whether a parameter can be sliced: what can be sharded, by one rank too."""
    return shardable(shape, max(2, ctx.world_size))


def splits_by_hand(captured: Captured, ctx: Context) -> tuple[tuple[Split, ...], tuple[str, ...]]:
    """The user-forced slices (``ctx.slices``), with the weights that must be sliced with them.

    Also returns the keys of the saved tensors that must be recomputed. If a weight's product is
    larger than the weight, the rows of its input are sliced.

    Raises:
        ValueError: a parameter cannot run in slices, its slices cannot be kept, or two requests
            give it different numbers of slices. The message names the parameter.
    """
    slice_groups = _families(captured, ctx)
    found: dict[str, Split] = {}
    again: dict[str, None] = {}
    # One rank gathers nothing, and keeps no slice.
    asked = [(one, n, kept if ctx.world_size > 1 else 0) for one, n, kept in ctx.slices or ()]
    kept_of = {name: kept for name, _, kept in asked}
    for name, slices, kept in asked:
        if slices == 1:
            continue
        own = [
            (slice_group.of_input, layer)
            for slice_group in slice_groups
            for layer in slice_group.layers
            if name in {one for one, _, _ in layer.along}
        ]
        if not own:
            raise ValueError(
                f"parameter {name!r} cannot run in slices: no product or embedding reads it, or "
                "it is too small to be sharded"
            )
        of_input, layer = max(own, key=lambda pair: _meant(name, *pair))
        if of_input and kept:
            raise ValueError(
                f"parameter {name!r} is gathered whole, because the rows of its input are sliced: "
                f"{kept} of {slices} slices cannot be kept"
            )
        again.update(dict.fromkeys(layer.recompute))
        for one, along, like in layer.along:
            split = Split(one, slices, along, like, kept_of.get(one, kept))
            if found.setdefault(one, split).slices != slices:
                raise ValueError(
                    f"parameters {name!r} and {one!r} run in slices together, and have "
                    f"{slices} and {found[one].slices} slices: give both one number"
                )
    return tuple(sorted(found.values())), tuple(again)


def _meant(name: str, of_input: bool, layer: SliceGroupInstance) -> tuple[bool, bool, int]:
    """Rank how well a group matches the named parameter.

    A group that slices the rows of its input is best, then a group that begins with the parameter,
    then the smallest group.
    """
    return of_input, layer.along[0][0] == name, -len(layer.along)


def _together(
    captured: Captured,
    ctx: Context,
    groups: Sequence[Sequence[Parameter]],
    heads: Sequence[Parameter],
    along: int,
) -> SliceGroup:
    """The slice group of corresponding weights, with the weights that must be sliced with them.

    The first layer decides for all layers.
    """
    group_of = {one.name: group for group in groups for one in group}
    size = heads[0].shape[along]
    chosen = {heads[0].name: along}
    while True:
        more = {}
        for name, dim in _cut_out(captured, ctx, chosen):
            group = group_of[name]
            first, shape = group[0], group[0].shape
            alike_ones = name == first.name and len(group) == len(heads)
            if name in chosen or not alike_ones:
                continue
            if shape[dim] == size and _sliceable(shape, ctx):
                more[name] = dim
        if len(chosen) + len(more) > _MOST_TOGETHER:  # the dimension goes beyond one layer
            chosen = {heads[0].name: along}
            break
        if not more:
            break
        chosen.update(more)
    leader = _leader(chosen)
    layers = []
    for place in range(len(heads)):
        own = {name: group_of[name][place] for name in chosen}
        like = None if leader is None else own[leader].name
        rows = [(own[n].name, dim, like if dim else None) for n, dim in chosen.items()]
        layers.append(SliceGroupInstance(tuple(rows), sum(one.full_bytes for one in own.values())))
    return SliceGroup(tuple(layers))


def _leader(chosen: Mapping[str, int]) -> str | None:
    """The weight whose rows are sliced; the other weights follow the slices of its rows."""
    return next((name for name, dim in chosen.items() if dim == 0), None)


def _cut_out(captured: Captured, ctx: Context, chosen: Mapping[str, int]) -> list[tuple[str, int]]:
    """The weights, and their dimensions, that slices must be cut from if ``chosen`` is split."""
    leader = _leader(chosen)
    named = [(one.name, one) for one in ctx.parameters]
    plan = Plan.uniform(named, Decision.SHARD_REGATHER, world_size=ctx.world_size)
    rows = []
    for row in plan.parameters:
        if row.name in chosen:
            along = chosen[row.name]
            like = leader if along else None
            row = dataclasses.replace(row, slices=2, along=along, like=like)
        rows.append(row)
    plan = plan.replace(parameters=tuple(rows))
    trial = Splitter(
        copy_module(captured.forward).graph, ctx.replace(plan=plan), {}, _MOST_TOGETHER
    )
    trial.run()
    return list(trial.weights_cut)


def _by_input(captured: Captured, marker: fx.Node, one: Parameter) -> Iterator[SliceGroup]:
    """The group that slices the rows of a weight's input, if this can save memory.

    The product must be at least as large as the weight, and one dimension of the weight at least
    ``_MANY`` times the other, as in a head with a large vocabulary.
    """
    product = _product_of(marker)
    if product is None:
        return
    size_bytes = bytes_of(product.meta["val"])
    if size_bytes >= one.full_bytes and max(one.shape) >= _MANY * min(one.shape):
        again = tuple(_after(captured, product))
        yield SliceGroup((SliceGroupInstance(((one.name, OF_INPUT, None),), size_bytes, again),))


def _product_of(marker: fx.Node) -> fx.Node | None:
    """The only two-dimensional product with a weight as right operand; None: none or several."""
    found = [
        node
        for node in marker.graph.nodes
        if node.target in PRODUCTS
        and len(node.meta["val"].shape) == 2
        and (origin := along_weight(node, 1)) is not None
        and origin[0] == unshard_of(marker).name
    ]
    return found[0] if len(found) == 1 else None


def _after(captured: Captured, product: fx.Node) -> list[str]:
    """Keys of saved tensors that depend on a product and have at least half of its bytes.

    The product itself is included. Tensors that cannot be recomputed are not.
    """
    cut = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    keys = keys_of(captured.forward.graph)
    size_bytes = bytes_of(product.meta["val"])
    behind = {product, *nx.descendants(dependency_graph(product.graph), product)}
    return [
        keys[node]
        for node in sorted(cut.saved)
        if node in behind
        and node in keys
        and 2 * bytes_of(root_of(node).meta["val"]) >= size_bytes
        and cut.chain(node) is not None
    ]

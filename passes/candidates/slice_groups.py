"""Split families: which parameters could be split, and which only together.

A large weight that a product reads may be split along what becomes a dimension of the product's
result (a linear's output features). Where a later product contracts that dimension, its weight is
sliced alike, or the slices would be joined in between: the two linears of an MLP, and a gate beside
the first. What belongs together is found by splitting on trial
(``passes/split/split_operators.py``): whatever a slice had to be cut out of leads to the weight
that decides on its size.

A weight whose product is larger than itself, such as a head of many words, may have the rows of
its input sliced instead; of the tensors that come after it the saved ones are computed again then,
or they would be there whole.

Layers that differ in their number only are split alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from passes.candidates.parameter_groups import alike
from passes.capture.captured_step import Captured
from passes.graph.fx_utils import bytes_of, copy_module, root_of
from passes.ops.markers import UNSHARD
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.split.split_operators import Splitter
from passes.split.split_rules import PRODUCTS, along_weight, read_along
from passes.types.context import Context, Parameter
from passes.types.plan import OF_INPUT, Decision, Plan, Split, shardable

#: Weights of a layer that are split together: a gated MLP has three.
_MOST_TOGETHER = 3
#: Weights smaller than such a share of the largest family's are not split.
_SMALL = 0.1
#: How many times as many columns as rows, or the other way round, a head's weight has at least.
_MANY = 4


@dataclasses.dataclass(frozen=True)
class SliceGroupInstance:
    """What is split together in one layer.

    ``along``: of each parameter its dimension, and like whose rows
    (:class:`passes.types.plan.Split`). ``recompute``: keys of saved tensors that must be computed
    again for it to spare anything. ``size_bytes``: of what is there at once if it is whole.
    """

    along: tuple[tuple[str, int, str | None], ...]
    size_bytes: int
    recompute: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SliceGroup:
    """Parameters that are split together, and alike in every layer."""

    layers: tuple[SliceGroupInstance, ...]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Of the parameters."""
        return frozenset(name for layer in self.layers for name, _, _ in layer.along)

    @property
    def recompute(self) -> tuple[str, ...]:
        """Of all layers."""
        return tuple(key for layer in self.layers for key in layer.recompute)

    @property
    def layer_bytes(self) -> int:
        """Of what is there at once of its largest layer."""
        return max(layer.size_bytes for layer in self.layers)

    @property
    def of_input(self) -> bool:
        """Whether not the weights but what they are multiplied with is sliced."""
        return self.layers[0].along[0][1] == OF_INPUT

    def is_in(self, other: SliceGroup) -> bool:
        """Whether another one slices all its parameters, and along the same if they are several."""
        own, theirs = (
            {name: along for name, along, _ in slice_group.layers[0].along}
            for slice_group in (self, other)
        )
        return own.keys() <= theirs.keys() and (len(own) == 1 or own.items() <= theirs.items())

    def into(self, slices: int) -> tuple[Split, ...]:
        """Its parameters in so many slices."""
        return tuple(
            Split(name, slices, along, like)
            for layer in self.layers
            for name, along, like in layer.along
        )

    def most_kept(self, slices: int) -> int:
        """How many slices a layer has: of all its weights."""
        return slices * len(self.layers[0].along)

    def keeping(self, slices: int, kept: int) -> dict[str, int]:
        """How many slices of each weight are kept, if so many of each layer's are.

        The backward reads a layer's last weight first, when nothing has been computed yet that a
        gather could hide behind: that one is kept first.
        """
        return {
            name: min(max(kept - place * slices, 0), slices)
            for layer in self.layers
            for place, (name, _, _) in enumerate(reversed(layer.along))
        }


def find_slice_groups(captured: Captured, ctx: Context) -> list[SliceGroup]:
    """What could be split, the largest first; not weights much smaller than the largest."""
    largest = max((one.full_bytes for one in ctx.parameters if len(one.shape) > 1), default=0)
    return _families(captured, ctx, round(_SMALL * largest))


def _families(captured: Captured, ctx: Context, least_bytes: int = 0) -> list[SliceGroup]:
    """The largest first; a matrix that is in one is not there by itself again.

    Nor are several, if the larger family slices them along the same dimensions. (In a GPT the two
    linears of an MLP are sliced along what lies between them, or, with the one before, along the
    residual stream: these are two.)

    ``least_bytes``: of the weights that families are looked for of.
    """
    found = sorted(_all(captured, ctx, least_bytes), key=lambda one: -one.layer_bytes)
    kept: list[SliceGroup] = []
    for one in found:
        within = any(one.is_in(other) for other in kept if not other.of_input)
        batched = any(len(ctx.parameter(name).shape) > 2 for name in one.names)
        if one.of_input or batched or not within:
            kept.append(one)
    return kept


def _all(captured: Captured, ctx: Context, least_bytes: int) -> Iterator[SliceGroup]:
    graph = captured.forward.graph
    readers = {node.args[1]: node for node in graph.find_nodes(op="call_function", target=UNSHARD)}
    groups = [[ctx.parameters[index] for index in own] for own in alike(ctx.parameters)]
    for members in groups:
        large = [one for one in members if len(one.shape) > 1 and one.name in readers]
        first = members[0]
        if len(large) < len(members) or not shardable(first.shape, ctx.world_size):
            continue
        if first.full_bytes < least_bytes:
            continue
        along = read_along(readers[first.name])
        if along is not None:
            yield _together(captured, ctx, groups, members, along)
        if len(members) == 1:
            yield from _by_input(captured, readers[first.name], first)


def splits_by_hand(captured: Captured, ctx: Context) -> tuple[tuple[Split, ...], tuple[str, ...]]:
    """What ``ctx.slices`` says is to run in slices, and what is sliced like it.

    And the keys of saved tensors that are computed again for that.

    A weight whose product is larger than itself has the rows of its input sliced.

    Raises:
        ValueError: naming a parameter that cannot run in slices, or is there twice.
    """
    slice_groups = _families(captured, ctx)
    found: dict[str, Split] = {}
    again: dict[str, None] = {}
    kept_of = {name: kept for name, _, kept in ctx.slices or ()}
    for name, slices, kept in ctx.slices or ():
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
                f"parameter {name!r} is gathered as a whole, as the rows of its input are sliced: "
                f"not {kept} of {slices} slices can be kept"
            )
        again.update(dict.fromkeys(layer.recompute))
        for one, along, like in layer.along:
            split = Split(one, slices, along, like, kept_of.get(one, kept))
            if found.setdefault(one, split).slices != slices:
                raise ValueError(
                    f"parameters {name!r} and {one!r} run in slices together and are to be in "
                    f"{slices} and {found[one].slices}: give one number"
                )
    return tuple(sorted(found.values())), tuple(again)


def _meant(name: str, of_input: bool, layer: SliceGroupInstance) -> tuple[bool, bool, int]:
    """How much a layer is what is meant by naming one of its parameters.

    Its rows are, with what goes with them, or else the smallest group that it is in.
    """
    return of_input, layer.along[0][0] == name, -len(layer.along)


def _together(
    captured: Captured,
    ctx: Context,
    groups: Sequence[Sequence[Parameter]],
    heads: Sequence[Parameter],
    along: int,
) -> SliceGroup:
    """A group of weights that are alike, with those that are sliced like them.

    What that is in the first layer says it for all.
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
            if shape[dim] == size and shardable(shape, ctx.world_size):
                more[name] = dim
        if len(chosen) + len(more) > _MOST_TOGETHER:  # not within a layer, or of what all read
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
    """Whose rows are sliced: what has them as another dimension is sliced like it."""
    return next((name for name, dim in chosen.items() if dim == 0), None)


def _cut_out(captured: Captured, ctx: Context, chosen: Mapping[str, int]) -> list[tuple[str, int]]:
    """Of which weights slices had to be cut out, and along what, if these were split."""
    leader = _leader(chosen)
    named = [(one.name, one) for one in ctx.parameters]
    plan = Plan.uniform(named, Decision.SHARD_AGAIN, world_size=ctx.world_size)
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
    """A weight of which the rows of its input may be sliced: its product is larger than it.

    And has many more columns than its input, as a head's of many words.
    """
    product = _product_of(marker)
    if product is None:
        return
    size_bytes = bytes_of(product.meta["val"])
    if size_bytes >= one.full_bytes and max(one.shape) >= _MANY * min(one.shape):
        again = tuple(_after(captured, product))
        yield SliceGroup((SliceGroupInstance(((one.name, OF_INPUT, None),), size_bytes, again),))


def _product_of(marker: fx.Node) -> fx.Node | None:
    """The one product that a weight is read by, two-dimensional and as its right operand."""
    found = [
        node
        for node in marker.graph.nodes
        if node.target in PRODUCTS
        and len(node.meta["val"].shape) == 2
        and (origin := along_weight(node, 1)) is not None
        and origin[0] == marker.args[1]
    ]
    return found[0] if len(found) == 1 else None


def _after(captured: Captured, product: fx.Node) -> list[str]:
    """Keys of what is saved of the product, and what is as large and is made of it."""
    cut = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    keys = keys_of(captured.forward.graph)
    size_bytes = bytes_of(product.meta["val"])
    behind, stack = {product}, [product]
    while stack:
        for user in stack.pop().users:
            if user not in behind:
                behind.add(user)
                stack.append(user)
    return [
        keys[node]
        for node in sorted(cut.saved)
        if node in behind
        and node in keys
        and 2 * bytes_of(root_of(node).meta["val"]) >= size_bytes
        and cut.chain(node) is not None
    ]

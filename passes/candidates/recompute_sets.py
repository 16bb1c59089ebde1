"""Recompute sets: saved tensors to recompute, from a small to the largest useful saving.

Needs: a captured step. Leaves: the step unchanged.

Every saved tensor t has bytes b(t) and a *chain*: the operators that compute it from the nearest
other saved tensors and the step's inputs. If a chain is long, and another tensor of no more bytes
makes it short, that tensor is saved instead (such as the input of a layer norm in place of its
result).

A set R of tensors saves the memory of its tensors. It costs the operators in the union of their
chains: if a chain reads another tensor of R, that tensor's chain is in the union too. But then both
tensors are alive together. Tensors of R with such links form one *cluster*, and the backward must
hold all bytes of a cluster together. With all tensors in one cluster, R saves nothing. With R
empty, the backward holds all tensors from its start.

For several bounds on a cluster's bytes, sets grow by the tensor with the lowest cost per byte.
Tensors that share an operator (the parts of one product, the results of an attention) may be added
together. The memory of a set is the most bytes of saved and recomputed tensors that the backward
holds at once. Only sets that hold less than every cheaper set remain.

Clusters correspond to manual checkpointing of layers: with a bound of one layer's bytes, only the
inputs of the layers stay saved. Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from torch import fx

from passes.annotate.annotate_costs import annotate, cost_of, stands_alone
from passes.annotate.collectives import cost_on
from passes.graph.captured import Captured
from passes.graph.fx_utils import (
    bytes_of,
    copy_module,
    is_alias,
    is_getitem,
    output_node,
    positions,
    root_of,
)
from passes.graph.metadata import LAYER
from passes.graph.op_traits import effective_users
from passes.ops.markers import UNSHARD, unshard_of, unshards
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Context, Phase

#: Number of bounds on a cluster's bytes; each is half of the one before.
_MOST_BOUNDS = 8
#: Number of sets per bound, about, whose memory is computed.
_MOST_SAMPLES = 48


@dataclasses.dataclass(frozen=True)
class RecomputeSet:
    """Saved tensors to recompute, and further tensors to save for that, by their keys.

    ``held_bytes``: the most bytes of saved and recomputed tensors that the backward holds at once,
    estimated without a schedule. ``seconds``: the time of the recomputation.
    """

    recompute: tuple[str, ...]
    also_save: tuple[str, ...]
    held_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A saved tensor with all saved views of its memory, or a tensor that could be saved instead.

    ``first``, ``last``: the first and the last place in the backward that uses it. For a tensor
    that is not saved now, ``last`` is -1.
    ``count``: the number of layers whose tensors it stands for.
    ``born``, ``done``: the place in the forward where it is made, and the last one that reads it.
    ``chain``: the operators that recompute it; empty if that is impossible.
    ``reads``: the numbers of the other tensors that the chain reads.
    ``weights``: the names of the parameters that the chain reads.
    ``instead``: the number of the tensor to save instead if this one is recomputed, or None.
    """

    keys: tuple[str, ...]
    size_bytes: int
    first: int
    last: int
    count: int
    born: int
    done: int
    chain: tuple[fx.Node, ...]
    reads: frozenset[int]
    weights: tuple[str, ...]
    instead: int | None = None


def recompute_sets(captured: Captured, ctx: Context, most: int) -> list[RecomputeSet]:
    """Up to ``most`` sets, each with less memory and more time than the one before it."""
    return Recomputation(captured, ctx).sets(most)


class Recomputation:
    """The recomputation of a step's saved tensors: sets of them, and what any set spares.

    ``alike``: by key, the keys of all tensors that are recomputed together with it. They may be
    outside of this step (:attr:`passes.capture.fold_layers.Folded.alike`).
    ``stands_for``: a layer of a folded step, and the number of layers that its tensors stand for.
    """

    def __init__(
        self,
        captured: Captured,
        ctx: Context,
        alike: Mapping[str, Sequence[str]] | None = None,
        stands_for: tuple[int, int] = (0, 1),
    ) -> None:
        self._alike = alike or {}
        forward = annotate(copy_module(captured.forward), ctx.replace(phase=Phase.FORWARD))
        self._nodes = len(forward.graph.nodes), len(captured.backward.graph.nodes)
        saved = _saved_tensors(forward.graph, captured.backward.graph, *stands_for)
        self._together = _together(saved, self._alike)
        self._saved = _all_or_none(saved, self._together)
        self._search = _Growing(self._saved, _seconds_of(forward.graph, ctx))
        self._stands_for = stands_for
        self._number = {key: number for number, one in enumerate(saved) for key in one.keys}
        self._spared: dict[tuple[tuple[str, ...], ...], tuple[np.ndarray, float]] = {}
        self._reads: dict[tuple[tuple[str, ...], ...], dict[str, tuple[int, int]]] = {}

    def sets(self, most: int) -> list[RecomputeSet]:
        """Up to ``most`` sets, each with less memory and more time than the one before it."""
        search, saved = self._search, self._saved
        found: list[frozenset[int]] = []
        for bound_bytes in search.bounds():
            grown = list(search.grow(bound_bytes))
            sampled = [*grown[:: len(grown) // _MOST_SAMPLES + 1], *grown[-1:]]
            found += dict.fromkeys(_closed(chosen, self._together) for chosen in sampled)
        picked: list[RecomputeSet] = []
        for chosen in _spaced(search, found, most):
            useful = _closed(search.without_useless(chosen), self._together)
            picked.append(
                RecomputeSet(
                    self._keys(index for index in sorted(useful) if saved[index].last >= 0),
                    self._keys(search.besides(useful)),
                    search.held(useful)[0],
                    search.seconds(useful),
                )
            )
        return picked

    def _keys(self, chosen: Iterable[int]) -> tuple[str, ...]:
        own = (key for index in chosen for key in self._saved[index].keys)
        return tuple(dict.fromkeys(one for key in own for one in self._alike.get(key, (key,))))

    def spared(
        self, recompute: tuple[str, ...], also_save: tuple[str, ...]
    ) -> tuple[np.ndarray, float]:
        """What the recomputation of some tensors spares, and its seconds.

        ``recompute``, ``also_save``: keys, as of a :class:`RecomputeSet`.

        Returns the bytes at each node of the forward and then of the backward, estimated without
        a schedule.
        """
        decided = recompute, also_save
        if decided not in self._spared:
            found = self._with_unsaved(decided)
            self._spared[decided] = (
                self._search.spared_at(found, self._nodes),
                self._search.seconds(found, *self._stands_for),
            )
        return self._spared[decided]

    def reads(
        self, recompute: tuple[str, ...], also_save: tuple[str, ...]
    ) -> dict[str, tuple[int, int]]:
        """The parameters that the recomputation reads in the backward, by name.

        The places are the first and the last one of the backward's nodes.
        """
        decided = recompute, also_save
        if decided not in self._reads:
            chosen = self._with_unsaved(decided)
            self._reads[decided] = self._search.reads(chosen, self._nodes[1])
        return self._reads[decided]

    def _with_unsaved(self, decided: tuple[tuple[str, ...], ...]) -> frozenset[int]:
        """The numbers of the tensors to recompute.

        A tensor that one of their chains reads, and that nothing saves, is recomputed too.
        """
        recompute, also_save = (
            {self._number[key] for key in keys if key in self._number} for keys in decided
        )
        chosen = set(recompute)
        for index in range(len(self._saved) - 1, -1, -1):  # a reader has a higher number
            for other in self._saved[index].reads if index in chosen else ():
                one = self._saved[other]
                if one.last < 0 and one.chain and other not in also_save:
                    chosen.add(other)
        return frozenset(chosen)


def _all_or_none(saved: Sequence[_Saved], together: Sequence[Sequence[int]]) -> list[_Saved]:
    """Drop the chains of a group of tensors if one tensor of the group cannot be recomputed."""
    return [
        one if all(saved[i].chain for i in own) else dataclasses.replace(one, chain=())
        for one, own in zip(saved, together, strict=True)
    ]


def _together(saved: Sequence[_Saved], alike: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """By tensor, the numbers of all tensors that are recomputed together with it."""
    found: dict[Sequence[str], list[int]] = {}
    own = [alike.get(one.keys[0], one.keys) for one in saved]
    for index, kind in enumerate(own):
        found.setdefault(kind, []).append(index)
    return [found[kind] for kind in own]


def _closed(chosen: Iterable[int], together: Sequence[Sequence[int]]) -> frozenset[int]:
    """The chosen tensors with all tensors that are recomputed together with them."""
    return frozenset(other for index in chosen for other in together[index])


def _spaced(
    search: _Growing, found: Iterable[frozenset[int]], most: int
) -> Iterator[frozenset[int]]:
    """Sets that hold less than all cheaper ones, about evenly spaced in held bytes."""
    priced = [(search.seconds(chosen), search.held(chosen)[0], chosen) for chosen in found]
    all_saved_bytes = below_bytes = search.held(frozenset())[0]
    front: list[tuple[int, frozenset[int]]] = []
    for _, held_bytes, chosen in sorted(priced, key=lambda one: one[:2]):
        if held_bytes < below_bytes:
            below_bytes = held_bytes
            front.append((held_bytes, chosen))
    taken_bytes = all_saved_bytes
    for number in range(1, most + 1):
        wanted_bytes = all_saved_bytes - (all_saved_bytes - below_bytes) * number // most
        for held_bytes, chosen in front:
            if held_bytes <= wanted_bytes:
                if held_bytes < taken_bytes:
                    taken_bytes = held_bytes
                    yield chosen
                break


def _saved_tensors(forward: fx.Graph, backward: fx.Graph, layer: int, layers: int) -> list[_Saved]:
    """The saved tensors, and the tensors that could be saved instead, in the forward's order.

    Tensors of ``layer`` stand for those of ``layers`` layers.
    """
    cut = PartitionBoundary(forward, backward)
    keys = keys_of(forward)
    returned = {root_of(node) for node in _returned(forward, cut)}
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in sorted(cut.saved):
        root = root_of(node)
        if root.op == "call_function" and root.target is not UNSHARD and bytes_of(root.meta["val"]):
            views.setdefault(root, []).append(node)
    instead = {root: _instead(cut, root, nodes[0], views) for root, nodes in views.items()}
    besides = dict.fromkeys(node for node in instead.values() if node is not None)
    roots = sorted({*views, *besides})
    number = {node: index for index, root in enumerate(roots) for node in views.get(root, [root])}
    place, forward_place = positions(backward), positions(forward)
    end = output_node(forward)
    found: list[_Saved] = []
    for index, root in enumerate(roots):
        own = views.get(root, [root])
        saved = [cut.saved[node] for node in own if node in cut.saved]
        uses = [place[user] for node in saved for user in effective_users(node)]
        chains = [cut.chain(node, besides) for node in own]
        chain: set[fx.Node] = set()
        reads: set[fx.Node] = set()
        for one in chains if root not in returned and None not in chains else ():
            assert one is not None
            gathers = [r for r in one[1] if r.target is UNSHARD and r not in cut.there]
            chain.update(one[0], gathers)
            reads.update(one[1])
        other = instead.get(root)
        found.append(
            _Saved(
                tuple(keys[node] for node in own),
                bytes_of(root.meta["val"]),
                min(uses, default=len(place)),
                max(uses, default=-1),
                layers if layer and LAYER.get(root) == layer else 1,
                forward_place[root],
                max((forward_place[u] for u in effective_users(root) if u is not end), default=0),
                tuple(sorted(chain)),
                frozenset(number[node] for node in reads if node in number) - {index},
                tuple(unshard_of(node).name for node in sorted(reads) if node.target is UNSHARD),
                number[other] if other is not None and chain else None,
            )
        )
    return found


def _instead(
    cut: PartitionBoundary, root: fx.Node, node: fx.Node, known: Collection[fx.Node]
) -> fx.Node | None:
    """The tensor to save in place of ``root``, so that its recomputation needs no large kernel.

    It is the nearest tensor from which pointwise operators and reductions compute ``root``, and it
    is not larger than ``root``. None: no such tensor, no chain, or no large kernel in the chain.
    """
    found = cut.chain(node)
    if found is None or not any(stands_alone(one) for one in found[0]):
        return None
    chain = set(found[0])
    frontier = {root}
    while frontier:
        last = max(frontier)
        alone = len(frontier) == 1 and last is not root and last not in known
        size_bytes = 0 if is_alias(last) or is_getitem(last) else bytes_of(last.meta["val"])
        if alone and 0 < size_bytes <= bytes_of(root.meta["val"]):
            return last
        if stands_alone(last):
            return None
        frontier.remove(last)
        frontier.update(source for source in last.all_input_nodes if source in chain)
    return None


def _returned(forward: fx.Graph, cut: PartitionBoundary) -> list[fx.Node]:
    """The outputs of the forward for its caller."""
    outputs = [*forward.nodes][-1].args[0]
    own = outputs[: len(outputs) - len(cut.saved)]
    return [node for node in own if isinstance(node, fx.Node)]


def _seconds_of(forward: fx.Graph, ctx: Context) -> dict[fx.Node, float]:
    """Seconds to run each operator once more, and to regather each weight."""
    found = {node: cost_of(node).seconds for node in forward.nodes}
    for node in unshards(forward):
        cost = cost_on("all_gather", bytes_of(node.meta["val"]), ctx)
        found[node] = cost.seconds - cost.latency_seconds  # a gather shares its bucket's latency
    return found


class _Growing:
    """Greedy growth of sets of saved tensors, by their numbers, at the least cost per byte."""

    def __init__(self, saved: Sequence[_Saved], seconds: Mapping[fx.Node, float]) -> None:
        self.saved, self.operator_seconds = saved, seconds
        candidates = [index for index, one in enumerate(saved) if one.chain]
        users: dict[fx.Node, list[int]] = {}
        self._linked: list[set[int]] = [set(one.reads) for one in saved]
        for index in candidates:
            for node in saved[index].chain:
                users.setdefault(node, []).append(index)
            for other in saved[index].reads:
                self._linked[other].add(index)
        # Bundles: each tensor by itself, and all tensors that share an operator.
        together = dict.fromkeys((index,) for index in candidates)
        for node in sorted(users):
            if seconds[node] > 0:
                together[tuple(users[node])] = None  # type: ignore[index]
        self.bundles: list[tuple[int, ...]] = list(together)
        self.bundles_of: list[list[int]] = [[] for _ in saved]  # by tensor, its bundles
        self.bundles_running: dict[fx.Node, list[int]] = {}  # by operator, the bundles that need it
        for number, bundle in enumerate(self.bundles):
            for index in bundle:
                self.bundles_of[index].append(number)
            for node in self.chain(bundle):
                self.bundles_running.setdefault(node, []).append(number)

    def chain(self, chosen: Iterable[int]) -> dict[fx.Node, None]:
        return {node: None for index in chosen for node in self.saved[index].chain}

    def total_bytes(self, chosen: Iterable[int]) -> int:
        return sum(self.saved[index].size_bytes for index in chosen)

    def seconds(self, chosen: Iterable[int], layer: int = 0, layers: int = 1) -> float:
        """Seconds to recompute the chosen tensors; those of ``layer`` count ``layers`` times."""
        return math.fsum(
            self.operator_seconds[node] * (layers if layer and LAYER.get(node) == layer else 1)
            for node in self.chain(chosen)
        )

    def bounds(self) -> list[int]:
        """Bounds on a cluster's bytes: half of all bytes, a quarter, ... to the least tensor."""
        sizes = [one.size_bytes for one in self.saved if one.chain]
        total, least = sum(sizes), min(sizes, default=1)
        return [total >> n for n in range(1, _MOST_BOUNDS + 1) if total >> n >= least]

    def grow(self, bound_bytes: int) -> Iterator[frozenset[int]]:
        """Ever larger sets. Each cluster is within the bound, or is a single bundle.

        Tensors with an ``instead`` are in every set.
        """
        swapped = [index for index, one in enumerate(self.saved) if one.instead is not None]
        chosen = {index: [index] for index in swapped}  # by tensor, its cluster
        bundles = _BundlePrices(self)
        bundles.add(swapped)
        waiting = list(range(len(self.bundles)))
        while waiting := [number for number in waiting if bundles.bytes_left[number]]:
            number = min(waiting, key=bundles.prices.__getitem__)
            waiting.remove(number)
            added = [index for index in self.bundles[number] if index not in chosen]
            near = {other for index in added for other in self._linked[index] if other in chosen}
            cluster = sorted({*added, *(one for other in near for one in chosen[other])})
            if near and self.total_bytes(cluster) > bound_bytes:
                continue
            for index in cluster:
                chosen[index] = cluster
            bundles.add(added)
            yield frozenset(chosen)

    def spared_at(self, chosen: frozenset[int], nodes: tuple[int, int]) -> np.ndarray:
        """Bytes fewer than with nothing recomputed, at each place of the forward and backward.

        ``nodes``: the numbers of nodes of the two graphs.
        """
        forward, backward = nodes
        changes = np.zeros(forward + backward + 2, dtype=np.int64)
        besides = self.besides(chosen)
        for indices, sign in (([i for i in chosen if self.saved[i].last >= 0], 1), (besides, -1)):
            for index in indices:  # from its last use in the forward to the end of the forward
                one = self.saved[index]
                changes[max(one.born, one.done) + 1] += sign * one.count * one.size_bytes
                changes[forward] -= sign * one.count * one.size_bytes
        for own, sign in ((frozenset[int](), 1), (chosen, -1)):
            for index, start, end in self._alive(own):
                one = self.saved[index]
                count = 1 if index in own else one.count
                changes[forward + min(start, backward)] += sign * count * one.size_bytes
                changes[forward + min(end + 1, backward)] -= sign * count * one.size_bytes
        return np.cumsum(changes[: forward + backward])

    def _alive(self, chosen: frozenset[int]) -> Iterator[tuple[int, int, int]]:
        """The tensors that the backward holds, with the first and the last place there."""
        starts = self._starts(chosen)
        ends = [one.last for one in self.saved]
        for index in chosen:
            for other in self.saved[index].reads:
                ends[other] = max(ends[other], starts[index])
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start <= end:  # else neither saved nor read
                yield index, start, end

    def held(self, chosen: frozenset[int]) -> tuple[int, int]:
        """The most bytes of saved and recomputed tensors at once, and the first such place."""
        changes: dict[int, int] = {}
        for index, start, end in self._alive(chosen):
            changes[start] = changes.get(start, 0) + self.saved[index].size_bytes
            changes[end + 1] = changes.get(end + 1, 0) - self.saved[index].size_bytes
        now = most = place = 0
        for where in sorted(changes):
            now += changes[where]
            if now > most:
                most, place = now, where
        return most, place

    def _starts(self, chosen: frozenset[int]) -> list[int]:
        """The place in the backward from which each tensor is alive; 0 for a saved one."""
        starts = [one.first if index in chosen else 0 for index, one in enumerate(self.saved)]
        for index in sorted(chosen, reverse=True):  # a reader has a higher number
            for other in self.saved[index].reads:
                starts[other] = min(starts[other], starts[index])
        return starts

    def reads(self, chosen: frozenset[int], nodes: int) -> dict[str, tuple[int, int]]:
        """By parameter, the first and the last place in the backward where a chain reads it.

        ``nodes``: the number of nodes of the backward.
        """
        starts = self._starts(chosen)
        places: dict[str, list[int]] = {}
        for index in sorted(chosen):
            for name in self.saved[index].weights if starts[index] < nodes else ():
                places.setdefault(name, []).append(starts[index])
        return {name: (min(own), max(own)) for name, own in places.items()}

    def without_useless(self, chosen: frozenset[int]) -> frozenset[int]:
        """The set without the tensors that save no memory.

        These are tensors already recomputed before the peak; tensors whose ``instead`` only they
        read; and tensors not saved now that no other chain of the set reads.
        """
        most, place = self.held(chosen)
        starts = self._starts(chosen)
        for index in sorted(chosen, reverse=True):
            if starts[index] <= place and self.held(chosen - {index})[0] <= most:
                chosen -= {index}
        for index in sorted(chosen):
            other = self.saved[index].instead
            readers = [one for one in chosen if other in self.saved[one].reads]
            if other is not None and other not in chosen and readers == [index]:
                chosen -= {index}
        needed: set[int] = set()
        for index in sorted(chosen, reverse=True):
            if self.saved[index].last >= 0 or index in needed:
                needed.add(index)
                needed |= self.saved[index].reads & chosen
        return frozenset(needed)

    def besides(self, chosen: frozenset[int]) -> list[int]:
        """The tensors that are not saved now, and that the chosen tensors' chains read."""
        reads = {other for index in chosen for other in self.saved[index].reads}
        return [other for other in sorted(reads - chosen) if self.saved[other].last < 0]


class _BundlePrices:
    """Seconds per byte of each bundle, less the tensors and operators that are chosen already.

    ``bytes_left``, ``seconds_left``: by bundle, without the chosen tensors and operators.
    """

    def __init__(self, growing: _Growing) -> None:
        self._growing = growing
        self.bytes_left = [growing.total_bytes(bundle) for bundle in growing.bundles]
        self.seconds_left = [growing.seconds(bundle) for bundle in growing.bundles]
        self.prices = [self._price(number) for number in range(len(growing.bundles))]
        self._runs: set[fx.Node] = set()

    def _price(self, number: int) -> tuple[float, int]:
        ratio = max(0.0, self.seconds_left[number]) / self.bytes_left[number]
        return float(f"{ratio:.2g}"), number  # equal layers differ by rounding only

    def add(self, added: Sequence[int]) -> None:
        """Choose more tensors, and price the bundles that they change anew."""
        growing, changed = self._growing, set[int]()
        for index in added:
            for other in growing.bundles_of[index]:
                self.bytes_left[other] -= growing.saved[index].size_bytes
                changed.add(other)
        for node in growing.chain(added):
            if node not in self._runs:
                self._runs.add(node)
                for other in growing.bundles_running[node]:
                    self.seconds_left[other] -= growing.operator_seconds[node]
                    changed.add(other)
        for other in changed:
            if self.bytes_left[other]:
                self.prices[other] = self._price(other)

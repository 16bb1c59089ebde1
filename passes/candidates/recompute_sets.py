"""Recompute sets: which saved tensors are worth computing again, from a few to as many as help.

Every saved tensor t has bytes b(t) and a *chain*: the operators that make it from the nearest
other saved tensors and the step's inputs. (Where the chain would be long and another tensor of no
more bytes would make it short, that one is saved instead: what a layer norm reads in place of what
it gives.) A set R of them spares the memory of its tensors and
costs the operators in the union of their chains, since a tensor of R that another one's chain
reads has a chain in that union too. But then both are there at once: tensors of R that are
linked so are one *cluster*, whose bytes the backward must hold together. With every tensor in
one cluster nothing is spared; with none in any, everything is held from the start.

For several bounds on a cluster's bytes, sets are grown tensor by tensor, always what costs least
for a byte; what shares an operator (the parts of one product, the results of an attention) may
come together. A set is then judged by the most that its step's backward would hold of saved and
recomputed tensors at once. Of all sets those remain that hold less than every cheaper one.

The clusters are what people make by hand when they checkpoint a model's layers: with a bound of
one layer's bytes only the layers' inputs stay saved. Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from passes.annotate.annotate_costs import annotate, cost_of, stands_alone
from passes.capture.captured_step import Captured
from passes.graph.fx_utils import bytes_of, copy_module, is_alias, is_getitem, positions, root_of
from passes.graph.op_traits import effective_users
from passes.ops.markers import UNSHARD
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Context, Phase

#: Bounds on a cluster, each twice the one before.
_MOST_BOUNDS = 8
#: Of how many of the sets that grow under one bound the memory is worked out.
_MOST_SAMPLES = 48


@dataclasses.dataclass(frozen=True)
class RecomputeSet:
    """Saved tensors to compute again, and others to save for that, by their keys.

    ``held_bytes``: the most of saved and recomputed tensors that the backward holds at once, as
    far as that is known without a schedule. ``seconds``: what computing them takes.
    """

    recompute: tuple[str, ...]
    also_save: tuple[str, ...]
    held_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Saved:
    """A saved tensor, with all saved views of its memory; or one that may be saved besides.

    ``first``, ``last``: places in the backward between which it is used; of what is not saved
    today, none: the last is before the first.
    ``chain``: what computes it again; empty if nothing can. ``reads``: others, by number.
    ``instead``: the number of what had better be saved instead, if it is to be recomputed.
    """

    keys: tuple[str, ...]
    size_bytes: int
    first: int
    last: int
    chain: tuple[fx.Node, ...]
    reads: frozenset[int]
    instead: int | None = None


def recompute_sets(
    captured: Captured,
    ctx: Context,
    most: int,
    alike: Mapping[str, Sequence[str]] | None = None,
) -> list[RecomputeSet]:
    """Up to ``most`` sets, each holding less than the one before it and taking longer.

    ``alike``: of a key those of all tensors that are recomputed if it is, which need not be in
    this step (:attr:`passes.capture.fold_layers.Folded.alike`).
    """
    alike = alike or {}
    forward = annotate(copy_module(captured.forward), ctx.replace(phase=Phase.FORWARD))
    saved = _saved_tensors(forward.graph, captured.backward.graph)
    together = _together(saved, alike)
    saved = _all_or_none(saved, together)
    search = _Growing(saved, _seconds_of(forward.graph, ctx))
    found: list[frozenset[int]] = []
    for bound_bytes in search.bounds():
        grown = list(search.grow(bound_bytes))
        sampled = [*grown[:: len(grown) // _MOST_SAMPLES + 1], *grown[-1:]]
        found += dict.fromkeys(_closed(chosen, together) for chosen in sampled)

    def keys(chosen: Iterable[int]) -> tuple[str, ...]:
        own = (key for index in chosen for key in saved[index].keys)
        return tuple(dict.fromkeys(one for key in own for one in alike.get(key, (key,))))

    picked: list[RecomputeSet] = []
    for chosen in _spaced(search, found, most):
        useful = _closed(search.without_useless(chosen), together)
        picked.append(
            RecomputeSet(
                keys(index for index in sorted(useful) if saved[index].last >= 0),
                keys(search.besides(useful)),
                search.held(useful)[0],
                search.seconds(useful),
            )
        )
    return picked


def _all_or_none(saved: Sequence[_Saved], together: Sequence[Sequence[int]]) -> list[_Saved]:
    """Without the chain of what is like something that nothing can compute again."""
    return [
        one if all(saved[i].chain for i in own) else dataclasses.replace(one, chain=())
        for one, own in zip(saved, together, strict=True)
    ]


def _together(saved: Sequence[_Saved], alike: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """Of each tensor all that are recomputed if it is."""
    found: dict[Sequence[str], list[int]] = {}
    own = [alike.get(one.keys[0], one.keys) for one in saved]
    for index, kind in enumerate(own):
        found.setdefault(kind, []).append(index)
    return [found[kind] for kind in own]


def _closed(chosen: Iterable[int], together: Sequence[Sequence[int]]) -> frozenset[int]:
    """With all that come with any of them."""
    return frozenset(other for index in chosen for other in together[index])


def _spaced(
    search: _Growing, found: Iterable[frozenset[int]], most: int
) -> Iterator[frozenset[int]]:
    """Of the sets that hold less than all cheaper ones, some about evenly spaced in that."""
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


def _saved_tensors(forward: fx.Graph, backward: fx.Graph) -> list[_Saved]:
    """What the graph saves of its own, and what it might save instead, in the forward's order."""
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
    place = positions(backward)
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
                tuple(sorted(chain)),
                frozenset(number[node] for node in reads if node in number) - {index},
                number[other] if other is not None and chain else None,
            )
        )
    return found


def _instead(
    cut: PartitionBoundary, root: fx.Node, node: fx.Node, known: Collection[fx.Node]
) -> fx.Node | None:
    """What to save in place of a tensor, so that no large kernel must run to have it again.

    The nearest tensor on the way back that all else comes from, pointwise and in reductions; no
    larger than the one it stands for. None: there is none, or no large kernel comes before.
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
    """What the forward returns to its caller."""
    outputs = [*forward.nodes][-1].args[0]
    own = outputs[: len(outputs) - len(cut.saved)]
    return [node for node in own if isinstance(node, fx.Node)]


def _seconds_of(forward: fx.Graph, ctx: Context) -> dict[fx.Node, float]:
    """What each operator takes to run once more, and each weight to be gathered for it."""
    found = {node: cost_of(node).seconds for node in forward.nodes}
    latency_seconds = ctx.hardware.collectives["all_gather"].latency_seconds
    for node in forward.find_nodes(op="call_function", target=UNSHARD):
        size_bytes = bytes_of(node.meta["val"])
        seconds = ctx.hardware.collective_seconds("all_gather", size_bytes, ctx.world_size)
        found[node] = seconds - latency_seconds  # it travels in a bucket
    return found


class _Growing:
    """Sets of saved tensors, by their numbers, grown by what costs least."""

    def __init__(self, saved: Sequence[_Saved], seconds: Mapping[fx.Node, float]) -> None:
        self.saved, self._seconds = saved, seconds
        candidates = [index for index, one in enumerate(saved) if one.chain]
        users: dict[fx.Node, list[int]] = {}
        self._linked: list[set[int]] = [set(one.reads) for one in saved]
        for index in candidates:
            for node in saved[index].chain:
                users.setdefault(node, []).append(index)
            for other in saved[index].reads:
                self._linked[other].add(index)
        # A tensor by itself, and all that share an operator.
        together = dict.fromkeys((index,) for index in candidates)
        for node in sorted(users):
            if seconds[node] > 0:
                together[tuple(users[node])] = None  # type: ignore[index]
        self._bundles: list[tuple[int, ...]] = list(together)
        self._with: list[list[int]] = [[] for _ in saved]  # the bundles that a tensor is in
        self._running: dict[fx.Node, list[int]] = {}  # and those that need an operator
        for number, bundle in enumerate(self._bundles):
            for index in bundle:
                self._with[index].append(number)
            for node in self._chain(bundle):
                self._running.setdefault(node, []).append(number)

    def _chain(self, chosen: Iterable[int]) -> dict[fx.Node, None]:
        return {node: None for index in chosen for node in self.saved[index].chain}

    def _bytes(self, chosen: Iterable[int]) -> int:
        return sum(self.saved[index].size_bytes for index in chosen)

    def seconds(self, chosen: Iterable[int]) -> float:
        """What computing them takes."""
        return math.fsum(self._seconds[node] for node in self._chain(chosen))

    def bounds(self) -> list[int]:
        """Bounds on a cluster's bytes, from what is of no use to what links nothing."""
        sizes = [one.size_bytes for one in self.saved if one.chain]
        total, least = sum(sizes), min(sizes, default=1)
        return [total >> n for n in range(1, _MOST_BOUNDS + 1) if total >> n >= least]

    def grow(self, bound_bytes: int) -> Iterator[frozenset[int]]:
        """Ever larger sets whose clusters hold no more than the bound, or are one bundle.

        What had better not be saved is in them from the beginning.
        """
        swapped = [index for index, one in enumerate(self.saved) if one.instead is not None]
        chosen = {index: [index] for index in swapped}  # and the cluster that each is in
        bytes_left = [self._bytes(bundle) for bundle in self._bundles]
        seconds_left = [self.seconds(bundle) for bundle in self._bundles]
        runs: set[fx.Node] = set()
        waiting = list(range(len(self._bundles)))

        def price(number: int) -> tuple[float, int]:
            ratio = max(0.0, seconds_left[number]) / bytes_left[number]
            return float(f"{ratio:.2g}"), number  # layers alike differ by rounding

        prices = {number: price(number) for number in waiting}

        def add(added: list[int]) -> None:
            changed: dict[int, None] = {}
            for index in added:
                for other in self._with[index]:
                    bytes_left[other] -= self.saved[index].size_bytes
                    changed[other] = None
            for node in self._chain(added):
                if node not in runs:
                    runs.add(node)
                    for other in self._running[node]:
                        seconds_left[other] -= self._seconds[node]
                        changed[other] = None
            prices.update((other, price(other)) for other in changed if bytes_left[other])

        add(swapped)
        while waiting := [number for number in waiting if bytes_left[number]]:
            number = min(waiting, key=prices.__getitem__)
            waiting.remove(number)
            added = [index for index in self._bundles[number] if index not in chosen]
            near = {other for index in added for other in self._linked[index] if other in chosen}
            cluster = sorted({*added, *(one for other in near for one in chosen[other])})
            if near and self._bytes(cluster) > bound_bytes:
                continue
            for index in cluster:
                chosen[index] = cluster
            add(added)
            yield frozenset(chosen)

    def held(self, chosen: frozenset[int]) -> tuple[int, int]:
        """The most that the backward holds of the saved and the recomputed, and where first."""
        starts = self._starts(chosen)
        ends = [one.last for one in self.saved]
        for index in chosen:
            for other in self.saved[index].reads:
                ends[other] = max(ends[other], starts[index])
        changes: dict[int, int] = {}
        for start, end, one in zip(starts, ends, self.saved, strict=True):
            if start > end:  # neither saved nor read
                continue
            changes[start] = changes.get(start, 0) + one.size_bytes
            changes[end + 1] = changes.get(end + 1, 0) - one.size_bytes
        now = most = place = 0
        for where in sorted(changes):
            now += changes[where]
            if now > most:
                most, place = now, where
        return most, place

    def _starts(self, chosen: frozenset[int]) -> list[int]:
        """From where in the backward each is there: the saved from its start."""
        starts = [one.first if index in chosen else 0 for index, one in enumerate(self.saved)]
        for index in sorted(chosen, reverse=True):  # who reads another comes after it
            for other in self.saved[index].reads:
                starts[other] = min(starts[other], starts[index])
        return starts

    def without_useless(self, chosen: frozenset[int]) -> frozenset[int]:
        """Less those that are there again by the time when the most is held, and spare nothing.

        And less those in place of which something is saved that nothing else reads.
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
        """What is not saved today and read by what is recomputed."""
        reads = {other for index in chosen for other in self.saved[index].reads}
        return [other for other in sorted(reads - chosen) if self.saved[other].last < 0]

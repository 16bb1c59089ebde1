"""The planner: what to shard and what to recompute, so that the step is fastest under the limit.

The problem. For every parameter i choose d(i) in {replicate, shard and keep, shard and
gather again}, on a mesh of two levels over all ranks or within each host, and a set R of saved
activations that the backward computes again, to minimise the
step's seconds subject to peak bytes <= limit. Both are what the simulator says of the schedule
that the passes emit; neither is a sum over parameters.

The method, in two levels:

1. *Dynamic programming over memory* on an additive model (``passes/knapsack.py``), for several
   weights of the forward's and the backward's communication: hidden communication costs nothing,
   so a plan may move bytes from the backward, where an all-reduce lies wholly, into the forward.
2. *The simulator decides.* For each weighting the budget v is lowered by what the simulated
   peak exceeds the limit by, and by ever more, until the plan fits. The fastest simulated plan
   that fits is then refined: one group of like parameters, or one parameter, at a time; at last
   the size of its buckets is.

R is empty where the fastest plan fits without. Otherwise a few sets, from a little to as much as
helps (``passes/recompute_sets.py``), are each given the first level's best plans, the middle one
first and then towards where the step is faster.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from passes.bucket import bucket_bytes_for
from passes.capture import Captured
from passes.context import Context, Phase
from passes.decisions import Collective, Decision, ParameterPlan, Plan, Prediction
from passes.explain import explained
from passes.fold import Folded
from passes.knapsack import Choice, Table, choices_of, together
from passes.pipeline import Pass
from passes.predict import Step, predict, state_bytes
from passes.recompute_sets import RecomputeSet, recompute_sets
from passes.reorder import order_of
from passes.units import format_bytes

_WEIGHTS = ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 1.0))
#: How many plans are looked at for each weighting until one fits, and then to fit more closely.
_MOST_TRIES, _CLOSER_TRIES = 6, 2
#: How many of the fastest plans get buckets of their own size.
_SIZED_PLANS = 4
#: How many of the fastest are lowered as they would run: then they take a little more or less.
_LOWERED = 4
#: How near a plan is to the fastest if it is tried with that one's buckets.
_NEAR = 1.1
#: Bucket sizes that are tried: by what factors from one to the next, and how many in a row that
#: are no better end a direction.
_LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 1 << 10, 1 << 28
_BUCKET_FACTORS, _BUCKET_MISSES = (4, 1 / 4, 2, 1 / 2), 2
_MOST_LOOKS = 48
#: Sets of activations to recompute that there are to choose from.
_RECOMPUTE_SETS = 8
#: How many plans refining may look at, and how many nodes it may simulate in all: a second or two.
_MOST_REFINED, _REFINED_NODES = 300, 20_000
#: What share of them before buckets have their sizes.
_REFINED_FIRST = 2 / 3
#: How many plans of a folded step may be.
_FOLDED_REFINED = 6
#: How many pairs of plans are mixed over the layers of a folded step, and tried how often to fit.
_MOST_MIXED, _MIXED_TRIES = 3, 4


class Infeasible(ValueError):
    """No plan fits; ``least_bytes`` is the smallest limit that would."""

    def __init__(self, limit_bytes: int, least: Prediction, world_size: int) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = least.peak_bytes
        filling = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in least.peak.items())
        super().__init__(
            f"memory_limit={format_bytes(limit_bytes)} is below the least possible "
            f"{format_bytes(self.least_bytes)} for this model on {world_size} ranks ({filling}). "
            "Raise it, use a smaller batch, or run on more ranks."
        )


def make_plan(captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Plan:
    """The fastest plan under ``ctx.limit_bytes`` (None: no limit). See the module's docstring.

    ``captured``: or folded; then the plan leaves the order of the collectives open.

    Raises:
        Infeasible: if even the plan that takes the least memory is above the limit.
    """
    with _young_garbage_only():
        return _searched(captured, ctx, passes)


def _searched(captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]) -> Plan:
    search = _Search(captured, ctx, passes)
    search.alike()
    seconds = {weights: search.propose(weights) for weights in _WEIGHTS}
    search.recompute_some(min(seconds, key=seconds.__getitem__))
    if search.feasible(1) is None and ctx.limit_bytes is not None:
        least = search.least_memory()
        if least.peak_bytes > ctx.limit_bytes:
            raise Infeasible(ctx.limit_bytes, least, ctx.world_size)
    search.size_buckets(1)
    search.refine(_REFINED_FIRST)
    best = None
    while best != (best := search.fastest()):
        search.size_buckets(_SIZED_PLANS)
        search.share_sizes()
        search.refine()  # from the plan that is the fastest with the buckets it now has
    search.look_at_all()
    search.share_sizes()
    search.mix_layers()
    found = search.feasible()
    assert found is not None
    if not isinstance(captured, Folded):
        return explained(*found, ctx, {})
    plan = explained(*found, ctx, captured.stand_ins(found[0]))
    return plan.replace(order={})  # of a few layers only


@contextmanager
def _young_garbage_only() -> Iterator[None]:
    """Collect no garbage but what :func:`_collect` is called for.

    A graph is a cycle, so that garbage must be collected; but looking through all of torch's
    objects for it, again and again, takes a third of the planner's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _collect() -> None:
    """Free the graphs of the plan that was looked at last."""
    if not gc.isenabled():
        gc.collect(0)


def complete(
    plan: Plan, captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]
) -> Plan:
    """A plan made by hand with what it leaves open: the order of its collectives, a prediction.

    What it decides is not changed, and the limit not asked for. Of a folded step the order is left
    open.
    """
    if isinstance(captured, Folded):
        step = predict(captured, plan, ctx.replace(deciding=True), passes)
        return plan.replace(prediction=step.prediction)
    if not plan.order:
        step = predict(captured, plan, ctx.replace(deciding=True), passes)
        plan = plan.replace(order=_orders(step))
    return plan.replace(prediction=predict(captured, plan, ctx, passes).prediction)


def _orders(step: Step) -> dict[str, tuple[Collective, ...]]:
    return {
        phase.value: order_of(gm.graph)
        for phase, gm in ((Phase.FORWARD, step.forward), (Phase.BACKWARD, step.backward))
    }


class _Key(NamedTuple):
    """What a plan decides: of every parameter, and what is recomputed."""

    decisions: tuple[Decision, ...]
    recompute: tuple[str, ...] = ()
    also_save: tuple[str, ...] = ()

    def recomputing(self, one: RecomputeSet | None) -> _Key:
        """The same decisions with a set of activations recomputed."""
        return self._replace(
            recompute=one.recompute if one else (), also_save=one.also_save if one else ()
        )


class _Search:
    """The plans that were looked at, and what the simulator said of each."""

    def __init__(
        self, captured: Captured | Folded, ctx: Context, passes: Sequence[Pass]
    ) -> None:
        self.captured, self.ctx, self.passes = captured, ctx, passes
        self.choices = [choices_of(parameter, ctx) for parameter in ctx.parameters]
        #: Indices of parameters that are decided on together: alike ones of a folded step's layers.
        self.tied = _tied(captured, ctx)
        self.tied_choices = [together([self.choices[i] for i in own]) for own in self.tied]
        self.empty = Plan(
            (),
            world_size=ctx.world_size,
            memory_limit_bytes=ctx.limit_bytes,
            bucket_bytes=bucket_bytes_for(ctx),
            ranks_of_a_host=ctx.ranks_of_a_host,
        )
        self.most_bucket_bytes = _MOST_BUCKET_BYTES
        if isinstance(captured, Folded):  # a bucket of several layers is not seen in it
            self.most_bucket_bytes = min(_MOST_BUCKET_BYTES, captured.layer_bytes(ctx))
        self.seen: dict[_Key, tuple[Plan, Prediction]] = {}
        self.left = self._affordable_looks()  # that refining may still take
        #: Bucket sizes that were priced under the limit: what was seen is the best of them.
        self.sizes: dict[_Key, set[int]] = {}

    def look(self, key: _Key) -> Prediction:
        """Lower and simulate a plan, once; the order of its collectives becomes its own."""
        if key not in self.seen:
            self.seen[key] = self._price(key, self.ctx)
            self.sizes[key] = {self.seen[key][0].bucket_bytes}
        return self.seen[key][1]

    def _price(
        self, key: _Key, ctx: Context, bucket_bytes: int | None = None
    ) -> tuple[Plan, Prediction]:
        _collect()
        rows = _rows(ctx, key.decisions)
        plan = self.empty.replace(parameters=rows, recompute=key.recompute, also_save=key.also_save)
        if bucket_bytes is not None:
            plan = plan.replace(bucket_bytes=bucket_bytes)
        step = predict(self.captured, plan, ctx.replace(deciding=True), self.passes)
        return plan.replace(order=_orders(step)), step.prediction

    def fits(self, said: Prediction) -> bool:
        limit_bytes = self.ctx.limit_bytes
        return limit_bytes is None or said.peak_bytes <= limit_bytes

    def fitting(self) -> list[_Key]:
        """What was looked at and fits."""
        return [key for key, (_, said) in self.seen.items() if self.fits(said)]

    def fastest(self) -> tuple[_Key, float]:
        """Of what fits, and its seconds."""
        best = min(self.fitting(), key=self._seconds)
        return best, self._seconds(best)

    def feasible(self, most: int = _LOWERED) -> tuple[Plan, Step] | None:
        """The fastest plan that fits, with what the simulator says of it as it will be lowered.

        ``most``: so many of the fastest are compared as they will be.
        """
        found: list[tuple[Plan, Step]] = []
        for key in sorted(self.fitting(), key=self._seconds):
            plan = self.seen[key][0]
            step = predict(self.captured, plan, self.ctx, self.passes)
            if self.fits(step.prediction):
                found.append((plan, step))
            if len(found) == (1 if isinstance(self.captured, Folded) else most):
                break
        return min(found, key=lambda pair: pair[1].prediction.step_seconds, default=None)

    def alike(self) -> None:
        """Look at replicating all; of a folded step also at sharding all, which proposals may miss.

        There are few proposals where there is little to decide on, and little refining is paid for.
        """
        options = len(Decision) if isinstance(self.captured, Folded) else 1
        for option in range(options):
            self.look(_Key(tuple(o[min(option, len(o) - 1)].decision for o in self.choices)))

    def propose(self, weights: tuple[float, float], one: RecomputeSet | None = None) -> float:
        """Look at the dynamic programme's plans for ever smaller budgets until one fits.

        Then for budgets between that one and the last that did not.

        Returns the seconds of the fastest that fits, infinity if none does.
        """
        table = Table(self.tied_choices, weights, self.ctx)
        limit_bytes = self.ctx.limit_bytes
        budget = table.most_bytes if limit_bytes is None else min(table.most_bytes, limit_bytes)
        too_much, shrink_bytes, known = budget, table.unit_bytes, len(self.seen)
        while len(self.seen) < known + _MOST_TRIES:
            decisions = table.best(budget)
            if decisions is None:
                return math.inf
            said = self.look(self._spread(decisions).recomputing(one))
            if limit_bytes is None or self.fits(said):
                break
            # Where a plan is just above the limit, a budget that is just smaller need not help:
            # the peak may be somewhere else than what the budget is of.
            over = said.peak_bytes - limit_bytes
            too_much = min(budget, table.memory_bytes(decisions))
            budget = too_much - max(over, shrink_bytes)
            shrink_bytes *= 2
        else:
            return math.inf
        seconds = said.step_seconds
        for _ in range(_CLOSER_TRIES if limit_bytes is not None else 0):
            between = (budget + too_much) // 2
            decisions = table.best(between)
            if decisions is not None:
                said = self.look(self._spread(decisions).recomputing(one))
            if decisions is not None and self.fits(said):
                budget = between
                seconds = min(seconds, said.step_seconds)
            else:
                too_much = between
        return seconds

    def recompute_some(self, weights: tuple[float, float]) -> None:
        """Where the limit keeps the fastest plan out: plans that recompute, more or less."""
        if self.fits(self.seen[min(self.seen, key=self._seconds)][1]) or not self.sets:
            return

        @functools.cache
        def seconds(index: int) -> tuple[float, int]:
            found = self.propose(weights, self.sets[index])
            return found, -index if found == math.inf else index  # more, where nothing fits

        best, step = (len(self.sets) - 1) // 2, 2
        while step:
            near = [i for i in (best, best - step, best + step) if 0 <= i < len(self.sets)]
            best = min(near, key=seconds)
            step //= 2
        for other in _WEIGHTS:
            if other != weights:
                self.propose(other, self.sets[best])

    @functools.cached_property
    def sets(self) -> list[RecomputeSet]:
        """What may be recomputed, from a little to as much as helps; of a folded step nothing."""
        if isinstance(self.captured, Folded):
            return []
        return recompute_sets(self.captured, self.ctx, _RECOMPUTE_SETS)

    def _spread(self, decisions: Sequence[Decision]) -> _Key:
        """Decisions for every parameter, from those for what is decided on together."""
        by_index = {
            index: decision
            for members, decision in zip(self.tied, decisions, strict=True)
            for index in members
        }
        return _Key(tuple(by_index[index] for index in range(len(self.choices))))

    def refine(self, share: float = 1.0) -> None:
        """Change a group of parameters, one, or two, until no such change is faster and fits.

        Or until such a share of what may still be looked at is used up. The additive model sees
        no overlap: what hides behind what only the simulator knows.
        """
        kept = self.left - math.ceil(share * self.left)
        self.left -= kept
        self._refine()
        self.left += kept

    def _refine(self) -> None:
        single = [[own] for own in self.tied]
        pairs = [[one, other] for one, other in itertools.combinations(self.tied, 2)]
        groups = [[members] for members in self._alike() if len(members) > 1]
        best = min(self.fitting(), key=self._seconds)
        by_size = functools.partial(
            sorted, key=lambda move: sum(map(self._size_bytes, move)), reverse=True
        )
        while self.left > 0:
            found = self._recomputing_other(best)
            found = self._better(found, by_size([*groups, *single]))
            if found == best:
                found = self._better(best, by_size(pairs), together=True)
            if found == best:
                return
            best = found

    def look_at_all(self) -> None:
        """Where there are few plans: at every one, as far as as many looks as refining has go.

        First at those that recompute what the fastest does, then the others.
        """
        best, _ = self.fastest()
        self.left = self._affordable_looks()
        options = [[choice.decision for choice in own] for own in self.tied_choices]
        keys = [best, *(best.recomputing(one) for one in (None, *self.sets))]
        for key in dict.fromkeys((one.recompute, one.also_save) for one in keys):
            if math.prod(map(len, options)) > self.left:
                return
            for decisions in itertools.product(*options):
                recompute, also_save = key
                tried = _Key(self._spread(decisions).decisions, recompute, also_save)
                best = self._faster(best, tried)

    def _recomputing_other(self, best: _Key) -> _Key:
        """The same with the next smaller or larger set, or less a group of like tensors.

        Of a plan that recomputes nothing: itself.
        """
        if not best.recompute:
            return best
        alike: dict[str, list[str]] = {}
        for name in best.recompute:
            alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        for group in alike.values():
            left = tuple(name for name in best.recompute if name not in group)
            best = self._faster(
                best, best._replace(recompute=left, also_save=best.also_save if left else ())
            )
        sets = [best.recomputing(one) for one in self.sets]
        if best in sets:
            index = sets.index(best)
            for key in (*sets[max(0, index - 1) : index], *sets[index + 1 : index + 2]):
                best = self._faster(best, key)
        return best

    def _faster(self, best: _Key, tried: _Key) -> _Key:
        """The one that fits and is faster, if refining may still look at it.

        What was looked at before is again, with the buckets that the best has by now.
        """
        size_bytes = self.seen[best][0].bucket_bytes
        known = size_bytes in self.sizes.get(tried, ())
        if known or self.left <= 0 or not self._may_fit(tried.decisions):
            return best
        self.left -= 1
        if tried in self.seen:
            self._with_buckets(tried, size_bytes)
        said = self.look(tried)
        faster = self.fits(said) and said.step_seconds < self._seconds(best)
        return tried if faster else best

    def _better(
        self, best: _Key, moves: list[list[list[int]]], together: bool = False
    ) -> _Key:
        """The fastest plan that fits, after each of these moves in turn where it is an improvement.

        ``moves``: of each, sets of indices of parameters; those of a set get one decision, all the
        same. ``together``: all sets get others than what they have.
        """
        for move in moves:
            options = [[choice.decision for choice in self.choices[own[0]]] for own in move]
            for decisions in itertools.product(*options):
                tried = list(best.decisions)
                for own, decision in zip(move, decisions, strict=True):
                    for index in own:
                        tried[index] = decision
                if not (together and any(best.decisions[o[0]] is tried[o[0]] for o in move)):
                    best = self._faster(best, best._replace(decisions=tuple(tried)))
                if self.left <= 0:
                    return best
        return best

    def mix_layers(self) -> None:
        """Of a folded step, whose layers were all decided on alike: one plan for some layers.

        The first ones get a plan that is faster and does not fit, the others one that does, or the
        other way round; as many as do fit, by a straight line between the two. The pairs that
        promise most are looked at.
        """
        limit_bytes = self.ctx.limit_bytes
        if not isinstance(self.captured, Folded) or limit_bytes is None:
            return
        layers = len(self.captured.layers)
        layer_of = {n: i for i, names in enumerate(self.captured.layers) for n in names}
        number = [layer_of.get(parameter.name) for parameter in self.ctx.parameters]
        fast = [key for key, (_, said) in self.seen.items() if not self.fits(said)]
        fits = self.fitting()
        promises: list[tuple[float, int, _Key, _Key]] = []
        for one, other in itertools.product(fast, fits):
            over, under = self.seen[one][1], self.seen[other][1]
            share = (limit_bytes - under.peak_bytes) / (over.peak_bytes - under.peak_bytes)
            count = int(share * layers)
            seconds = under.step_seconds + share * (over.step_seconds - under.step_seconds)
            if count:
                promises.append((seconds, count, one, other))
        promises.sort(key=lambda promise: promise[:2])
        best = min(map(self._seconds, fits), default=math.inf)
        for seconds, most, one, other in promises[:_MOST_MIXED]:
            if seconds >= best:
                return
            for first, last in ((one, other), (other, one)):
                count = most
                for _ in range(_MIXED_TRIES):
                    split = count if first is one else layers - count
                    mixed = tuple(
                        kept if place is None else early if place < split else late
                        for place, kept, early, late in zip(
                            number, other.decisions, first.decisions, last.decisions, strict=True
                        )
                    )
                    said = self.look(_Key(mixed))
                    if self.fits(said):
                        best = min(best, said.step_seconds)
                        break
                    count -= max(1, count // 16)

    def _may_fit(self, decisions: tuple[Decision, ...]) -> bool:
        """Whether what is held between steps leaves anything of the limit."""
        if self.ctx.limit_bytes is None:
            return True
        plan = self.empty.replace(parameters=_rows(self.ctx, decisions))
        return sum(state_bytes(self.ctx, plan).values()) <= self.ctx.limit_bytes

    def _affordable_looks(self) -> int:
        """How many plans may be looked at: fewer of a large graph, which takes long to simulate."""
        if isinstance(self.captured, Folded):
            return _FOLDED_REFINED
        graphs = self.captured.forward.graph, self.captured.backward.graph
        return min(_MOST_REFINED, _REFINED_NODES // sum(len(graph.nodes) for graph in graphs))

    def size_buckets(self, plans: int) -> None:
        """Larger and smaller buckets for the fastest plans that fit, while that helps.

        What a bucket saves in latency, and what it costs in overlap (it leaves with its last
        gradient, and is there with its last byte) and in memory, is what the simulator says.
        Plans that are looked at later start from the size that was best.
        """
        fitting = self.fitting()
        left = 2 + self._affordable_looks() // 2
        for key in sorted(fitting, key=self._seconds)[:plans]:
            for factor in _BUCKET_FACTORS:
                size_bytes, misses = self.seen[key][0].bucket_bytes, 0
                # A size that is no better does not say that the next one is not: one bucket more
                # or less may end at a good or a bad moment.
                while left > 0 and misses < _BUCKET_MISSES:
                    size_bytes = round(size_bytes * factor)
                    if not _LEAST_BUCKET_BYTES <= size_bytes <= self.most_bucket_bytes:
                        break
                    misses += 1
                    if size_bytes not in self.sizes[key]:
                        left -= 1
                        if self._with_buckets(key, size_bytes):
                            misses = 0
        best = min(fitting, key=self._seconds)
        self.empty = self.empty.replace(bucket_bytes=self.seen[best][0].bucket_bytes)

    def share_sizes(self) -> None:
        """Try the bucket sizes of the fastest plans on those that are nearly as fast.

        A plan was looked at with the size that was best then; another may be better for it.
        """
        left = self._affordable_looks() // 2
        fitting = sorted(self.fitting(), key=self._seconds)
        # Also those that did not fit: with smaller buckets they may.
        near = [key for key in self.seen if self._seconds(key) <= _NEAR * self._seconds(fitting[0])]
        near.sort(key=self._seconds)
        sizes = dict.fromkeys(self.seen[key][0].bucket_bytes for key in fitting[:_SIZED_PLANS])
        sizes[bucket_bytes_for(self.ctx)] = None
        for key, size_bytes in itertools.product(near, sizes):
            if left > 0 and size_bytes not in self.sizes[key]:
                left -= 1
                self._with_buckets(key, size_bytes)

    def _with_buckets(self, key: _Key, size_bytes: int) -> bool:
        """Whether a plan fits and is faster with buckets of another size; it then has them."""
        self.sizes[key].add(size_bytes)
        found = self._price(key, self.ctx, size_bytes)
        faster = found[1].step_seconds < self._seconds(key) or not self.fits(self.seen[key][1])
        if self.fits(found[1]) and faster:
            self.seen[key] = found
            return True
        return False

    def _seconds(self, key: _Key) -> float:
        return self.seen[key][1].step_seconds

    def least_memory(self) -> Prediction:
        """The least peak that is found, or the first on the way there that fits.

        Not always that of gathering everything again: a second gather may be in flight at
        the peak. Coordinate descent over groups of parameters that are alike, on schedules
        that give up all overlap, then the same with activations recomputed, then smaller buckets
        while that takes less; the way does not depend on the limit, so that the least limit an
        error names is one that works.
        """
        ctx = self.ctx.replace(limit_bytes=0)
        # What is cut within hosts mostly takes more than what is cut over all ranks, where both
        # can be: it is tried last.
        flat = [
            [one for one in options if not (one.decision.within_host and len(options) > 3)]
            for options in self.choices
        ]
        starts = [
            _Key(tuple(options[min(place, len(options) - 1)].decision for options in flat))
            for place in (2, 1, 0)
        ]
        size_bytes = bucket_bytes_for(ctx)
        looks: dict[_Key, tuple[Plan, Prediction]] = {}

        def priced(key: _Key, bucket_bytes: int) -> tuple[Plan, Prediction]:
            plan, _ = self._price(key, ctx, bucket_bytes)
            return plan, predict(self.captured, plan, ctx, self.passes).prediction

        def peak(key: _Key) -> int:
            if key not in looks:
                looks[key] = priced(key, size_bytes)
            return looks[key][1].peak_bytes

        def descended(best: _Key, choices: list[list[Choice]]) -> _Key:
            most, improved = len(looks) + _MOST_LOOKS, True
            while improved and len(looks) < most and not self.fits(looks[best][1]):
                improved = False
                for members in self._alike():
                    for option in choices[members[0]]:
                        decisions = list(best.decisions)
                        for index in members:
                            decisions[index] = option.decision
                        tried = best._replace(decisions=tuple(decisions))
                        if len(looks) < most and peak(tried) < peak(best):
                            best, improved = tried, True
                            if self.fits(looks[best][1]):
                                break
            return best

        # Where all weights of a step fit into one bucket, smaller ones decide what is best.
        best = min(starts, key=peak)
        if not self.fits(looks[best][1]):
            smaller = [(size_bytes // factor, key) for factor in (4, 16) for key in starts]
            found = {one: priced(one[1], one[0]) for one in smaller if one[0]}
            least = min(found, key=lambda one: found[one][1].peak_bytes)
            if found[least][1].peak_bytes < peak(best):
                size_bytes, best = least
                looks = {best: found[least]}
        best = descended(best, flat)
        if flat != self.choices:
            best = descended(best, self.choices)
        without = best
        for one in [] if self.fits(looks[best][1]) else self.sets:
            best = min(best, without.recomputing(one), key=peak)
            if self.fits(looks[best][1]):
                break
        if best is not without:
            best = descended(best, self.choices)
        chosen, misses = looks[best], 0
        size_bytes //= 4
        while size_bytes >= _LEAST_BUCKET_BYTES and misses < _BUCKET_MISSES:
            if self.fits(chosen[1]):
                break
            tried = priced(best, size_bytes)
            misses += 1
            if tried[1].peak_bytes < chosen[1].peak_bytes:
                chosen, misses = tried, 0
            size_bytes //= 4
        self.seen[best] = chosen
        self.sizes[best] = set()  # this was priced on schedules without overlap
        return chosen[1]

    def _alike(self) -> list[list[int]]:
        """Indices of parameters that differ in a layer's number only, the largest group first."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, parameter in enumerate(self.ctx.parameters):
            pattern = re.sub(r"\d+", "*", parameter.name)
            key = (pattern, parameter.shape, parameter.dtype, parameter.requires_grad)
            groups.setdefault(key, []).append(index)
        return sorted(groups.values(), key=self._size_bytes, reverse=True)

    def _size_bytes(self, members: list[int]) -> int:
        return sum(self.ctx.parameters[index].full_bytes for index in members)


def _tied(captured: Captured | Folded, ctx: Context) -> list[list[int]]:
    """Indices of parameters by what is decided on together, in the parameters' order."""
    place: dict[str, Hashable] = {}
    if isinstance(captured, Folded):
        place = {name: i for names in captured.layers for i, name in enumerate(names)}
    found: dict[Hashable, list[int]] = {}
    for index, parameter in enumerate(ctx.parameters):
        found.setdefault(place.get(parameter.name, parameter.name), []).append(index)
    return list(found.values())


def _rows(ctx: Context, decisions: Sequence[Decision]) -> tuple[ParameterPlan, ...]:
    return tuple(
        ParameterPlan(
            p.name,
            p.shape,
            p.dtype,
            decision,
            p.state_bytes(1) - p.state_bytes(ctx.cut(decision).ranks),
        )
        for p, decision in zip(ctx.parameters, decisions, strict=True)
    )

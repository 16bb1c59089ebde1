"""The sweep: what a training step is worth over ranks, bandwidths, memory and sequence lengths.

The question of "Memory and Bandwidth are All You Need for Fully Sharded Data Parallel"
(arXiv 2504.03655), put to the planner: at every point of a grid, what do the best plan and FSDP
(every parameter sharded and gathered again) reach, and what would have to be more for more?

*Utilisation.* The seconds that the step's FLOPs take at the rates that the profile has for matrix
products, as a share of the step: for one dtype FLOPs / (FLOP/s x seconds). The FLOPs are those of
the forward and backward as they were captured (``passes/annotate/flops.py``: matrix products,
convolutions, attention; a causal mask is not counted). Where nothing is recomputed
(``torch.utils.checkpoint``) that is the model FLOPs utilisation, against the profile's rates: a
preset's are :data:`passes.types.hardware_presets.MATMUL_EFFICIENCY` of the vendor's.

*What bounds a point.* By throughputs that the simulator gives, each "by more than a few per cent"
being :data:`NOTICEABLE`, in this order:

1. ``memory``: no plan fits; or without a limit there would be more throughput.
2. ``bandwidth``: the same plan would have more if bytes took no time between any ranks, and
   collectives their latency only.
3. ``latency``: it would not, and all the same waiting for communication is more of the step.
4. ``compute``: none of these.

Memory comes first, for it helps through less communication, or more computing beside it: where it
would help, bandwidth nearly always would, too.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence

from osdp_compile.errors import InfeasibleLimit
from osdp_compile.planning.traced_step import TracedStep, predicted
from passes.annotate.annotate_costs import flops_by_dtype
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import Decision, Plan, Prediction
from passes.types.units import format_limit

#: The share of a throughput, or of a step, that counts. Plans that the search finds for one limit
#: and for a larger one may be as far from each other without any reason but the search.
NOTICEABLE = 0.05


class Bound(str, enum.Enum):
    """What would have to be more for more throughput; see the module's docstring."""

    MEMORY = "memory"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    COMPUTE = "compute"


@dataclasses.dataclass(frozen=True)
class Grid:
    """The axes; the points are their product.

    ``meshes``: ranks by dimension, one or two. ``bandwidths``: times the profile's
    (:meth:`passes.types.hardware.Hardware.with_bandwidth`). ``limits``: bytes of a rank; None: no
    limit.
    ``lengths``: of a sequence; None: what the model is called with. ``batches``: sizes of a rank,
    no axis: at each point the one with the highest throughput counts; None: as for ``lengths``.
    """

    meshes: tuple[Mapping[str, int], ...]
    bandwidths: tuple[float, ...] = (1.0,)
    limits: tuple[int | None, ...] = (None,)
    lengths: tuple[int | None, ...] = (None,)
    batches: tuple[int | None, ...] = (None,)


@dataclasses.dataclass(frozen=True)
class Reached:
    """What a plan reaches at a point: ``batch`` of a rank, its prediction, its utilisation."""

    batch: int | None
    said: Prediction
    utilisation: float

    @property
    def rate(self) -> float:
        """Samples a second of one rank; steps a second where the batch size is not known."""
        return (self.batch or 1) / self.said.step_seconds


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the grid.

    ``best``, ``fsdp``: None where nothing fits. ``least_bytes``, ``fsdp_least_bytes``: the least
    limit that the best plan, or FSDP, would need there; else None.
    ``without_limit``, ``without_bandwidth``: how many times the throughput there would be without
    a limit, and the same plan's if bytes took no time; None where nothing fits.
    """

    ranks: Mapping[str, int]
    bandwidth: float = 1.0
    limit_bytes: int | None = None
    length: int | None = None
    best: Reached | None = None
    fsdp: Reached | None = None
    least_bytes: int | None = None
    fsdp_least_bytes: int | None = None
    without_limit: float | None = None
    without_bandwidth: float | None = None

    @property
    def world_size(self) -> int:
        return math.prod(self.ranks.values())

    @property
    def times_fsdp(self) -> float | None:
        """The best plan's throughput over FSDP's; None where either does not fit."""
        if self.best is None or self.fsdp is None:
            return None
        return self.best.rate / self.fsdp.rate

    @property
    def bound(self) -> Bound:
        """See the module's docstring."""
        if self.best is None or self.without_limit is None or self.without_bandwidth is None:
            return Bound.MEMORY
        if self.without_limit > 1 + NOTICEABLE:
            return Bound.MEMORY
        if self.without_bandwidth > 1 + NOTICEABLE:
            return Bound.BANDWIDTH
        if self.best.said.exposed_seconds > NOTICEABLE * self.best.said.step_seconds:
            return Bound.LATENCY
        return Bound.COMPUTE

    def samples_per_second(self, reached: Reached | None) -> float | None:
        """Of all ranks; None where nothing fits, or the batch size is not known."""
        if reached is None or reached.batch is None:
            return None
        return reached.rate * self.world_size

    def tokens_per_second(self, reached: Reached | None) -> float | None:
        """Of all ranks; None also where the sequence length is not known."""
        samples = self.samples_per_second(reached)
        return None if samples is None or self.length is None else samples * self.length


def sweep(
    traced: Callable[[int | None, int | None], TracedStep],
    grid: Grid,
    hardware: Hardware,
    say: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """Plan every point, in the order of the axes: length, ranks, bandwidth, limit.

    Args:
        traced: the training step of a batch size and a sequence length.
        say: is told what is being done.

    Raises:
        OsdpError: if the model has nothing to plan, or the profile no collectives.
    """
    points: list[Point] = []
    parts = len(grid.lengths) * len(grid.meshes) * len(grid.bandwidths)
    for length in grid.lengths:
        steps = {}
        for batch in grid.batches:
            say("tracing" + _about(batch, length))
            steps[batch] = traced(batch, length)
        for ranks in grid.meshes:
            # No ring of these ranks may cross the network, or it may not be what limits one.
            known: list[tuple[list[dict[str, LinkRate]], list[Point]]] = []
            for bandwidth in grid.bandwidths:
                faster = hardware.with_bandwidth(bandwidth, ranks)
                over = faster.over(ranks)
                rates = [over.collectives, *over.dimensions.values()]
                found = next((same for others, same in known if others == rates), None)
                if found is None:
                    part = len(points) // len(grid.limits) + 1
                    at = f"{part} of {parts}: {math.prod(ranks.values())} ranks, {bandwidth:g}x"
                    network = _Network(ranks, faster, grid.limits)
                    for batch, step in steps.items():
                        about = at + _about(batch, length)
                        network.add(step, batch, about, say)
                    found = network.points()
                    known.append((rates, found))
                points += [
                    dataclasses.replace(point, bandwidth=bandwidth, length=length)
                    for point in found
                ]
    return points


def _about(batch: int | None, length: int | None) -> str:
    named = {"batch": batch, "length": length}
    return "".join(f", {name} {size}" for name, size in named.items() if size is not None)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A plan that counts wherever it fits, and what it then reaches."""

    step: TracedStep
    plan: Plan
    reached: Reached


class _Network:
    """One network: what is found for all batch sizes, and its points.

    ``best``: whatever was found, ``fsdp`` too. ``least_bytes``: of each batch size that does not
    fit under some limit, the least that would do.
    """

    def __init__(
        self, ranks: Mapping[str, int], hardware: Hardware, limits: Sequence[int | None]
    ) -> None:
        self.ranks, self.hardware, self.limits = ranks, hardware, limits
        self.best: list[_Candidate] = []
        self.fsdp: list[_Candidate] = []
        self.least_bytes: list[int] = []

    def add(
        self, step: TracedStep, batch: int | None, about: str, say: Callable[[str], None]
    ) -> None:
        """Plan without a limit, and under those that this plan does not fit; ``about``: which."""
        where = self.ranks, self.hardware
        ideal_seconds = _ideal_seconds(step, self.hardware)

        def candidate(plan: Plan) -> _Candidate:
            said = predicted(plan)
            return _Candidate(step, plan, Reached(batch, said, ideal_seconds / said.step_seconds))

        say(f"{about}, no limit")
        fsdp = [candidate(step.uniform(Decision.SHARD_AGAIN, *where))]
        best = [candidate(step.plan(*where))]
        infeasible = False
        for limit in sorted({one for one in self.limits if one is not None}, reverse=True):
            say(f"{about}, limit {format_limit(limit)}")
            if _fastest(fsdp, limit) is None:
                fsdp.append(candidate(step.uniform(Decision.SHARD_AGAIN, *where, limit)))
            if infeasible or _fastest(best[:1], limit) is not None:
                continue
            try:
                best.append(candidate(step.plan(*where, limit)))
            except InfeasibleLimit as error:
                infeasible = True
                self.least_bytes.append(error.least_bytes)
        # What is found as FSDP, or under a limit, may be faster than what is found above it.
        self.best += [*best, *fsdp]
        self.fsdp += fsdp

    def points(self) -> list[Point]:
        """A point for each limit."""
        endless = self.hardware.with_bandwidth(math.inf)
        most = _fastest(self.best, None)
        assert most is not None
        priced: dict[int, float] = {}  # by the plan's id: it may be the best at many limits
        points = []
        for limit in self.limits:
            best, fsdp = _fastest(self.best, limit), _fastest(self.fsdp, limit)
            point = Point(ranks=self.ranks, limit_bytes=limit)
            if fsdp is None:
                least = min(one.reached.said.peak_bytes for one in self.fsdp)
                point = dataclasses.replace(point, fsdp_least_bytes=least)
            else:
                point = dataclasses.replace(point, fsdp=fsdp.reached)
            if best is None:
                point = dataclasses.replace(point, least_bytes=min(self.least_bytes))
            else:
                if id(best.plan) not in priced:
                    said = best.step.priced(best.plan, self.ranks, endless)
                    priced[id(best.plan)] = best.reached.said.step_seconds / said.step_seconds
                point = dataclasses.replace(
                    point,
                    best=best.reached,
                    without_limit=most.reached.rate / best.reached.rate,
                    without_bandwidth=priced[id(best.plan)],
                )
            points.append(point)
        return points


def _fastest(candidates: Sequence[_Candidate], limit_bytes: int | None) -> _Candidate | None:
    """The highest throughput of those that fit, if any does."""
    fitting = [
        one
        for one in candidates
        if limit_bytes is None or one.reached.said.peak_bytes <= limit_bytes
    ]
    return max(fitting, key=lambda one: one.reached.rate, default=None)


def _ideal_seconds(step: TracedStep, hardware: Hardware) -> float:
    """Seconds that the FLOPs of a step take at the profile's rates for matrix products."""
    graphs = (step.captured.forward.graph, step.captured.backward.graph)
    return sum(
        flops / hardware.flops(dtype)
        for graph in graphs
        for dtype, flops in flops_by_dtype(graph).items()
    )

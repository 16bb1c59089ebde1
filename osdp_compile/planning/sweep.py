"""Sweep: predicted throughput and bottleneck over ranks, bandwidths, memory and sequence lengths.

Puts the question of "Memory and Bandwidth are All You Need for Fully Sharded Data Parallel"
(arXiv 2504.03655) to the planner. For every point of a grid it gives the throughput of the best
plan and of FSDP (every parameter sharded, and regathered in the backward), and the bottleneck.

*Utilisation.* Ideal seconds as a share of the step's seconds. The ideal seconds are the step's
FLOPs at the profile's rates for matrix products: for one dtype FLOPs / (FLOP/s x seconds). The
FLOPs are of the captured forward and backward (``passes/annotate/flops.py``: matrix products,
convolutions, attention; a causal mask does not reduce them). Without recomputation
(``torch.utils.checkpoint``) this is the model FLOPs utilisation against the profile's rates; a
preset's rates are :data:`passes.types.hardware_presets.MATMUL_EFFICIENCY` of the vendor's.

*Bottleneck.* From simulated throughputs. "More" means more by the share :data:`NOTICEABLE`. The
first condition that holds counts:

1. ``memory``: no plan fits, or the throughput without a limit is more.
2. ``bandwidth``: the throughput of the same plan is more if bytes take no time between any ranks,
   and collectives only their latency.
3. ``latency``: the step's exposed communication is more than this share of the step.
4. ``compute``: none of these.

Memory comes first, because it helps by less communication, or by more compute beside it: where
memory helps, bandwidth nearly always helps too.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence

from osdp_compile.errors import InfeasibleLimit
from osdp_compile.planning.traced_step import TracedStep, predicted
from passes.types.decision import Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import Plan, Prediction
from passes.types.units import format_limit

#: The share of a throughput, or of a step, that counts. Plans for one limit and for a larger one
#: may differ as much only because of the search.
NOTICEABLE = 0.05


class Bound(str, enum.Enum):
    """The bottleneck of a point; see the module's docstring."""

    MEMORY = "memory"
    BANDWIDTH = "bandwidth"
    LATENCY = "latency"
    COMPUTE = "compute"


@dataclasses.dataclass(frozen=True)
class Grid:
    """The axes; the points are their product.

    ``meshes``: mesh dimension (one or two) -> number of ranks. ``bandwidths``: factors on the
    profile's (:meth:`passes.types.hardware.Hardware.with_bandwidth`). ``limits``: bytes per rank;
    None: no limit. ``lengths``: of a sequence; None: of the model's given arguments. ``batches``:
    sizes per rank, no axis: the size with the highest throughput counts at each point; None: as for
    ``lengths``.
    """

    meshes: tuple[Mapping[str, int], ...]
    bandwidths: tuple[float, ...] = (1.0,)
    limits: tuple[int | None, ...] = (None,)
    lengths: tuple[int | None, ...] = (None,)
    batches: tuple[int | None, ...] = (None,)


@dataclasses.dataclass(frozen=True)
class Reached:
    """A plan's results at a point: ``batch`` per rank, prediction, utilisation."""

    batch: int | None
    said: Prediction
    utilisation: float

    @property
    def rate(self) -> float:
        """Samples per second of one rank; steps per second if the batch size is unknown."""
        return (self.batch or 1) / self.said.step_seconds


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the grid.

    ``best``, ``fsdp``: None: does not fit. ``least_bytes``, ``fsdp_least_bytes``: the lowest
    feasible limit of any plan, or of FSDP, if it does not fit; else None.
    ``without_limit``, ``without_bandwidth``: factors on the best plan's throughput without a limit,
    and for the same plan if bytes take no time; None: nothing fits.
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
        """The best plan's throughput over FSDP's; None: one of them does not fit."""
        if self.best is None or self.fsdp is None:
            return None
        return self.best.rate / self.fsdp.rate

    @property
    def bound(self) -> Bound:
        """The bottleneck; see the module's docstring."""
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
        """Of all ranks; None: nothing fits, or the batch size is unknown."""
        if reached is None or reached.batch is None:
            return None
        return reached.rate * self.world_size

    def tokens_per_second(self, reached: Reached | None) -> float | None:
        """Of all ranks; None: nothing fits, or batch size or sequence length is unknown."""
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
        traced: batch size, sequence length -> the training step.
        say: gets a text before each stage.

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
            # Factors may give equal rates: no ring crosses the network, or it limits none.
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
    """A plan that counts wherever it fits, and its results."""

    step: TracedStep
    plan: Plan
    reached: Reached


class _Network:
    """One network: the plans found for all batch sizes, and its points.

    ``best``: all plans found, including ``fsdp``. ``least_bytes``: the lowest feasible limit of
    each batch size that does not fit under some limit.
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
        """Plan without a limit, and for limits below this plan's peak; ``about``: for ``say``."""
        where = self.ranks, self.hardware
        ideal_seconds = _ideal_seconds(step, self.hardware)

        def candidate(plan: Plan) -> _Candidate:
            said = predicted(plan)
            return _Candidate(step, plan, Reached(batch, said, ideal_seconds / said.step_seconds))

        say(f"{about}, no limit")
        fsdp = [candidate(step.uniform(Decision.SHARD_REGATHER, *where))]
        best = [candidate(step.plan(*where))]
        infeasible = False
        for limit in sorted({one for one in self.limits if one is not None}, reverse=True):
            say(f"{about}, limit {format_limit(limit)}")
            if _fastest(fsdp, limit) is None:
                fsdp.append(candidate(step.uniform(Decision.SHARD_REGATHER, *where, limit)))
            if infeasible or _fastest(best[:1], limit) is not None:
                continue
            try:
                best.append(candidate(step.plan(*where, limit)))
            except InfeasibleLimit as error:
                infeasible = True
                self.least_bytes.append(error.least_bytes)
        # FSDP, or a plan for a lower limit, may be faster than the plan for a higher limit.
        self.best += [*best, *fsdp]
        self.fsdp += fsdp

    def points(self) -> list[Point]:
        """One point per limit."""
        endless = self.hardware.with_bandwidth(math.inf)
        most = _fastest(self.best, None)
        assert most is not None
        priced: dict[int, float] = {}  # by id: a plan may be best at many limits
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
    """The candidate with the highest throughput that fits; None: none fits."""
    fitting = [
        one
        for one in candidates
        if limit_bytes is None or one.reached.said.peak_bytes <= limit_bytes
    ]
    return max(fitting, key=lambda one: one.reached.rate, default=None)


def _ideal_seconds(step: TracedStep, hardware: Hardware) -> float:
    """Seconds of the step's FLOPs at the profile's rates for matrix products."""
    return sum(flops / hardware.flops(dtype) for dtype, flops in step.flops())

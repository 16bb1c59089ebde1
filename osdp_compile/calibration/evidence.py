"""Evidence: what measured training steps teach about the prices of a hardware profile.

A measured step is laid beside the skeletons of its graphs (``passes/simulate/skeleton.py``). Three
sums are compared:

* **Computing.** Where nothing is in flight, measured over predicted seconds are the factors of
  torch's own kernels and of all others. Where something is in flight, the remainder is the compute
  time that communication takes. If a step hardly computes without communication, one factor
  explains all computing.
* **Waits.** The simulator runs with these factors. Longer measured waits are the lateness of ranks.
  Shorter waits, and those that no lateness explains, are a factor of the network.
* **The rest.** The optimizer's step has a factor. The time outside is the training loop's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import is_collective, is_model_collective
from passes.graph.metadata import COST
from passes.simulate.simulator import Simulation, idle_after, simulate
from passes.simulate.skeleton import is_computing, kernels, stalls
from passes.types.annotations import Cost, Memory
from passes.types.learned import LEAST_FACTOR, MOST_FACTOR, Learned

#: Share of the computing that must run without communication to be compared by itself.
_LEAST_ALONE = 0.1
#: Share of the step: a smaller difference teaches nothing.
SYSTEMATIC = 0.05
#: Share of the step: waits that differ by less are explained.
_LEAST_WAITS = 0.01
_HALVINGS = 30
#: Longer waits than those with this lateness come from the network.
MOST_LATE = 0.5


@dataclasses.dataclass(frozen=True)
class MeasuredGraph:
    """A graph's skeleton, and the measured seconds of each node that is called, in order."""

    skeleton: fx.Graph
    node_seconds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.node_seconds)

    @property
    def wait_seconds(self) -> float:
        return sum(self.waits())

    def waits(self) -> list[float]:
        """Seconds of each wait, and of each collective of the model itself."""
        return [seconds for node, seconds in self.pairs() if stalls(node)]

    def pairs(self) -> list[tuple[fx.Node, float]]:
        """Each called node with its seconds."""
        called = [node for node in self.skeleton.nodes if node.op == "call_function"]
        return list(zip(called, self.node_seconds, strict=True))


@dataclasses.dataclass(frozen=True)
class StepParts:
    """Measured seconds of a step's parts, as plain data.

    ``wait_seconds``: the part of forward and backward in which compute waits for communication.
    ``rest_seconds``: the optimizer and the training loop.
    """

    steps: int
    forward_seconds: float
    backward_seconds: float
    wait_seconds: float
    rest_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.rest_seconds


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """The typical step among several measured ones: the mean of the middle half.

    ``loop_seconds``: outside of the graphs and of the optimizer.
    """

    steps: int
    forward: MeasuredGraph
    backward: MeasuredGraph
    optimizer_seconds: float
    loop_seconds: float

    @property
    def graphs(self) -> tuple[MeasuredGraph, MeasuredGraph]:
        return self.forward, self.backward

    @property
    def wait_seconds(self) -> float:
        return sum(graph.wait_seconds for graph in self.graphs)

    @property
    def computing_seconds(self) -> float:
        """Of the graphs, without waits."""
        return sum(graph.seconds for graph in self.graphs) - self.wait_seconds

    @property
    def step_seconds(self) -> float:
        return self.parts().step_seconds

    def parts(self) -> StepParts:
        """The times without the graphs."""
        return StepParts(
            self.steps,
            self.forward.seconds,
            self.backward.seconds,
            self.wait_seconds,
            self.optimizer_seconds + self.loop_seconds,
        )


def is_systematic(step: MeasuredStep, update_seconds: float) -> bool:
    """Whether a part of a measured step is off by more than a share of the step.

    ``update_seconds``: the predicted seconds of the optimizer and the loop.
    """
    runs = _simulated(step.graphs)
    differences = (
        sum(run.compute_seconds for run in runs) - step.computing_seconds,
        sum(run.exposed_seconds for run in runs) - step.wait_seconds,
        update_seconds - step.optimizer_seconds - step.loop_seconds,
    )
    most = SYSTEMATIC * step.step_seconds
    return max(map(abs, (*differences, sum(differences)))) > most


def learned_from(step: MeasuredStep, update_seconds: float, in_force: Learned) -> Learned:
    """The corrections with which the profile predicts a measured step.

    Args:
        update_seconds: the predicted seconds of the optimizer and the loop.
        in_force: the corrections behind all predictions here.
    """
    computing = _computing(step, in_force)
    learned = dataclasses.replace(
        computing,
        steps=step.steps,
        update_factor=_of_update(step, update_seconds, in_force),
        loop_seconds=step.loop_seconds,
    )
    return _with_network(step, learned, in_force)


def _of_update(step: MeasuredStep, update_seconds: float, in_force: Learned) -> float:
    predicted = (update_seconds - in_force.loop_seconds) / in_force.update_factor
    if predicted <= 0 or step.optimizer_seconds <= 0:
        return in_force.update_factor
    return _bounded(step.optimizer_seconds / predicted)


def _bounded(factor: float) -> float:
    return min(MOST_FACTOR, max(LEAST_FACTOR, factor))


class _Computing:
    """Sums over the computing of a step, in seconds.

    ``own``, ``other``: of torch's own kernels and of all others, as pairs (predicted without
    corrections, measured); ``own_alone`` and ``other_alone`` while nothing is in flight.
    ``overhead``: of the starts of collectives.
    """

    def __init__(self, step: MeasuredStep, in_force: Learned) -> None:
        self.own, self.other = [0.0, 0.0], [0.0, 0.0]
        self.own_alone, self.other_alone = [0.0, 0.0], [0.0, 0.0]
        self.overhead = [0.0, 0.0]
        for graph in step.graphs:
            in_flight: set[fx.Node] = set()
            for node, measured in graph.pairs():
                if is_collective(node):
                    in_flight.add(node)
                    predicted = cost_of(node).compute_overhead_seconds
                    self._add([self.overhead], predicted / in_force.overhead_factor, measured)
                elif node.target is kernels:
                    sums = [self.own] if in_flight else [self.own, self.own_alone]
                    predicted = cost_of(node).seconds / in_force.kernel_factor
                    self._add(sums, predicted, measured)
                elif is_computing(node):
                    sums = [self.other] if in_flight else [self.other, self.other_alone]
                    predicted = cost_of(node).seconds / in_force.fused_factor
                    self._add(sums, predicted, measured)
                elif not is_model_collective(node):
                    in_flight.discard(node.args[0])

    @staticmethod
    def _add(sums: list[list[float]], predicted: float, measured: float) -> None:
        for one in sums:
            one[0] += predicted
            one[1] += measured

    def factors_alone(self) -> tuple[float, float] | None:
        """The factors without communication; None: too little runs so."""
        factors = []
        for whole, alone in ((self.own, self.own_alone), (self.other, self.other_alone)):
            if whole[0] > 0 and alone[0] < _LEAST_ALONE * whole[0]:
                return None
            factors.append(_bounded(alone[1] / alone[0]) if alone[0] > 0 else 1.0)
        return factors[0], factors[1]


def _computing(step: MeasuredStep, in_force: Learned) -> Learned:
    """The factors of computing, and of the compute overhead of collectives."""
    sums = _Computing(step, in_force)
    measured = sums.own[1] + sums.other[1] + sums.overhead[1]
    alone, overhead_factor = sums.factors_alone(), in_force.overhead_factor
    if alone is not None and sums.overhead[0] > 0:
        besides = measured - alone[0] * sums.own[0] - alone[1] * sums.other[0]
        overhead_factor = besides / sums.overhead[0]
        if LEAST_FACTOR <= overhead_factor <= MOST_FACTOR:
            return Learned(0, alone[0], alone[1], overhead_factor)
    elif alone is not None:
        return Learned(0, alone[0], alone[1], overhead_factor)
    overhead_factor = _bounded(overhead_factor)
    predicted = sums.own[0] + sums.other[0]
    if predicted <= 0:
        return Learned(overhead_factor=overhead_factor)
    factor = _bounded((measured - overhead_factor * sums.overhead[0]) / predicted)
    return Learned(0, factor, factor, overhead_factor)


def _with_network(step: MeasuredStep, learned: Learned, in_force: Learned) -> Learned:
    """The corrections, with the lateness and the network's factor that explain the waits."""
    waits = _Waits(step, in_force)
    difference = waits.measured - waits.predicted(learned)
    if abs(difference) <= _LEAST_WAITS * step.step_seconds:
        return learned

    def faster(factor: float) -> Learned:
        return dataclasses.replace(learned, network_factor=factor)

    def late(share: float) -> Learned:
        return dataclasses.replace(learned, lateness=share)

    if difference < 0:
        return waits.explained(faster, LEAST_FACTOR, 1.0)
    learned = waits.explained(late, 0.0, MOST_LATE)
    if waits.predicted(learned) >= waits.measured:
        return learned
    return waits.explained(faster, 1.0, MOST_FACTOR)


class _Waits:
    """The waits of a measured step, and those that the simulator predicts with corrections."""

    def __init__(self, step: MeasuredStep, in_force: Learned) -> None:
        self.measured = step.wait_seconds
        self._in_force = in_force
        self._graphs = step.graphs
        self._costs = {node: cost_of(node) for graph in step.graphs for node, _ in graph.pairs()}

    def predicted(self, tried: Learned) -> float:
        """Exposed seconds with these corrections."""
        for node, cost in self._costs.items():
            COST.set(node, _corrected(node, cost, self._in_force, tried))
        total = sum(run.exposed_seconds for run in _simulated(self._graphs))
        for node, cost in self._costs.items():
            COST.set(node, cost)
        return total

    def explained(self, tried: Callable[[float], Learned], low: float, high: float) -> Learned:
        """The corrections with the least value that predicts no less than was measured.

        ``tried``: the corrections with a value between ``low`` and ``high``.
        """
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.predicted(tried(middle)) < self.measured:
                low = middle
            else:
                high = middle
        return tried(high)


def _corrected(node: fx.Node, cost: Cost, before: Learned, after: Learned) -> Cost:
    """The cost of a skeleton's node with other corrections in force."""
    if is_collective(node) or is_model_collective(node):
        overhead = after.overhead_factor / before.overhead_factor
        return dataclasses.replace(
            cost,
            seconds=cost.seconds * after.network_factor / before.network_factor,
            compute_overhead_seconds=cost.compute_overhead_seconds * overhead,
            lateness=after.lateness,
        )
    if node.target is kernels:
        factor = after.kernel_factor / before.kernel_factor
    else:
        factor = after.fused_factor / before.fused_factor
    return dataclasses.replace(cost, seconds=cost.seconds * factor)


#: The memory of a skeleton is not known, and not asked for.
_NO_MEMORY = Memory([], fx.Graph().placeholder("x"), {}, 0)


def _simulated(graphs: Sequence[MeasuredGraph]) -> list[Simulation]:
    """A forward and its backward."""
    runs: list[Simulation] = []
    for graph in graphs:
        runs.append(simulate(graph.skeleton, _NO_MEMORY, idle_after(runs)))
    return runs


def typical(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """The mean of the middle half of measured steps of the same graphs."""
    kept = middle_half(steps)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def graph(graphs: Sequence[MeasuredGraph]) -> MeasuredGraph:
        columns = zip(*(one.node_seconds for one in graphs), strict=True)
        return MeasuredGraph(graphs[0].skeleton, tuple(mean(column) for column in columns))

    return MeasuredStep(
        len(steps),
        graph([one.forward for one in kept]),
        graph([one.backward for one in kept]),
        mean([one.optimizer_seconds for one in kept]),
        mean([one.loop_seconds for one in kept]),
    )


def middle_half(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The steps without the fastest and the slowest quarter."""
    ordered = sorted(steps, key=lambda one: one.step_seconds)
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]

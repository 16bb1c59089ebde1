"""The batch size of the highest throughput: found in few attempts, each of which is a trace."""

from __future__ import annotations

import dataclasses

import pytest

from osdp_compile import InfeasibleLimit, Plan
from osdp_compile.planning.batch_search import best_batch
from passes.types.hardware_presets import PRESETS
from passes.types.plan import Prediction


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that needs ``fixed`` bytes and ``each`` for a sample, and takes a given time."""

    batch: int
    fixed: int
    each: int
    seconds: float

    def least_bytes(self, ranks, hardware) -> int:
        return self.fixed + self.each * self.batch

    def plan(self, ranks, hardware, limit_bytes, search, say) -> Plan:
        least = self.least_bytes(ranks, hardware)
        if least > limit_bytes:
            raise InfeasibleLimit("too low", least)
        said = Prediction(self.seconds, self.seconds, 0.0, least, {"activations": least})
        return Plan((), world_size=4, prediction=said)


def tried(limit, fixed=100, each=10, seconds=lambda batch: 1.0 + batch, sizes=()):
    traces: list[int] = []

    def traced(batch: int) -> Step:
        traces.append(batch)
        return Step(batch, fixed, each, seconds(batch))

    found = best_batch(traced, sizes, {"ranks": 4}, PRESETS["cpu-gloo"], limit)
    assert len(traces) == len(set(traces)), "a batch is traced twice"
    return found, traces


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 7, 8, 10, 56, 64, 80, 896, 1 << 14])
def test_the_largest_batch_that_fits_is_found_in_few_traces(largest):
    found, traces = tried(limit=100 + 10 * largest)
    fitting = [one.batch for one in found if one.plan is not None]
    assert max(fitting) == largest
    best = max(found, key=lambda one: one.samples_per_second)
    assert best.batch == largest
    assert len(traces) <= 5, traces


def test_a_smaller_batch_that_is_faster_is_found():
    """Beyond 16 the step takes much longer, as where more must be recomputed."""
    found, _ = tried(100 + 10 * 64, seconds=lambda batch: (1 + batch) * max(1.0, batch / 16))
    assert max(found, key=lambda one: one.samples_per_second).batch == 16


def test_memory_that_does_not_grow_evenly_leads_there_too():
    """What the memory of two sizes predicts is too much."""

    class Uneven(Step):
        def least_bytes(self, ranks, hardware) -> int:
            return self.fixed + round(self.each * self.batch**1.2)

    def traced(batch: int) -> Step:
        return Uneven(batch, 100, 10, 1.0 + batch)

    found = best_batch(traced, (), {"ranks": 4}, PRESETS["cpu-gloo"], 1000)
    fitting = [one.batch for one in found if one.plan is not None]
    assert max(fitting) == 40  # 100 + 10 * 48 ** 1.2 is more than 1000


def test_given_sizes_are_all_tried_and_none_that_fits_is_an_error():
    found, traces = tried(200, sizes=(8, 1, 64))
    assert traces == [1, 8, 64] and [one.plan is not None for one in found] == [True, True, False]
    with pytest.raises(InfeasibleLimit, match="the smallest, 1, needs"):
        tried(50)


@pytest.mark.parametrize(("effort", "best", "most_traces"), [(1.3, 28, 5), (1.0, 112, 9)])
def test_what_is_recomputed_to_make_room_is_worth_it_or_not(effort, best, most_traces):
    """Beyond 28 samples activations must be recomputed, up to the 112 that fit at all."""
    limit = 100 + 10 * 28

    class Recomputing(Step):
        def plan(self, ranks, hardware, limit_bytes, search, say) -> Plan:
            if self.batch > 112:
                raise InfeasibleLimit("too low", 100 + self.batch * 10 // 4)
            whole = self.fixed + self.each * self.batch
            seconds = self.seconds * (effort if whole > limit_bytes else 1.0)
            peak = min(whole, limit_bytes)
            said = Prediction(seconds, seconds, 0.0, peak, {"activations": peak})
            return Plan((), world_size=4, prediction=said)

    def traced(batch: int) -> Step:
        return Recomputing(batch, 100, 10, 1.0 + batch)

    found = best_batch(traced, (), {"ranks": 4}, PRESETS["cpu-gloo"], limit)
    assert max(found, key=lambda one: one.samples_per_second).batch == best
    assert len(found) <= most_traces, [one.batch for one in found]

"""Collect: the data of a page are the plan's and the simulation's; bounds hold, and are said."""

from __future__ import annotations

import dataclasses
import math

import pytest

from osdp_compile.reports.page.collect import collect
from osdp_compile.reports.page.contents import Contents
from osdp_compile.reports.page.lanes import lanes_of
from osdp_compile.reports.page.memory_curve import memory_curve
from osdp_compile.reports.page.module_tree import module_tree
from passes.simulate.chrome_trace import StepTimeline
from passes.simulate.timeline import COMPUTE, Event, Timeline
from passes.types.decision import Decision
from passes.types.decode import decoded, encoded
from passes.types.plan import Plan
from tests.osdp_compile.reports.page.sources import EVIL, sources


def test_all_panels_have_the_plans_figures():
    given = sources()
    said, found = given.plan.prediction, collect(given)
    own = found.alternatives[0]
    assert own.name == "osdp" and own.fits
    assert own.step_seconds == pytest.approx(said.step_seconds)
    assert own.exposed_seconds == pytest.approx(said.exposed_seconds)
    assert own.peak_bytes == said.peak_bytes
    for one, (name, plan) in zip(found.alternatives[1:], given.others.items(), strict=True):
        assert (one.name, one.step_seconds, one.peak_bytes) == (
            name,
            plan.prediction.step_seconds,
            plan.prediction.peak_bytes,
        )
        assert one.fits == (one.peak_bytes <= given.limit_bytes)
    assert [point.limit_bytes for point in found.frontier] == [one for one, _ in given.frontier]
    assert found.measured == tuple(given.measured)
    assert decoded(Contents, encoded(found)) == found


def test_whose_operators_the_step_has_is_the_first_note():
    given = dataclasses.replace(sources(), operators="Traced without a GPU.")
    assert collect(given).notes == ("Traced without a GPU.", *collect(sources()).notes)


def test_the_rows_and_the_tree_have_every_parameter():
    found = collect(sources())
    names = [row.name for row in found.rows]
    assert sorted(names) == sorted(["layers.{0..2}.weight", EVIL])
    whole_bytes = (3 * 64 * 64 + 512 * 64) * 4
    assert sum(row.size_bytes for row in found.rows) == whole_bytes
    assert found.modules.size_bytes == whole_bytes
    assert found.modules.parameters == whole_bytes // 4
    (layers,) = (one for one in found.modules.children if one.name == "layers")
    assert [(one.name, one.copies) for one in layers.children] == [("{0..2}", 3)]


def test_neighbours_that_differ_stay_apart_in_the_tree():
    named = [(f"blocks.{n}.w", sources().plan["layers.0.weight"]) for n in range(4)]
    plan = Plan.uniform(named, Decision.SHARD_KEEP, world_size=8)
    rows = [
        dataclasses.replace(row, decision=Decision.REPLICATE) if "2" in row.name else row
        for row in plan.parameters
    ]
    (blocks,) = module_tree(plan.replace(parameters=tuple(rows)), "Net").children
    assert [one.name for one in blocks.children] == ["{0..1}", "2", "3"]
    assert blocks.bytes_by_decision == {"shard_keep": 3 * 64 * 64 * 4, "replicate": 64 * 64 * 4}


def test_the_timeline_has_every_event_and_every_wait_with_its_cause():
    step = sources().timeline
    found = lanes_of(step)
    assert found.names == ("phases", "compute", "waiting", "network")
    drawn = [span for span in found.spans if span.lane != found.names.index("phases")]
    events = [event for phase in step.phases for event in phase.events]
    stalls = [stall for phase in step.phases for stall in phase.stalls]
    assert len(drawn) == len(events) + len(stalls)
    assert sum(one.seconds for one in found.waits) == pytest.approx(step.exposed_seconds)
    waits = [span for span in drawn if span.kind == "wait"]
    assert waits and all(span.reason for span in waits)
    exposed = [span for span in drawn if span.kind in ("gather", "reduce") and span.exposed_seconds]
    assert math.fsum(s.exposed_seconds for s in exposed) == pytest.approx(step.exposed_seconds)


def many_kernels(count: int) -> StepTimeline:
    events = tuple(
        Event(f"k{n}", f"mm in blocks.{n}", COMPUTE, float(n), n + 1.0) for n in range(count)
    )
    memory = ((0.0, 0), (float(count), 0))
    one = Timeline("forward", float(count), events, (), memory, {}, 0, 0.0, "k0", ())
    return StepTimeline((one,))


def test_short_neighbours_are_merged_until_few_enough_are_left():
    found = lanes_of(many_kernels(1000), most=100)
    drawn = [span for span in found.spans if span.lane == 1]
    assert 30 <= len(drawn) <= 100 and found.events == 1001
    assert sum(span.events for span in drawn) == 1000
    assert sum(span.seconds for span in drawn) == pytest.approx(1000.0)
    assert "short ones, the longest: mm in blocks" in drawn[0].label


def test_the_memory_by_kind_adds_up_to_the_simulations_curve():
    given = sources()
    found = memory_curve(given.timeline, given.limit_bytes, None)
    total = [sum(sizes) for sizes in zip(*found.bytes_by_kind.values(), strict=True)]
    assert max(total) == found.peak_bytes == given.plan.prediction.peak_bytes
    assert total[found.seconds.index(found.peak_seconds)] == found.peak_bytes
    at_peak = {
        kind: sizes[total.index(found.peak_bytes)] for kind, sizes in found.bytes_by_kind.items()
    }
    assert {kind: size for kind, size in at_peak.items() if size} == given.plan.prediction.peak
    at_peak = sum(one.size_bytes for one in found.peak_buffers)
    assert at_peak + given.timeline.peak.base_bytes == found.peak_bytes
    assert list(found.seconds) == sorted(found.seconds)
    assert found.seconds[-1] == given.timeline.step_seconds


def test_few_points_keep_the_peak_and_few_buffers_the_largest():
    given = sources()
    found = memory_curve(given.timeline, None, None, most_points=8, most_buffers=3)
    total = [sum(sizes) for sizes in zip(*found.bytes_by_kind.values(), strict=True)]
    assert len(total) <= 10 and max(total) == found.peak_bytes == given.plan.prediction.peak_bytes
    all_buffers = memory_curve(given.timeline, None, None).buffers
    assert found.buffers == all_buffers[:3] and found.unlisted == len(all_buffers) - 3

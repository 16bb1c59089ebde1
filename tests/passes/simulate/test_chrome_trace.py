"""The step's timeline: phases one after the other, and a trace that viewers accept."""

from __future__ import annotations

import itertools
import json

import pytest

from passes.annotate.training_state import optimizer_temporary_bytes, state_bytes
from passes.simulate.chrome_trace import StepTimeline, highest_of_each_moment, optimizer_timeline
from passes.simulate.simulator import simulate
from passes.simulate.timeline import timeline_of
from tests.passes.graphs import context, parameter
from tests.passes.simulate.test_simulator import Priced


def phase(name: str, compute_seconds: float, base_bytes: int):
    """A gather of 10 s, two of them hidden behind a kernel, and a kernel."""
    b = Priced()
    x = b.tensor("x", 100)
    start = b.gather(x, seconds=10.0, memory_bytes=40)
    beside = b.kernel(x, seconds=2.0, memory_bytes=5)
    last = b.kernel(b.wait(start), beside, seconds=compute_seconds, memory_bytes=7)
    graph = b.finish(last).graph
    return timeline_of(graph, simulate(graph), phase=name, base={"parameters": base_bytes})


@pytest.fixture
def step() -> StepTimeline:
    return StepTimeline((phase("forward", 3.0, 1000), phase("backward", 5.0, 2000)), 4)


def complete(trace, thread):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == thread]


def test_phases_follow_each_other(step):
    assert step.step_seconds == 13.0 + 15.0
    assert step.compute_seconds == 5.0 + 7.0
    assert step.exposed_seconds == 8.0 + 8.0
    assert [start for start, _ in step.placed()] == [0.0, 13.0]
    assert step.peak.phase == "backward"
    assert step.peak.peak_bytes == 2000 + 100 + 40 + 5


def test_a_trace_names_a_thread_for_each_stream(step):
    trace = step.to_chrome_trace()
    names = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert names == {0: "phases", 1: "compute", 2: "network"}
    process = next(e for e in trace["traceEvents"] if e["name"] == "process_name")
    assert "4 ranks" in process["args"]["name"]
    assert {e["pid"] for e in trace["traceEvents"]} == {0}


def test_a_trace_holds_what_runs_in_microseconds(step):
    trace = step.to_chrome_trace()
    spans = [(e["name"], e["cat"], e["ts"], e["dur"]) for e in complete(trace, 1)]
    assert spans == [
        ("mm", "forward", 0.0, 2e6),
        ("idle: gather w", "forward", 2e6, 8e6),
        ("mm", "forward", 10e6, 3e6),
        ("mm", "backward", 13e6, 2e6),
        ("idle: gather w", "backward", 15e6, 8e6),
        ("mm", "backward", 23e6, 5e6),
    ]
    assert [(e["ts"], e["dur"]) for e in complete(trace, 2)] == [(0.0, 10e6), (13e6, 10e6)]
    assert complete(trace, 2)[0]["args"]["exposed_us"] == 8e6
    assert [(e["name"], e["ts"], e["dur"]) for e in complete(trace, 0)] == [
        ("forward", 0.0, 13e6),
        ("backward", 13e6, 15e6),
    ]


def test_a_traces_events_are_in_order_and_do_not_overlap():
    # Lengths that have no exact form, so that rounding is seen.
    step = StepTimeline(tuple(phase(f"p{n}", 1 / 3 + n / 7, n) for n in range(6)))
    trace = step.to_chrome_trace()
    for thread in (0, 1, 2):
        spans = complete(trace, thread)
        assert all(span["dur"] >= 0 for span in spans)
        for before, after in itertools.pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-4  # a tenth of a nanosecond
    moments = [e["ts"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert moments == sorted(moments)


def test_a_traces_memory_reaches_the_peak(step):
    counters = [e for e in step.to_chrome_trace()["traceEvents"] if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"memory"}
    assert max(e["args"]["bytes"] for e in counters) == step.peak.peak_bytes


def test_a_peak_that_takes_no_time_is_drawn():
    memory = ((0.0, 5), (0.0, 9), (0.0, 3), (1.0, 4), (1.0, 6), (2.0, 1))
    assert list(highest_of_each_moment(memory)) == [
        (0.0, 9),
        (0.0, 3),
        (1.0, 6),
        (2.0, 1),
    ]


def test_a_trace_is_saved_as_json(step, tmp_path):
    step.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == step.to_chrome_trace()


def test_the_optimizers_step_is_what_the_prediction_counts():
    ctx = context([parameter("a", [8, 4]), parameter("b", [2, 2], requires_grad=False)])
    state = state_bytes(ctx, ctx.plan)
    base = {"parameters": state["parameters"], "optimizer": state["optimizer"], "inputs": 50}
    found = optimizer_timeline(ctx, ctx.plan, base, kept_bytes=0)
    assert found.base == base
    assert found.step_seconds == ctx.hardware.update_seconds(sum(state.values()), 1)
    assert found.compute_seconds == found.step_seconds
    temporary_bytes = optimizer_temporary_bytes(ctx, ctx.plan)
    assert found.peak_bytes == sum(base.values()) + state["gradients"] + temporary_bytes
    assert sum(buffer.size_bytes for buffer in found.peak_buffers) == found.peak_bytes
    more_bytes = state["gradients"] + 100  # views keep the bucket that they are of
    kept = optimizer_timeline(ctx, ctx.plan, base, more_bytes)
    assert kept.peak_bytes == found.peak_bytes + 100

"""What is seen of a model's training: which steps count, and what keeps a timeline."""

from __future__ import annotations

import pytest

from osdp_compile.tracking import step_timer as module
from osdp_compile.tracking.step_timer import KEPT_STEPS, CompiledStep, Observed, timed
from passes.simulate.timeline import Timeline
from passes.types.context import Phase


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def timeline(phase: str) -> Timeline:
    return Timeline(phase, 1.0, (), (), (), {}, 1, 0.0, "x", ())


def compiled(observed: Observed, frame: int = 0) -> CompiledStep:
    step = CompiledStep(frame)
    observed.compiled(step, Phase.FORWARD, timeline("forward"))
    return step


def train(observed: Observed, clock: Clock, *lengths: float, frame: int = 0) -> None:
    """Start a forward, and another one after each of the lengths."""
    observed.forward_started(frame)
    for seconds in lengths:
        clock.now += seconds
        observed.forward_started(frame)


def test_a_step_is_from_one_forward_to_the_next_and_the_first_does_not_count(clock):
    seen = Observed()
    compiled(seen)
    train(seen, clock, 100.0, 2.0, 4.0, 3.0)
    assert (seen.steps, seen.step_seconds) == (3, 3.0)


def test_nothing_is_said_before_the_second_step(clock):
    seen = Observed()
    assert (seen.steps, seen.step_seconds) == (0, None)
    compiled(seen)
    train(seen, clock, 100.0)
    assert (seen.steps, seen.step_seconds) == (0, None)


def test_a_backward_that_is_compiled_late_costs_one_step_and_not_two(clock):
    seen = Observed()
    step = compiled(seen)
    seen.forward_started(0)
    seen.compiled(step, Phase.BACKWARD, timeline("backward"))
    clock.now += 100.0
    train(seen, clock, 2.0, 2.0)
    assert (seen.steps, seen.step_seconds) == (2, 2.0)


def test_a_step_in_which_something_is_compiled_and_the_one_after_do_not_count(clock):
    seen = Observed()
    compiled(seen)
    train(seen, clock, 100.0, 2.0)
    clock.now += 50.0
    compiled(seen)  # another batch size
    train(seen, clock, 30.0, 2.0)
    assert (seen.steps, seen.step_seconds) == (2, 2.0)


def test_validation_that_is_compiled_in_between_interrupts_one_step(clock):
    seen = Observed()
    compiled(seen)
    train(seen, clock, 100.0, 2.0)
    seen.interrupted()
    clock.now += 50.0
    train(seen, clock, 2.0)
    assert (seen.steps, seen.step_seconds) == (2, 2.0)


def test_with_graph_breaks_a_step_is_not_counted_for_every_graph(clock):
    seen = Observed()
    for frame in (0, 1):
        compiled(seen, frame)
    for _ in range(5):
        for frame in (0, 1):
            seen.forward_started(frame)
            clock.now += 1.0
    assert (seen.steps, seen.step_seconds) == (3, 2.0)
    assert seen.in_step == (0, 1)
    assert [graph.frame for graph in seen.graphs] == [0, 1]


def test_a_graph_that_runs_several_times_a_step_is_there_as_often(clock):
    seen = Observed()
    for frame in (0, 1, 2):
        compiled(seen, frame)
        seen.forward_started(frame)
    assert seen.in_step == (0, 1, 2)
    for frame in (0, 1, 1, 2):
        seen.forward_started(frame)
    assert [graph.frame for graph in seen.graphs] == [0, 1, 1, 2]


def test_only_the_last_steps_are_remembered(clock):
    seen = Observed()
    compiled(seen)
    train(seen, clock, 100.0, *[9.0] * 10, *[1.0] * KEPT_STEPS)
    assert (seen.steps, seen.step_seconds) == (KEPT_STEPS, 1.0)


def test_the_last_compilation_is_the_one_that_is_kept():
    seen = Observed()
    compiled(seen)
    second = compiled(seen)
    seen.compiled(second, Phase.BACKWARD, timeline("backward"))
    assert seen.graphs == [second]
    assert set(second.timelines) == {Phase.FORWARD, Phase.BACKWARD}


def test_the_timed_function_is_the_function_and_what_was_left_on_it(clock):
    def function(*args):
        return sum(args)

    function._boxed_call = True
    seen = Observed()
    compiled(seen)
    stamped = timed(function, seen, compiled(seen))
    assert [stamped(1, 2), stamped(3), stamped(4)] == [3, 3, 4]
    assert stamped._boxed_call is True
    assert seen.steps == 1


def test_a_step_runs_shared_code_several_times(clock):
    seen = Observed()
    shared = CompiledStep("block", times=3)
    seen.compiled(shared, Phase.FORWARD, timeline("forward"))
    train(seen, clock, *[1.0] * 11, frame="block")  # four steps, and the first does not count
    assert seen.in_step == ("block",) * 3
    assert seen.steps == 2 and seen.step_seconds == 3.0
    assert seen.graphs == [shared] * 3
    assert seen.before("block") == [shared] * 2

"""Traced steps: which calls are timed, which steps count, and when tracing ends."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from torch import fx

from osdp_compile import _torch
from osdp_compile.tracking import step_trace as module
from osdp_compile.tracking.step_trace import TRACED_STEPS, CallTimes, StepTraces
from passes.graph.fx_utils import ALL_GATHER, ALL_REDUCE, WAIT
from passes.simulate.skeleton import skeleton_of
from passes.types.context import Phase
from tests.passes.simulate.test_simulator import Priced

mm, pack = torch.ops.aten.mm.default, torch.ops.osdp.pack.default
reduce_in_place = torch.ops._c10d_functional.all_reduce_.default


def skeleton() -> fx.Graph:
    b = Priced()
    x = b.tensor("x")
    start = b.reduce(x)
    b.finish(b.kernel(b.wait(start), x))
    return skeleton_of(b.graph)


def times(*calls) -> CallTimes:
    found = CallTimes()
    found.calls = list(calls)
    found.begin, found.end = 10.0, 20.0
    return found


def test_what_is_between_collectives_and_waits_is_a_kernel_of_torchs_own_or_another():
    found = times(
        (mm, 10.5, 12.0),
        (reduce_in_place, 12.0, 12.5),
        (pack, 13.0, 13.25),
        (WAIT, 14.0, 16.0),
        (mm, 16.0, 17.0),
        (mm, 18.0, 19.0),
    ).along(skeleton())
    assert found.node_seconds == (1.5, 0.5, 0.5, 0.0, 1.5, 2.0, 2.0, 2.0)
    assert (found.seconds, found.wait_seconds) == (10.0, 2.0)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [(WAIT, 11.0, 12.0), (ALL_REDUCE, 12.0, 12.5)],
        [(ALL_REDUCE, 11.0, 12.0)],
        [(ALL_REDUCE, 11.0, 12.0), (WAIT, 12.0, 13.0), (WAIT, 13.0, 14.0)],
    ],
)
def test_calls_of_another_graph_are_not_laid_along(calls):
    assert times(*calls).along(skeleton()) is None


def test_a_collective_of_another_kind_is_another_graph():
    assert times((ALL_GATHER, 11.0, 12.0), (WAIT, 12.0, 13.0)).along(skeleton()) is None


def test_the_operators_of_a_forward_and_of_its_backward_are_timed():
    traces, weight = StepTraces(lambda _: True, list), torch.ones(4, 4, requires_grad=True)
    (loss,) = traces.forward(lambda x: ((x @ x).sum(),), (weight,), {})
    loss.backward()
    trace = traces._open
    named = [str(func) for func, *_ in trace.forward.calls]
    assert named == ["aten.mm.default", "aten.sum.default"]
    assert "aten.expand.default" in [str(func) for func, *_ in trace.backward.calls]
    assert trace.begin <= trace.forward.begin < trace.forward.end < trace.backward.end
    count = len(trace.backward.calls)
    torch.ones(2) + 1
    assert len(trace.backward.calls) == count


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no memory")


def test_a_backward_that_fails_leaves_no_mode_behind():
    traces, weight = StepTraces(lambda _: True, list), torch.ones(4, requires_grad=True)
    (out,) = traces.forward(lambda x: (Fails.apply(x),), (weight,), {})
    with pytest.raises(ValueError, match="no memory"):
        out.sum().backward()
    traces.next_step(0.0, {})
    assert _torch.autograd._get_current_dispatch_mode() is None
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    assert traces.steps == []


class Clock:
    """A clock that a step advances by its own length."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def empty() -> fx.Graph:
    b = Priced()
    b.finish(b.kernel(b.tensor("x")))
    return skeleton_of(b.graph)


def train(traces: StepTraces, clock: Clock, lengths, optimizer=None) -> None:
    skeletons = {Phase.FORWARD: empty(), Phase.BACKWARD: empty()}
    weight = torch.ones(2, requires_grad=True)

    def forward(x):
        clock.now += 1.0
        return (x.sum(),)

    for seconds in lengths:
        traces.next_step(clock.now, skeletons)
        if traces.is_over:
            return
        (loss,) = traces.forward(forward, (weight,), {})
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        clock.now += seconds - 1.0
    traces.next_step(clock.now, skeletons)


def test_steady_steps_are_handed_over_once_and_tracing_ends(clock):
    done = []
    traces = StepTraces(lambda _: True, done.append)
    train(traces, clock, [10.0] * (TRACED_STEPS + 5))
    assert [len(steps) for steps in done] == [TRACED_STEPS] and traces.is_over
    assert {(one.step_seconds, one.forward.seconds) for one in done[0]} == {(10.0, 1.0)}
    train(traces, clock, [10.0] * 20)
    assert len(done) == 1


def test_unsteady_steps_are_traced_again_and_teach_nothing_if_they_stay_so(clock):
    done = []
    traces = StepTraces(lambda _: True, done.append)
    train(traces, clock, [5.0, 50.0] * 6 + [10.0] * TRACED_STEPS)
    assert len(done) == 1
    traces.restart()
    train(traces, clock, itertools.chain.from_iterable([5.0, 50.0] for _ in range(50)))
    assert len(done) == 1 and traces.is_over


def test_a_step_in_which_something_is_compiled_is_left_out(clock):
    traces = StepTraces(lambda _: True, list)
    train(traces, clock, [10.0] * 3)
    traces.forward(lambda: (torch.ones(1),), (), {})
    traces.interrupted()
    train(traces, clock, [10.0] * 2)
    assert len(traces.steps) == 5
    traces.restart()
    assert traces.steps == [] and not traces.is_over


def test_the_step_of_the_models_own_optimizer_is_timed(clock):
    class Slow(torch.optim.SGD):
        def step(self):
            clock.now += 2.0

    own, other = (Slow([torch.ones(1, requires_grad=True)], 0.1) for _ in range(2))
    traces = StepTraces(lambda one: one is own, list)
    train(traces, clock, [10.0] * 2, own)
    train(traces, clock, [10.0] * 2, other)
    assert [one.optimizer_seconds for one in traces.steps] == [2.0, 2.0, 0.0, 0.0]
    assert [one.loop_seconds for one in traces.steps] == [9.0, 9.0, 11.0, 11.0]


@pytest.mark.parametrize("is_another", [True, False])
def test_steps_of_other_graphs_are_said_once(clock, caplog, is_another):
    traces = StepTraces(lambda _: True, lambda _: None)
    another = mock.patch.object(module.CallTimes, "along", return_value=None)
    with another if is_another else contextlib.nullcontext(), caplog.at_level("INFO"):
        train(traces, clock, [2.0] * (module._MOST_STEPS + 3))
    assert traces.is_over
    assert caplog.text.count("no step is measured part by part") == is_another

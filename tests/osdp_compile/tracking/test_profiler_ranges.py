"""Ranges of a profiled step: those of the simulated trace, in its order."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import osdp_compile
from osdp_compile import Plan
from osdp_compile.tracking import profiler_ranges
from tests.osdp_compile.tracking.test_step_trace import Fails
from tests.training import SLOW


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def profiled(rank, world_size, folder):
    """Names of the profile's own ranges by phase, and of the simulated trace's collectives."""
    torch.manual_seed(0)
    net = model()
    plan = Plan.uniform(net.named_parameters(), "shard_regather", world_size=world_size)
    options = {"plan": plan.replace(bucket_bytes=1 << 8), "hardware": SLOW}
    compiled = torch.compile(net, backend="osdp", options=options)

    def step():
        compiled(torch.ones(4, 8)).sum().backward()

    entered = mock.patch.object(
        profiler_ranges, "record_function", side_effect=AssertionError("no profiler records")
    )
    with entered:
        step()
        step()
    trace_path, step_path = f"{folder}/profiled{rank}.json", f"{folder}/simulated{rank}.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(trace_path)
    with entered:
        step()
    osdp_compile.report(net).save_trace(step_path)
    return spans(trace_path), spans(step_path)


def spans(path):
    """(name, start, end) of a trace's complete events."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    found = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
    return sorted(found, key=lambda span: span[1:])


def within(trace, phase, wanted):
    """Names in a phase that begin with one of ``wanted``, in the order of their starts."""
    ((_, begin, end),) = [span for span in trace if span[0] == phase]
    return [name for name, start, _ in trace if begin <= start < end and name.startswith(wanted)]


def test_a_profiled_step_has_the_ranges_of_the_simulated_one(two_ranks, tmp_path):
    for real, simulated in two_ranks.run(profiled, str(tmp_path)):
        for phase in ("forward", "backward"):
            kinds = ("gather ", "reduce ")
            ours = within(real, f"osdp: {phase}", kinds)
            assert len(ours) >= 2
            assert ours == within(simulated, phase, kinds)
            waits = within(real, f"osdp: {phase}", ("wait: ",))
            assert sorted(waits) == sorted(f"wait: {label}" for label in ours)


@pytest.mark.parametrize("fails", [False, True])
def test_the_mode_ends_with_the_backward(fails):
    function = Fails.apply if fails else torch.neg
    weight = torch.ones(2, requires_grad=True)
    ranges = profiler_ranges.ProfilerRanges()

    def forward():
        return ranges.forward(lambda x: (function(x),), (weight,), {})

    with profile(activities=[ProfilerActivity.CPU]):
        (out,) = forward()
        if fails:
            with pytest.raises(ValueError, match="no memory"):
                out.sum().backward()
            forward()
        else:
            out.sum().backward()
    assert not is_in_torch_dispatch_mode()

"""A small training step for the tests of pages: its plan, simulated step, and alternatives."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from osdp_compile.planning.alternatives import ALTERNATIVES
from osdp_compile.planning.traced_step import TracedStep, trace
from osdp_compile.reports.page.collect import Sources
from osdp_compile.reports.page.contents import Measured
from passes.types.hardware import Hardware
from passes.types.hardware_presets import preset

#: A name that would run as a script, if any part of a page took it as HTML.
EVIL = "</script><script>evil = 1</script><img src=x onerror='evil = 2'>"
RANKS = {"ranks": 8}


def slow_network() -> Hardware:
    """A machine on which communication is exposed."""
    return preset("cpu-gloo")


class Net(nn.Module):
    """Alike layers, and a parameter with an evil name."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.register_parameter(EVIL, nn.Parameter(torch.ones(8 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return (x @ self._parameters[EVIL].T).square().mean()


@functools.cache
def traced(layers: int = 3) -> TracedStep:
    with torch.device("meta"):
        return trace(Net(layers), (torch.empty(32, 64),))


@functools.cache
def sources(layers: int = 3) -> Sources:
    """All that a page may have."""
    step, hardware = traced(layers), slow_network()
    plan = step.plan(RANKS, hardware)
    others = {
        name: step.uniform(decision, RANKS, hardware)
        for name, decision in ALTERNATIVES.items()
        if not decision.within_host
    }
    peak_bytes = plan.prediction.peak_bytes
    return Sources(
        model=f"Net {EVIL}",
        hardware=hardware.name,
        plan=plan,
        timeline=step.simulated(plan, RANKS, hardware),
        limit_bytes=peak_bytes + 1000,
        others=others,
        frontier=[(peak_bytes - 1, others["FSDP: shard all, regather"]), (peak_bytes, plan)],
        measured=[Measured("step", "1 ms", "2 ms", "0.50")],
        measured_notes=[f"note {EVIL}"],
        measured_peak_bytes=peak_bytes - 1000,
    )

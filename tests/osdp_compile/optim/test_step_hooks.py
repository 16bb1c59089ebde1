"""Hooks run for the user's optimizers, and not for those whose steps the package times."""

from __future__ import annotations

import torch
from torch import nn

from osdp_compile.calibration.optimizer_times import with_update_seconds
from osdp_compile.optim.step_hooks import after_steps, before_steps
from passes.types.hardware_presets import PRESETS


def test_timing_an_optimizer_runs_no_hook():
    seen = []

    def hook(optimizer, args, kwargs):
        seen.append(optimizer)

    handles = [before_steps(hook), after_steps(hook)]
    try:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        own = torch.optim.AdamW([parameter])
        own.step()
        measured = with_update_seconds(PRESETS["h100-sxm"], None, torch.device("cpu"), 1 << 22)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [own, own]
    assert measured.update_seconds_per_parameter > 0

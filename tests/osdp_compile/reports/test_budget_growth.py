"""The growth of a step in lines: what is new or larger, in groups of layers, the largest first."""

from __future__ import annotations

import dataclasses

import pytest

from osdp_compile.reports.budget_figures import BudgetFigures, ParameterFigures, PhaseSeconds
from osdp_compile.reports.budget_growth import (
    changed_decisions,
    changed_settings,
    growth_of_parameters,
    growth_of_peak,
    growth_of_step,
)

KIB, MIB = 1 << 10, 1 << 20
WEIGHT = ParameterFigures("512x512 float32", MIB, "replicate")
BIAS = ParameterFigures("512 float32", 2 * KIB, "replicate")


def layers(count: int, weight: ParameterFigures = WEIGHT) -> dict[str, ParameterFigures]:
    return {
        f"blocks.{index}.up.{name}": one
        for index in range(count)
        for name, one in (("weight", weight), ("bias", BIAS))
    }


def saved(layer: int) -> str:
    return f"blocks.{layer}.up: saved for the backward, activations"


BEFORE = BudgetFigures(
    settings={"ranks": "8", "torch": "2.13"},
    peak_bytes=12 * MIB,
    step_seconds=0.1,
    recomputed_seconds=0.0,
    peak_phase="backward",
    peak={"parameters": 8 * MIB, "activations": 4 * MIB},
    phases={"forward": PhaseSeconds(0.03, 0.01), "backward": PhaseSeconds(0.06, 0.0)},
    parameters=layers(3),
    buffers={saved(layer): MIB for layer in range(3)},
)


def changed(**fields: object) -> BudgetFigures:
    return dataclasses.replace(BEFORE, **fields)


def test_equal_figures_show_no_change():
    assert growth_of_parameters(BEFORE.parameters, BEFORE.parameters) == []
    assert changed_decisions(BEFORE, BEFORE) == []
    assert changed_settings(BEFORE.settings, BEFORE.settings) == []
    assert growth_of_peak(BEFORE, BEFORE) == [
        "peak, in the backward: 12.00 MiB, stored 12.00 MiB",
        "  parameters: 8.00 MiB",
        "  activations: 4.00 MiB",
        "largest tensors at the peak:",
        "  blocks.{0..2}.up: saved for the backward, activations: 1.00 MiB each",
    ]
    assert growth_of_step(BEFORE, BEFORE)[1:] == [
        "  forward: compute 30.0 ms, exposed communication 10.0 ms",
        "  backward: compute 60.0 ms, exposed communication 0 us",
    ]


def test_new_layers_are_a_group_the_largest_first():
    assert growth_of_parameters(layers(5), BEFORE.parameters) == [
        "parameters, whole: +2.00 MiB",
        "  blocks.{3..4}.up.weight: new, 512x512 float32, +2.00 MiB",
        "  blocks.{3..4}.up.bias: new, 512 float32, +4.00 KiB",
    ]


def test_larger_and_gone_parameters():
    wide = ParameterFigures("512x768 float32", 3 * MIB // 2, "replicate")
    now = {name: one for name, one in layers(3, wide).items() if not name.endswith("bias")}
    assert growth_of_parameters(now, BEFORE.parameters) == [
        "parameters, whole: +1.49 MiB",
        "  blocks.{0..2}.up.weight: 512x512 float32 -> 512x768 float32 each, +1.50 MiB",
        "  blocks.{0..2}.up.bias: gone, -6.00 KiB",
    ]


def test_another_decision_is_no_growth_of_a_parameter():
    now = changed(parameters=layers(3, dataclasses.replace(WEIGHT, decision="shard, keep")))
    assert growth_of_parameters(now.parameters, BEFORE.parameters) == []
    assert changed_decisions(now, BEFORE) == [
        "parameters with another decision:",
        "  blocks.{0..2}.up.weight: replicate -> shard, keep",
    ]


def test_the_parts_and_the_tensors_of_a_peak_the_most_grown_first():
    now = changed(
        peak_bytes=17 * MIB,
        peak_phase="forward",
        peak={"parameters": 7 * MIB, "activations": 8 * MIB, "gathered": 2 * MIB},
        buffers={saved(0): 2 * MIB, saved(1): 2 * MIB, saved(3): MIB, "head: mm, activations": MIB},
    )
    assert growth_of_peak(now, BEFORE) == [
        "peak, in the forward: 17.00 MiB, stored 12.00 MiB in the backward",
        "  activations: 8.00 MiB, +4.00 MiB",
        "  gathered: 2.00 MiB, +2.00 MiB",
        "  parameters: 7.00 MiB, -1.00 MiB",
        "tensors at the peak that changed:",
        "  blocks.{0..1}.up: saved for the backward, activations: 1.00 MiB -> 2.00 MiB each, "
        "+2.00 MiB",
        "  blocks.3.up: saved for the backward, activations: new, +1.00 MiB",
        "  head: mm, activations: new, +1.00 MiB",
        "  blocks.2.up: saved for the backward, activations: gone, -1.00 MiB",
    ]


def test_a_part_that_is_gone_is_a_change():
    now = changed(peak={"parameters": 13 * MIB}, peak_bytes=13 * MIB)
    assert growth_of_peak(now, BEFORE)[1:3] == [
        "  parameters: 13.00 MiB, +5.00 MiB",
        "  activations: 0 B, -4.00 MiB",
    ]


def test_without_stored_figures_the_largest_are_shown():
    said = growth_of_peak(BEFORE, None)
    assert said[0] == "peak, in the backward: 12.00 MiB"
    assert said[3] == "largest tensors at the peak:"
    assert growth_of_step(BEFORE, None)[0] == "step: 100.0 ms"


def test_many_changes_are_summed_up():
    names = [f"layer_{chr(97 + index)}: mm, activations" for index in range(12)]
    now = changed(buffers={**BEFORE.buffers, **dict.fromkeys(names, KIB)})
    said = growth_of_peak(now, BEFORE)
    assert said[-1] == "  4 more, +4.00 KiB"
    assert said[-2] == "  layer_h: mm, activations: new, +1.00 KiB"


def test_the_step_by_phase_with_what_is_recomputed():
    now = changed(
        step_seconds=0.15,
        recomputed_seconds=0.02,
        phases={"forward": PhaseSeconds(0.03, 0.03), "backward": PhaseSeconds(0.08, 0.0)},
    )
    assert growth_of_step(now, BEFORE) == [
        "step: 150.0 ms, stored 100.0 ms",
        "  forward: compute 30.0 ms, exposed communication 30.0 ms (+20.0 ms)",
        "  backward: compute 80.0 ms (+20.0 ms), exposed communication 0 us",
        "  recomputing, within the backward: 20.0 ms (+20.0 ms)",
    ]


@pytest.mark.parametrize("change", [-3e-7, 3e-7])
def test_a_change_below_what_is_printed_is_none(change):
    phases = {**BEFORE.phases, "forward": PhaseSeconds(0.03 + change, 0.01)}
    assert growth_of_step(changed(phases=phases), BEFORE)[1].startswith(
        "  forward: compute 30.0 ms, exposed"
    )


def test_other_settings_are_named():
    assert changed_settings({"ranks": "16", "torch": "2.13"}, BEFORE.settings) == [
        "the stored figures are of other settings:",
        "  ranks: 8 -> 16",
    ]

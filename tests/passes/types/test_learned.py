"""Corrections of a profile: their text, and their prices."""

from __future__ import annotations

import dataclasses

import pytest

from passes.types.hardware import Hardware
from passes.types.learned import Learned
from tests.passes.graphs import hardware

LEARNED = Learned(8, 1.5, 2.0, 3.0, 0.5, 0.25, 1.25, 0.01)


def test_every_correction_is_said():
    assert str(LEARNED) == (
        "torch's kernels x1.50, other kernels x2.00, compute overhead of collectives x3.00, "
        "collectives x0.50, ranks late by 25%, optimizer x1.25, training loop 10.0 ms"
    )


def test_they_are_in_force_for_their_step_alone():
    profile = hardware(learned={"one": LEARNED})
    assert profile.in_force == profile.for_step("other").in_force == Learned()
    assert profile.for_step("one").in_force == LEARNED
    assert profile.for_step("one").for_step("other") == profile
    assert profile.for_step("one").without_steps() == hardware()


def test_prices_have_them_and_rates_do_not():
    profile = hardware(update_seconds_per_byte=1.0, learned={"one": LEARNED})
    changed = profile.for_step("one")
    for price, factor in (
        (lambda one: one.collective_seconds("all_gather", 1 << 20, 2), 0.5),
        (lambda one: one.update_seconds(100, 1), 1.25),
    ):
        assert price(changed) == pytest.approx(factor * price(profile))
    assert changed.collectives == profile.collectives


def test_a_profile_keeps_them_and_one_without_them_is_read(tmp_path):
    profile = hardware(learned={"one": LEARNED})
    profile.save(tmp_path / "new.json")
    assert Hardware.load(tmp_path / "new.json") == profile
    older = hardware().to_dict()
    del older["learned"], older["in_force"]
    assert Hardware.from_dict(older) == hardware()


def test_a_factor_that_no_measurement_gives_is_refused():
    broken = dataclasses.replace(LEARNED, kernel_factor=0.0)
    with pytest.raises(ValueError, match="kernel_factor"):
        Hardware.from_dict(hardware(learned={"one": broken}).to_dict())

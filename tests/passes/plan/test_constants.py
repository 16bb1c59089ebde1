"""Constants: few, and each is explained."""

from __future__ import annotations

import dataclasses

from passes.plan.constants import Constants


def test_there_are_at_most_twelve_and_each_is_explained():
    names = [field.name for field in dataclasses.fields(Constants)]
    assert len(names) <= 12
    assert all(f"``{name}``" in (Constants.__doc__ or "") for name in names)

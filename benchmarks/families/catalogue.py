"""All families of the sweep, by package."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.families import (
    diffusers_models,
    hand_written_models,
    hand_written_scripts,
    peft_models,
    timm_models,
    transformers_models,
)
from benchmarks.families.trial import Family

FAMILIES: tuple[Family, ...] = (
    *hand_written_models.FAMILIES,
    *hand_written_scripts.FAMILIES,
    *transformers_models.FAMILIES,
    *timm_models.FAMILIES,
    *diffusers_models.FAMILIES,
    *peft_models.FAMILIES,
)


def find_family(name: str) -> Family:
    """The family of this name.

    Raises:
        ValueError: for an unknown name; it lists the known ones.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(repr(family.name) for family in FAMILIES)
    raise ValueError(f"there is no family {name!r}; there are: {known}")


def is_installed(family: Family) -> bool:
    """Whether the family's package is there."""
    return family.package == "by hand" or find_spec(family.package) is not None

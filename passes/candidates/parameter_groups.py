"""Alike: parameters that differ in a layer's number only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from passes.types.context import Parameter


def alike(parameters: Sequence[Parameter]) -> list[list[int]]:
    """Indices of parameters that differ in a layer's number only, as each group begins."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(parameters):
        pattern = re.sub(r"\d+", "*", one.name)
        key = (pattern, one.shape, one.dtype, one.requires_grad)
        groups.setdefault(key, []).append(index)
    return list(groups.values())

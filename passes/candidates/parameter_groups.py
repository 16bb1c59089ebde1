"""Parameter groups: parameters whose names differ only in a layer's number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from passes.types.context import Parameter


def alike(parameters: Sequence[Parameter]) -> list[list[int]]:
    """Group the indices of parameters whose names differ only in the numbers of layers.

    ``norm1`` and ``norm2`` are two names. Shape, dtype and ``requires_grad`` must agree. Groups are
    in the order of their first index.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, one in enumerate(parameters):
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", one.name)
        key = (pattern, one.shape, one.dtype, one.requires_grad)
        groups.setdefault(key, []).append(index)
    return list(groups.values())

"""Captured: the two graphs of a training step before any decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from torch import fx


@dataclasses.dataclass(frozen=True)
class Captured:
    """A partitioned training step with a marker for every parameter that it reads.

    ``values``: the cache that all graphs made from this step share
    (:func:`passes.graph.fx_utils.shared_values`).
    ``unread``: the model's parameters that eager code outside of the graphs reads.
    ``is_joined``: the graphs join several frames (``passes/capture/join_frames.py``).
    ``border_bytes``: the most bytes of gradients that one frame's backward gets from later frames.
    Autograd holds them while that backward runs.
    ``runs``: of each frame's run, by parameter name of its graph, the name in this run. Equal
    blocks share a graph, which has the names of its first run.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    values: dict[Hashable, Any] = dataclasses.field(default_factory=dict, repr=False)
    unread: frozenset[str] = frozenset()
    is_joined: bool = False
    border_bytes: int = 0
    runs: tuple[Mapping[str, str], ...] = ()

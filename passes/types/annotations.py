"""Annotations: data that passes leave in ``passes/graph/metadata.py`` for later passes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import NamedTuple

from torch import fx


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one node.

    ``memory_bytes``: bytes of its output while alive (0: a view, or inside a fused kernel).
    ``workspace_bytes``: extra bytes while it runs (``passes/annotate/workspace.py``); for a
    collective until its wait (``Context.staged``).
    ``seconds``: on the compute stream, or on the network for a collective.
    ``compute_overhead_seconds``: compute overhead of a collective, on the compute stream.
    ``start_delay_seconds``: start delay of a collective, if nothing is in flight at its start.
    ``lateness``: its wait for the slowest rank, if nothing is in flight at its start, as a share of
    the time since the last collective ended.
    ``serves``: the parameters that it serves (``passes/graph/attribution.py``).
    ``in_function``: its kernel shares one C++ function with neighbouring kernels
    (``passes/simulate/memory.py``).
    ``beside``: of a collective of the model itself, our process groups that use its links.
    """

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    memory_bytes: int = 0
    seconds: float = 0.0
    compute_overhead_seconds: float = 0.0
    start_delay_seconds: float = 0.0
    lateness: float = 0.0
    serves: tuple[str, ...] = ()
    workspace_bytes: int = 0
    in_function: bool = False
    beside: frozenset[str] = frozenset()


@dataclasses.dataclass
class Memory:
    """Memory of one run of a graph on one rank, all in bytes.

    ``curve``: bytes alive while each node runs, in graph order.
    ``peak_node``: the node with the highest memory; the first one on a tie.
    ``peak``: bytes at the peak by kind, the running kernel's workspace included.
    ``kept_bytes``: bytes alive at the end (the graph's outputs).
    """

    curve: list[int]
    peak_node: fx.Node
    peak: dict[str, int]
    kept_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.curve, default=0)


class Storage(NamedTuple):
    """The memory of which a saved tensor is a view: its owner in the forward, and its bytes."""

    owner: str
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The number of a chunk of tokens, from 0, and the number of chunks."""

    index: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


class Packable(NamedTuple):
    """A collective that may share a bucket with others of the same ``kind``.

    ``size_bytes``: bytes of the whole tensor.
    ``is_first_stage``: it is flat, or the first stage of a hierarchical collective.
    """

    kind: Hashable
    size_bytes: int
    is_first_stage: bool


class Reason(enum.Enum):
    """The reason why a collective is exposed. The value is a text for users."""

    NO_COMPUTE = "no compute to hide behind: the network is busy without a pause"
    DEPENDENCY = "dependency: its input is not ready earlier"
    MEMORY = "memory limit: an earlier start or a later end exceeds it"
    IN_FLIGHT = "in-flight limit: the plan allows no more bytes in flight"
    ORDER = "order: the plan starts other collectives first"
    LINKS = "links: a collective of the model itself needs them"
    OF_MODEL = "the model's own: the model waits for it where it stands"

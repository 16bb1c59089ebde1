"""Contents: all data of a page, plain and typed. The page has them as JSON, and draws them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Module:
    """A module or a parameter of the model; alike ones are one, named ``{0..11}``.

    ``copies``: the modules that it stands for. ``parameters``: number of elements, all copies'.
    ``bytes_by_decision``: whole bytes of its parameters, by decision.
    ``decision``: of a parameter, in words; empty for a module.
    """

    name: str
    copies: int
    parameters: int
    bytes_by_decision: dict[str, int]
    shape: str = ""
    decision: str = ""
    children: tuple[Module, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(self.bytes_by_decision.values())


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the plan table: alike parameters. ``size_bytes``: whole, all of them."""

    name: str
    parameters: int
    shape: str
    decision: str
    key: str
    size_bytes: int
    saved_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Span:
    """A bar of the timeline; seconds count from the start of the step.

    ``lane``: the index of its lane. ``kind``: selects its colour.
    ``events``: number of events that it stands for.
    ``exposed_seconds``, ``reason``: the wait for it, or the wait that it is, and the cause.
    """

    lane: int
    kind: str
    phase: str
    label: str
    start_seconds: float
    end_seconds: float
    events: int = 1
    exposed_seconds: float = 0.0
    reason: str = ""
    serves: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True)
class Waits:
    """All waits of one cause."""

    reason: str
    collectives: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """The time of alike layers that the simulation lacks."""

    label: str
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The step's timeline. ``events``: number of events before short neighbours are merged."""

    names: tuple[str, ...]
    spans: tuple[Span, ...]
    waits: tuple[Waits, ...]
    gaps: tuple[Gap, ...]
    step_seconds: float
    events: int


@dataclasses.dataclass(frozen=True)
class Alive:
    """A buffer and the time in which it is alive."""

    label: str
    kind: str
    size_bytes: int
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class MemoryCurve:
    """The memory of one rank over the step.

    ``seconds``: ascending; the bytes hold from each time on.
    ``bytes_by_kind``: by kind, from the lowest in the picture; one figure for each time.
    ``moments``: two points stand for so many moments: their highest and their last.
    ``buffers``: the largest ones first. ``unlisted``: number of smaller ones.
    ``peak_buffers``: those alive at the peak, which may last no time.
    """

    seconds: tuple[float, ...]
    bytes_by_kind: dict[str, tuple[int, ...]]
    peak_seconds: float
    peak_bytes: int
    limit_bytes: int | None
    measured_peak_bytes: int | None
    moments: int
    buffers: tuple[Alive, ...]
    unlisted: int
    peak_buffers: tuple[Alive, ...]


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A plan in the comparison. ``fits``: its peak is within the limit."""

    name: str
    step_seconds: float
    exposed_seconds: float
    peak_bytes: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """The best plan under one limit."""

    limit_bytes: int
    peak_bytes: int
    step_seconds: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """A figure of the step, predicted and measured, as text; empty: not measured."""

    name: str
    predicted: str
    measured: str
    ratio: str


@dataclasses.dataclass(frozen=True)
class Contents:
    """All panels of a page.

    ``facts``: pairs (name, figure) for the head of the page.
    ``frontier``, ``measured``: empty, if there are none. ``notes``: sentences for the foot.
    """

    title: str
    facts: tuple[tuple[str, str], ...]
    modules: Module
    rows: tuple[Row, ...]
    lanes: Lanes
    memory: MemoryCurve
    alternatives: tuple[Alternative, ...]
    frontier: tuple[FrontierPoint, ...]
    measured: tuple[Measured, ...]
    measured_notes: tuple[str, ...]
    notes: tuple[str, ...]

"""The schedule of a lowered graph as text: its collectives in order, with predicted times."""

from __future__ import annotations

from osdp_compile.reports.plan_table import shortened
from passes.simulate.timeline import COMPUTE, Timeline
from passes.types.units import format_seconds

_HEADS = ("start", "end", "exposed", "network", "collective")


def schedule_text(timeline: Timeline) -> str:
    """The collectives of a graph in the order of their starts, one in a line.

    Seconds count from the start of the graph. The columns: start, end, the compute stream's wait
    for it, the network that it uses, its purpose, and the cause of the wait.
    """
    sent = [event for event in timeline.events if event.stream != COMPUTE]
    title = (
        f"schedule of the {timeline.phase}: {len(sent)} collective{'s' * (len(sent) != 1)}, "
        f"predicted {format_seconds(timeline.step_seconds)}, exposed "
        f"{format_seconds(timeline.exposed_seconds)}"
    )
    if not sent:
        return title
    rows = [_HEADS]
    for event in sorted(sent, key=lambda one: one.start_seconds):
        times = (event.start_seconds, event.end_seconds, event.exposed_seconds)
        start, end, exposed = map(format_seconds, times)
        because = f" ({event.reason})" if event.reason else ""
        rows.append((start, end, exposed, event.stream, shortened(event.label) + because))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS) - 1)]
    lines = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
    return "\n".join([title, *lines])

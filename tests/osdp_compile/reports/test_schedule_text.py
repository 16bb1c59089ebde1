"""The schedule as text: collectives by start, with times and the cause of a wait."""

from __future__ import annotations

from osdp_compile.reports.schedule_text import schedule_text
from passes.simulate.timeline import Event, Stall, Timeline


def timeline(*events: Event, stalls: tuple[Stall, ...] = ()) -> Timeline:
    return Timeline(
        phase="forward",
        step_seconds=0.004,
        events=events,
        stalls=stalls,
        memory=((0.0, 0),),
        base={},
        peak_bytes=0,
        peak_seconds=0.0,
        peak_at="mm",
        peak_buffers=(),
    )


def test_collectives_by_start_with_times_and_the_cause_of_a_wait():
    why = "no compute to hide behind"
    text = schedule_text(
        timeline(
            Event("mm", "mm in up", "compute", 0.0, 0.003),
            Event("second", "gather c", "network", 0.001, 0.0025),
            Event("first", "gather a+b+x+y", "network", 0.0, 0.001, 0.0005, reason=why),
            stalls=(Stall("first", "gather a+b+x+y", 0.003, 0.0035),),
        )
    )
    assert text.splitlines() == [
        "schedule of the forward: 2 collectives, predicted 4.0 ms, exposed 500 us",
        " start     end  exposed  network  collective",
        "  0 us  1.0 ms   500 us  network  gather a+b and 2 more (no compute to hide behind)",
        "1.0 ms  2.5 ms     0 us  network  gather c",
    ]


def test_a_graph_without_collectives_is_one_line():
    text = schedule_text(timeline(Event("mm", "mm", "compute", 0.0, 0.004)))
    assert text == "schedule of the forward: 0 collectives, predicted 4.0 ms, exposed 0 us"

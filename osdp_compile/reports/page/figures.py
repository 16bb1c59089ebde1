"""Figures: the timeline, the memory and the frontier of a page, as Bokeh models.

Needs Bokeh, an extra. The page's script finds the models by their names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    HoverTool,
    LayoutDOM,
    PanTool,
    Range1d,
    ResetTool,
    TapTool,
    WheelZoomTool,
)
from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.plotting import figure

from osdp_compile.figures import byte_unit_of, time_unit_of
from osdp_compile.reports.page.collect import OSDP
from osdp_compile.reports.page.colours import SPANS, memory_colours
from osdp_compile.reports.page.contents import Contents, Lanes, MemoryCurve
from passes.types.units import format_bytes, format_limit, format_seconds

_LANE_PIXELS, _MEMORY_PIXELS, _FRONTIER_PIXELS = 34, 380, 340
#: Bars of a lane take this share of its height.
_BAR = 0.78
#: Multiple of the peak. The axis does not reach a limit above it.
_FAR = 2
_LIMIT, _MEASURED, _PEAK, _AXIS = "#c8352b", "#2e7d32", "#1b2733", "#66717d"
_MARKS = ("square", "triangle", "diamond", "inverted_triangle")
_MARK_COLOURS = ("#3f6fb5", "#2a9d8f", "#e2872b", "#8e5ea2")


def step_figures(contents: Contents) -> LayoutDOM:
    """The timeline above the memory; both have one time axis."""
    second, unit = time_unit_of(contents.lanes.step_seconds)
    end = max(contents.lanes.step_seconds * second, 1e-9)
    times = Range1d(start=0, end=end, bounds=(-0.02 * end, 1.02 * end), name="times")
    timeline = _timeline(contents.lanes, second, times)
    memory = _memory(contents.memory, second, times)
    memory.xaxis.axis_label = f"time in the step ({unit})"
    cursor = Span(dimension="height", line_color=_AXIS, line_dash="dotted", line_width=1)
    for one in (timeline, memory):
        one.add_tools(CrosshairTool(overlay=cursor))
    return column(timeline, memory, sizing_mode="stretch_width")


def frontier_figure(contents: Contents) -> LayoutDOM:
    """Step time against memory: the best plan for each limit, this plan and the others."""
    points, others = contents.frontier, contents.alternatives
    most = max([*(p.limit_bytes for p in points), *(o.peak_bytes for o in others)])
    byte, byte_unit = byte_unit_of(most)
    longest = max([*(p.step_seconds for p in points), *(o.step_seconds for o in others)])
    second, unit = time_unit_of(longest)
    found = _figure(
        "frontier", _FRONTIER_PIXELS, y_range=Range1d(start=0, end=1.12 * longest * second)
    )
    x = [point.limit_bytes * byte for point in points]
    y = [point.step_seconds * second for point in points]
    found.step(x, y, mode="after", line_color=_AXIS, line_width=1.5)
    text = [
        f"the best plan under {format_bytes(one.limit_bytes, round_up=True)}: "
        f"{format_seconds(one.step_seconds)}"
        for one in points
    ]
    marks = ColumnDataSource({"x": x, "y": y, "text": text}, name="frontier points")
    shown = [found.scatter("x", "y", source=marks, size=7, color=_AXIS, legend_label="limits")]
    for number, one in reversed(list(enumerate(others))):  # this plan above the others
        is_own = one.name == OSDP
        place = {
            "x": [one.peak_bytes * byte],
            "y": [one.step_seconds * second],
            "text": [
                f"{one.name}: {format_seconds(one.step_seconds)}, {format_bytes(one.peak_bytes)}"
            ],
        }
        shown.append(
            found.scatter(
                "x",
                "y",
                source=ColumnDataSource(place),
                marker="star" if is_own else _MARKS[(number - 1) % len(_MARKS)],
                size=18 if is_own else 11,
                color=_LIMIT if is_own else _MARK_COLOURS[(number - 1) % len(_MARK_COLOURS)],
                legend_label="this plan" if is_own else one.name,
            )
        )
    found.add_tools(HoverTool(renderers=[*shown], tooltips="@text"))
    found.xaxis.axis_label = f"memory limit; the plans' peak ({byte_unit})"
    found.yaxis.axis_label = f"predicted step ({unit})"
    found.legend.location = "bottom_left"
    return found


def _figure(name: str, pixels: int, **more: Any) -> figure:
    found = figure(
        name=name,
        height=pixels,
        sizing_mode="stretch_width",
        tools=[],
        toolbar_location=None,
        min_border_left=90,
        outline_line_color=None,
        **more,
    )
    found.toolbar.logo = None
    found.grid.grid_line_color = "#e7eaee"
    for axis in found.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = _AXIS
        axis.axis_label_text_font_style = "normal"
    return found


def _add_time_tools(found: figure) -> None:
    """Zoom and move along the time axis."""
    wheel, zoom = WheelZoomTool(dimensions="width"), BoxZoomTool(dimensions="width")
    found.add_tools(PanTool(dimensions="width"), wheel, zoom, ResetTool())
    found.toolbar.active_scroll = wheel
    found.toolbar.active_drag = zoom


def _timeline(lanes: Lanes, second: float, times: Range1d) -> figure:
    count = len(lanes.names)
    found = _figure(
        "timeline",
        50 + _LANE_PIXELS * count,
        x_range=times,
        y_range=Range1d(start=count - 0.4, end=-0.6),
    )
    lane = np.array([span.lane for span in lanes.spans])
    source = ColumnDataSource(
        {
            "left": np.array([span.start_seconds for span in lanes.spans]) * second,
            "right": np.array([span.end_seconds for span in lanes.spans]) * second,
            "top": lane - _BAR / 2,
            "bottom": lane + _BAR / 2,
            "colour": [SPANS.get(span.kind, _AXIS) for span in lanes.spans],
            "label": [span.label for span in lanes.spans],
            "time": [format_seconds(span.seconds) for span in lanes.spans],
        },
        name="spans",
    )
    bars = found.quad(
        source=source,
        color="colour",
        line_width=0.6,
        nonselection_alpha=0.15,
        selection_line_color="#111111",
    )
    found.add_tools(
        TapTool(renderers=[bars]),
        HoverTool(renderers=[bars], tooltips=[("", "@label"), ("", "@time")]),
    )
    _add_time_tools(found)
    for gap in lanes.gaps:
        band = BoxAnnotation(fill_color="#eef0f3", line_color=None, level="underlay")
        band.left, band.right = gap.start_seconds * second, gap.end_seconds * second
        found.add_layout(band)
    found.yaxis.ticker = list(range(count))
    found.yaxis.major_label_overrides = dict(enumerate(lanes.names))
    found.ygrid.grid_line_color = None
    found.xaxis.major_label_text_font_size = "0px"
    return found


def _memory(memory: MemoryCurve, second: float, times: Range1d) -> figure:
    most = max(memory.peak_bytes, memory.measured_peak_bytes or 0)
    levels = []
    if memory.measured_peak_bytes is not None:
        text = f"measured peak {format_bytes(memory.measured_peak_bytes)}"
        levels.append((memory.measured_peak_bytes, _MEASURED, "measured peak", "dotted", text))
    if memory.limit_bytes is not None and memory.limit_bytes <= _FAR * most:
        text = f"limit {format_limit(memory.limit_bytes)}"
        levels.append((memory.limit_bytes, _LIMIT, "limit", "dashed", text))
        most = max(most, memory.limit_bytes)
    byte, unit = byte_unit_of(most)
    found = _figure(
        "memory", _MEMORY_PIXELS, x_range=times, y_range=Range1d(start=0, end=1.15 * most * byte)
    )
    _add_time_tools(found)
    found.toolbar_location = "below"
    source = ColumnDataSource({"x": np.array(memory.seconds) * second}, name="memory by kind")
    below = np.zeros(len(memory.seconds))
    source.data["nothing"] = below
    colours, last = memory_colours(memory.bytes_by_kind), "nothing"
    for kind, sizes in memory.bytes_by_kind.items():
        below = below + np.array(sizes) * byte
        source.data[kind] = below
        found.varea_step(
            x="x",
            y1=last,
            y2=kind,
            source=source,
            step_mode="after",
            fill_color=colours[kind],
            fill_alpha=0.9,
        )
        last = kind
    for level, colour, name, dash, text in levels:
        _draw_level(found, level * byte, colour, name, dash, text)
    _mark_peak(found, memory, second, byte)
    found.yaxis.axis_label = f"memory of one rank ({unit})"
    return found


def _draw_level(found: figure, height: float, colour: str, name: str, dash: str, text: str) -> None:
    """A line over the whole time, with its text."""
    found.add_layout(
        Span(
            dimension="width",
            location=height,
            line_color=colour,
            line_dash=dash,
            line_width=2,
            name=name,
        )
    )
    found.text(
        x=[0],
        y=[height],
        text=[text],
        text_color=colour,
        text_font_size="12px",
        x_offset=4,
        y_offset=-3,
    )


def _mark_peak(found: figure, memory: MemoryCurve, second: float, byte: float) -> None:
    """A stem and a text: the peak may last a short moment, or none."""
    at, height = memory.peak_seconds * second, memory.peak_bytes * byte
    peak = ColumnDataSource({"x": [at], "y": [height]}, name="peak")
    found.segment(x0="x", y0=0, x1="x", y1="y", source=peak, line_color=_PEAK)
    found.scatter("x", "y", source=peak, size=7, color=_PEAK)
    late = memory.peak_seconds > 0.6 * memory.seconds[-1]
    found.text(
        x="x",
        y="y",
        source=peak,
        text={"value": f"peak {format_bytes(memory.peak_bytes)}"},
        text_color=_PEAK,
        text_font_size="12px",
        text_align="right" if late else "left",
        x_offset=-8 if late else 8,
        y_offset=-2,
    )

"""Memory plot: the predicted memory over a training step. Needs matplotlib, an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from osdp_compile.figures import byte_unit_of, new_figure, time_unit_of
from passes.simulate.chrome_trace import StepTimeline
from passes.types.units import each_of, format_bytes, format_limit, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = {"forward": "#e8f0fb", "backward": "#fdf1e3", "optimizer": "#ecf6ec"}
_LINE, _LIMIT, _MEASURED, _QUIET = "#1f5fa8", "#c0392b", "#2e7d32", "#666666"
#: Multiple of the peak. A limit above it is named in the legend, and the axis does not reach it.
_FAR = 2


def draw_memory(
    step: StepTimeline, path: str | Path, limit_bytes: int | None, measured_bytes: int | None
) -> None:
    """Write the plot; the suffix of the path selects the format (png, svg, pdf...).

    Raises:
        ImportError: without matplotlib.
    """
    figure = new_figure("save_memory_picture", 9, 4.5)
    axes = figure.add_subplot()
    second, time_unit = time_unit_of(step.step_seconds)
    most_bytes = max(step.peak.peak_bytes, measured_bytes or 0)
    far = limit_bytes is not None and limit_bytes > _FAR * most_bytes
    if limit_bytes is not None and not far:
        most_bytes = max(most_bytes, limit_bytes)
    byte, byte_unit = byte_unit_of(most_bytes)
    seconds, sizes = _curve(step)
    x, y = [s * second for s in seconds], [size * byte for size in sizes]
    axes.fill_between(x, y, step="post", color=_LINE, alpha=0.18, linewidth=0)
    axes.step(x, y, where="post", color=_LINE, linewidth=1.3)
    axes.set_xlim(0, max(step.step_seconds * second, 1e-9))
    axes.set_ylim(0, most_bytes * byte * 1.22)
    _shade(axes, step, second)
    _mark_peak(axes, step, second, byte)
    if limit_bytes is not None:
        said = f"limit {format_limit(limit_bytes)}" + (", far above" if far else "")
        _level(axes, limit_bytes * byte, said, _LIMIT, "--")
    if measured_bytes is not None:
        said = f"measured peak {format_bytes(measured_bytes)}"
        _level(axes, measured_bytes * byte, said, _MEASURED, ":")
    axes.set_xlabel(f"time in the step ({time_unit})")
    axes.set_ylabel(f"memory of one rank ({byte_unit})")
    axes.set_title(f"predicted memory of a training step on {each_of(step.world_size)}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if limit_bytes is not None or measured_bytes is not None:
        axes.legend(loc="lower right", frameon=True, framealpha=0.9)
    figure.savefig(path, dpi=150)


def _curve(step: StepTimeline) -> tuple[list[float], list[int]]:
    """Times in seconds and the bytes alive from each time on, over all phases."""
    points = [
        (start_seconds + seconds, size_bytes)
        for start_seconds, phase in step.placed()
        for seconds, size_bytes in phase.memory
    ]
    return [seconds for seconds, _ in points], [size_bytes for _, size_bytes in points]


def _shade(axes: Axes, step: StepTimeline, second: float) -> None:
    for start_seconds, phase in step.placed():
        begin, end = start_seconds * second, (start_seconds + phase.step_seconds) * second
        axes.axvspan(begin, end, color=_SHADES.get(phase.phase, "#f0f0f0"), zorder=0, linewidth=0)
        # A narrow phase gets no label.
        if phase.step_seconds > 0.1 * step.step_seconds:
            where: dict[str, Any] = {"xytext": (0, -6), "textcoords": "offset points"}
            place = ((begin + end) / 2, axes.get_ylim()[1])
            axes.annotate(phase.phase, place, ha="center", va="top", color=_QUIET, **where)


def _mark_peak(axes: Axes, step: StepTimeline, second: float, byte: float) -> None:
    start_seconds = next(start for start, phase in step.placed() if phase is step.peak)
    x = (start_seconds + step.peak.peak_seconds) * second
    y = step.peak.peak_bytes * byte
    axes.plot([x], [y], "o", color=_LINE, markersize=6)
    left = x > 0.6 * step.step_seconds * second
    axes.annotate(
        f"peak {format_bytes(step.peak.peak_bytes)} at {format_seconds(x / second)}",
        (x, y),
        xytext=(-10 if left else 10, 14),
        textcoords="offset points",
        ha="right" if left else "left",
        color=_LINE,
        fontweight="bold",
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
    )


def _level(axes: Axes, height: float, label: str, color: str, style: str) -> None:
    axes.axhline(height, color=color, linestyle=style, linewidth=1.3, label=label)

"""Sweep plot: the points of a sweep as heat maps. Needs matplotlib, an extra."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from osdp_compile.figures import new_figure
from osdp_compile.planning.sweep import Bound, Point
from osdp_compile.reports.sweep_table import least_text, limit_text, ranks_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

_CELL_INCHES = (1.15, 0.62)
_FRAMES = {
    Bound.MEMORY: "#c0392b",
    Bound.BANDWIDTH: "#e0a800",
    Bound.LATENCY: "#8e44ad",
    Bound.COMPUTE: "#2e9e4f",
}
_NOTHING = "#e3e3e3"  # colour of a cell without a value


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One axis of the grid: ``place``: a point's coordinate; ``text``: the coordinate as text."""

    name: str
    place: Callable[[Point], Any]
    text: Callable[[Any], str]

    def places(self, points: Sequence[Point]) -> list[Any]:
        return list(dict.fromkeys(map(self.place, points)))

    def named(self, place: Any) -> str:
        return f"{self.name}: {self.text(place)}"


#: The first axes with several places become a map's two axes, then columns and rows of maps.
_AXES = (
    _Axis("network, times the profile's", lambda one: one.bandwidth, "{:g}x".format),
    _Axis("memory limit", lambda one: one.limit_bytes, limit_text),
    _Axis("ranks", lambda one: tuple(one.ranks.values()), ranks_text),
    _Axis("sequence length", lambda one: one.length, str),
)
_NO_AXIS = _Axis("", lambda one: None, lambda place: "")


@dataclasses.dataclass(frozen=True)
class _Map:
    """A kind of heat map.

    ``value``: selects a cell's colour; None: no colour. ``text``: the cell's text.
    ``least``: the value of the lightest colour. ``scale``: format of the colour bar's values.
    ``framed``: a cell has a frame in the colour of its :class:`Bound`.
    """

    name: str
    value: Callable[[Point], float | None]
    text: Callable[[Point], str]
    colours: str
    least: float
    scale: str
    framed: bool = False


def _reached_text(point: Point) -> str:
    if point.best is None:
        return f"needs\n{least_text(point, point.least_bytes)}"
    return f"{point.best.utilisation:.0%}\n{point.bound.value}"


def _over_fsdp_text(point: Point) -> str:
    if point.best is None:
        return ""
    if point.fsdp is None:
        return f"FSDP needs\n{least_text(point, point.fsdp_least_bytes)}"
    return f"{point.times_fsdp:.2f}x\nFSDP {point.fsdp.utilisation:.0%}"


_MAPS = (
    _Map(
        "utilisation of the best plan,\nand its bound",
        lambda point: None if point.best is None else point.best.utilisation,
        _reached_text,
        "Blues",
        0.0,
        "{x:.0%}",
        framed=True,
    ),
    _Map(
        "its throughput,\ntimes FSDP's",
        lambda point: point.times_fsdp,
        _over_fsdp_text,
        "Oranges",
        1.0,
        "{x:.2f}x",
    ),
)


def check_picture(path: Path) -> None:
    """Check before planning that the plot can be written.

    Raises:
        ImportError: without matplotlib.
        ValueError: if matplotlib has no format for the suffix of the path.
    """
    known = new_figure("--picture", 1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--picture {path}: its ending is none of {', '.join(sorted(known))}")


def draw_sweep(points: Sequence[Point], path: Path, title: str) -> None:
    """Write the plot: for each kind one map for every place on the third and the fourth axis.

    An axis with a single place is not drawn. The suffix of the path selects the format.

    Raises:
        ImportError: without matplotlib.
    """
    varying = [axis for axis in _AXES if len(axis.places(points)) > 1]
    across, up, columns, rows = [*varying, *[_NO_AXIS] * (4 - len(varying))]
    wide, high = len(columns.places(points)), len(rows.places(points))
    figure = new_figure(
        "--picture",
        1.6 + wide * (0.5 + _CELL_INCHES[0] * len(across.places(points))),
        0.5 + 2 * high * (0.7 + _CELL_INCHES[1] * len(up.places(points))),
    )
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(2 * high, wide, squeeze=False)
    for kind, one in enumerate(_MAPS):
        values = [value for point in points if (value := one.value(point)) is not None]
        most = max([*values, one.least + 0.25])
        for row, row_place in enumerate(rows.places(points)):
            line = grid[kind * high + row]
            for column, column_place in enumerate(columns.places(points)):
                here = [
                    point
                    for point in points
                    if rows.place(point) == row_place and columns.place(point) == column_place
                ]
                image = _draw(line[column], one, here, across, up, most)
                facet = ((columns, column_place), (rows, row_place))
                said = [axis.named(place) for axis, place in facet if axis is not _NO_AXIS]
                line[column].set_title(", ".join(said), fontsize=9)
            line[0].set_ylabel(up.name, fontsize=9)
            bar = figure.colorbar(image, ax=list(line), pad=0.01, aspect=12, format=one.scale)
            bar.set_label(one.name, fontsize=9)
            bar.ax.tick_params(labelsize=8)
    for axes in grid[-1]:
        axes.set_xlabel(across.name, fontsize=9)
    figure.savefig(path, dpi=130)


def _draw(
    axes: Axes, one: _Map, points: Sequence[Point], across: _Axis, up: _Axis, most: float
) -> AxesImage:
    """Draw one heat map."""
    xs, ys = across.places(points), up.places(points)
    values = np.full((len(ys), len(xs)), np.nan)
    for point in points:
        value = one.value(point)
        if value is not None:
            values[ys.index(up.place(point)), xs.index(across.place(point))] = value
    image = axes.imshow(
        np.ma.masked_invalid(values),
        cmap=one.colours,
        vmin=one.least,
        vmax=most,
        origin="lower",
        aspect="auto",
    )
    axes.set_facecolor(_NOTHING)
    axes.set_xticks(range(len(xs)), list(map(across.text, xs)), fontsize=8)
    axes.set_yticks(range(len(ys)), list(map(up.text, ys)), fontsize=8)
    axes.tick_params(length=0)
    for edge in axes.spines.values():
        edge.set_visible(False)
    for x in range(1, len(xs)):
        axes.axvline(x - 0.5, color="white", linewidth=1.5)
    for y in range(1, len(ys)):
        axes.axhline(y - 0.5, color="white", linewidth=1.5)
    for point in points:
        x, y = xs.index(across.place(point)), ys.index(up.place(point))
        if one.framed:
            left, right, low, top = x - 0.45, x + 0.45, y - 0.42, y + 0.42
            around = [left, right, right, left, left], [low, low, top, top, low]
            axes.plot(*around, color=_FRAMES[point.bound], linewidth=1.6)
        dark = values[y, x] - one.least > 0.6 * (most - one.least)  # not where there is no value
        axes.text(
            x,
            y,
            one.text(point),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )
    return image

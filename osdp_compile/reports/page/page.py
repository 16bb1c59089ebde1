"""Page: a report as one HTML file that needs no network. Needs Bokeh, an extra."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from osdp_compile.reports.page.collect import OSDP, Sources, collect
from osdp_compile.reports.page.contents import Contents
from passes.types.decode import encoded
from passes.types.units import format_bytes, format_limit, format_seconds

_FILES = importlib.resources.files(__package__)


def check_page(what: str) -> None:
    """Check before planning that a page can be made.

    ``what``: the option or function that needs it, for the error message.

    Raises:
        ImportError: Bokeh is missing; the message says how to install it.
    """
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{what} needs Bokeh: pip install 'osdp-compile[html]'") from error


def save_page(sources: Sources, path: str | Path, what: str) -> None:
    """Write the page of a report.

    Raises:
        ImportError: without Bokeh.
    """
    check_page(what)
    Path(path).write_text(page_of(collect(sources)), encoding="utf-8")


def page_of(contents: Contents) -> str:
    """The page as text. Every name from the model is escaped."""
    from bokeh.core.types import ID
    from bokeh.embed import json_item
    from bokeh.resources import Resources
    from jinja2 import Environment, StrictUndefined

    from osdp_compile.reports.page.colours import DECISIONS, SPANS, memory_colours
    from osdp_compile.reports.page.figures import frontier_figure, step_figures

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"bytes": format_bytes, "limit": format_limit, "time": format_seconds}
    figures = {"step": json_item(step_figures(contents), ID("step"))}
    if contents.frontier:
        figures["frontier"] = json_item(frontier_figure(contents), ID("frontier"))
    kinds = {span.kind for span in contents.lanes.spans}
    colours = {
        "decisions": DECISIONS,
        "spans": {kind: colour for kind, colour in SPANS.items() if kind in kinds},
        "memory": memory_colours(contents.memory.bytes_by_kind),
    }
    return environment.from_string(_text("page.html.jinja")).render(
        contents=contents,
        colours=colours,
        own=OSDP,
        style=_text("page.css"),
        script=_text("page.js"),
        bokeh=Resources(mode="inline", components=["bokeh"]).js_raw[0],
        data=_script_json({**encoded(contents), "colours": colours, "figures": figures}),
    )


def _text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _script_json(data: Any) -> str:
    """JSON for a script element: no character in it begins a tag or ends the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

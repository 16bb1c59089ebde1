"""Write the table of docs/options.md from the options in the code: python -m tools.options_page.

A test fails while the page is out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from osdp_compile.options import DESCRIBED

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
BEGIN, END = "<!-- python -m tools.options_page writes this table -->", "<!-- end of the table -->"


def table() -> str:
    """The options as a Markdown table: values, default, page."""
    rows = ["| option | value | default | more |", "|---|---|---|---|"]
    for name, (values, default, page) in DESCRIBED.items():
        values, default = (f"{text[0].upper()}{text[1:]}." for text in (values, default))
        more = f"[{_title(page)}]({page})" if page else ""
        rows.append(f"| `{name}` | {values} | {default} | {more} |")
    return re.sub("`[^`]*`", lambda code: code[0].replace("'", '"'), "\n".join(rows))


def _title(page: str) -> str:
    """The heading of a page, or of the section that an anchor names."""
    file, _, anchor = page.partition("#")
    headings = re.findall(r"^#+ (.+)$", (PAGE.parent / file).read_text(), re.MULTILINE)
    return next(h for h in headings if not anchor or h.lower().replace(" ", "-") == anchor)


def updated(text: str) -> str:
    """The page's text with the table of this code."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))

"""The README and the pages of docs/, and the code in them."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Modules of packages that not every environment of the tests has, with the package.
OPTIONAL = {"osdp_compile.integrations.lightning_strategy": "lightning"}


def importable(module: str) -> bool:
    """Whether a module of ours has the package that it needs here."""
    return module not in OPTIONAL or importlib.util.find_spec(OPTIONAL[module]) is not None


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; "": those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for given, code in found if given == language]


def python_blocks(page: Path) -> list[str]:
    return blocks(page, "python")


def commands(page: Path) -> list[str]:
    """The lines of the blocks without a language: continued lines joined, comments cut off."""
    lines = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines if line.strip()]

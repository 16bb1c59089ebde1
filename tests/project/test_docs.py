"""The documentation: what it names is there, and its examples are code of this version."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from pathlib import Path

import osdp_compile

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_table_names_is_there():
    table = (TESTS.parent / "docs" / "works_with.md").read_text()
    named, file = [], ""
    for given, test in re.findall(r"(\w+\.py)?::(\w+)", table):
        file = given or file  # the one before, where none is given
        named.append((file, test))
    assert len(named) > 20
    texts = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    missing = [one for one in named if f"def {one[1]}(" not in texts.get(one[0], "")]
    assert not missing


def python_blocks() -> list[tuple[str, str]]:
    """The Python examples of the README and the pages: page, code."""
    root = TESTS.parent
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [
        (page.name, textwrap.dedent(code))
        for page in pages
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


def test_the_examples_are_python_and_import_what_there_is():
    blocks = python_blocks()
    assert len(blocks) > 20
    wrong = []
    for page, code in blocks:
        try:
            tree = ast.parse(code)
        except SyntaxError as error:
            wrong.append(f"{page}: {error}")
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            if node.module.split(".")[0] in ("osdp_compile", "passes"):
                module = importlib.import_module(node.module)
                wrong += [
                    f"{page}: {node.module} has no {one.name}"
                    for one in node.names
                    if not hasattr(module, one.name)
                ]
            elif node.module.startswith("osdp"):
                wrong.append(f"{page}: no module {node.module}")
    assert not wrong


def test_names_of_the_package_in_the_text_are_there():
    of_old_runs = ("experiments.md", "families.md")
    pages = [p for p in (TESTS.parent / "docs").glob("*.md") if p.name not in of_old_runs]
    named = set(re.findall(r"\bosdp_compile\.(\w+)", "\n".join(p.read_text() for p in pages)))
    folders = {path.stem for path in (TESTS.parent / "osdp_compile").iterdir()}
    assert len(named) > 10
    assert not [name for name in named - folders if not hasattr(osdp_compile, name)]


def test_files_that_the_pages_name_are_there():
    root = TESTS.parent
    pages = [page for page in (root / "docs").glob("*.md") if page.name != "experiments.md"]
    text = "\n".join(page.read_text() for page in [*pages, root / "README.md"])
    named = set(re.findall(r"`((?:passes|osdp_compile|tests|examples|tools)/[\w/]+\.py)`", text))
    assert len(named) > 20
    assert not [name for name in named if not (root / name).exists()]

"""The code fits: short functions, small folders, and no lines that stand in two files."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("passes", "osdp_compile")

#: Lines of a function's body, without its docstring. A comment directly above a longer function
#: says why it is longer.
MOST_LINES = 60
MOST_FILES = 14
#: This many equal lines in two files are the same logic twice.
FEWEST_LINES = 6

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _docstring(node: ast.Module | ast.ClassDef | Function) -> ast.stmt | None:
    first = node.body[0] if node.body else None
    return first if ast.get_docstring(node, clean=False) is not None else None


def _long_functions(source: str) -> list[str]:
    """Functions above the limit without a comment above them."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            body = node.body[1:] if _docstring(node) else node.body
            length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            above = min([node.lineno, *(one.lineno for one in node.decorator_list)]) - 2
            if length > MOST_LINES and not lines[above].strip().startswith("#"):
                found.append(f"{node.name}: {length} lines")
    return found


def _code(source: str) -> list[tuple[int, str]]:
    """Numbered lines of code: no imports, docstrings, comments or signatures."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, Function):
            skipped.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := _docstring(node)):
            skipped.update(range(text.lineno, text.end_lineno + 1))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), start=1))
    return [
        (number, line)
        for number, line in lines
        if line and number not in skipped and not line.startswith("#")
    ]


def _windows(path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    code = _code(path.read_text())
    for start in range(len(code) - FEWEST_LINES + 1):
        window = tuple(line for _, line in code[start : start + FEWEST_LINES])
        if sum(any(map(str.isalnum, line)) for line in window) > FEWEST_LINES // 2:
            yield window, f"{path.relative_to(ROOT)}:{code[start][0]}"


@pytest.mark.parametrize(
    ("comment", "lines", "is_found"), [("", 60, False), ("", 61, True), ("# Why.\n", 61, False)]
)
def test_a_long_function_needs_a_comment_above_it(comment, lines, is_found):
    body = "".join(f"    x = {number}\n" for number in range(lines))
    source = f'import torch\n\n\n{comment}@torch.no_grad()\ndef f():\n    """Docstring."""\n{body}'
    assert bool(_long_functions(source)) == is_found


def test_functions_fit_a_page():
    found = {
        str(path.relative_to(ROOT)): long
        for path in _files(*PACKAGES)
        if (long := _long_functions(path.read_text()))
    }
    assert not found


def test_folders_fit_a_screen():
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in _files(*PACKAGES))
    assert len(counts) > 20
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_lines_stand_in_two_files():
    places: dict[tuple[str, ...], str] = {}
    found = []
    for path in _files(*PACKAGES, "benchmarks", "examples", "tools"):
        for window, place in _windows(path):
            other = places.setdefault(window, place)
            if other.split(":")[0] != place.split(":")[0]:
                found.append(f"{other} and {place}: {window[0]}")
    assert not found

"""The documentation: what it names is there, and what is made from the code is of this code."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

import osdp_compile
from osdp_compile.cli.main import argument_parser
from passes.pipeline import default_passes
from tests.project.pages import PAGES, ROOT, commands, importable, python_blocks
from tools import options_page

DOCS = ROOT / "docs"
#: Pages about runs of earlier versions, and one that a command writes.
OF_OLD_RUNS = {"experiments.md", "families.md"}
CURRENT = [page for page in PAGES if page.name not in OF_OLD_RUNS]


def test_every_test_that_the_table_names_is_there():
    named, file = [], ""
    for given, test in re.findall(r"(\w+\.py)?::(\w+)", (DOCS / "works_with.md").read_text()):
        file = given or file  # the one before, where none is given
        named.append((file, test))
    assert len(named) > 20
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    missing = [one for one in named if f"def {one[1]}(" not in texts.get(one[0], "")]
    assert not missing


def test_the_examples_are_python_and_import_what_there_is():
    blocks = [(page.name, code) for page in PAGES for code in python_blocks(page)]
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
            if not importable(node.module):
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


def test_the_steps_of_a_decision_are_quoted_from_their_files():
    page = (DOCS / "add_a_decision.md").read_text()
    steps = page.split("\n## ")[1:]
    files = re.findall(r"^\| `(\w+/[\w/]+\.py)` \|", page, re.MULTILINE)
    quoted = [step for step in steps if re.match(r"\d\. ", step)]
    assert len(quoted) == len(files) == 4
    for step, file in zip(quoted, files, strict=True):
        there = {line.strip() for line in (ROOT / file).read_text().splitlines()}
        (code,) = re.findall(r"^```python\n(.*?)^```", step, re.DOTALL | re.MULTILINE)
        lines = [line.partition("  #")[0].strip() for line in code.splitlines()]
        assert set(lines) <= there, f"not in {file}"


def test_the_pass_of_the_page_is_the_example():
    (code, *_) = python_blocks(DOCS / "write_a_pass.md")
    example = (ROOT / "examples" / "custom_pass.py").read_text()
    assert {line.strip() for line in code.splitlines()} <= set(map(str.strip, example.splitlines()))


def test_names_of_the_package_in_the_text_are_there():
    named = set(re.findall(r"\bosdp_compile\.(\w+)", "\n".join(p.read_text() for p in CURRENT)))
    folders = {path.stem for path in (ROOT / "osdp_compile").iterdir()}
    assert len(named) > 10
    assert not [name for name in named - folders if not hasattr(osdp_compile, name)]


def test_files_that_the_pages_name_are_there():
    text = "\n".join(page.read_text() for page in CURRENT)
    named = set(re.findall(r"`((?:passes|osdp_compile|tests|examples|tools)/[\w/]+\.py)`", text))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]
    code = {
        path.name
        for folder in ("passes", "osdp_compile", "tests", "examples", "tools")
        for path in (ROOT / folder).rglob("*.py")
    } | {path.name for path in ROOT.glob("*.py")}
    bare = set(re.findall(r"`(\w+\.py)`", text))
    assert len(bare) > 10
    assert not bare - code


def typed() -> list[tuple[str, list[str]]]:
    """The commands of the pages, in blocks and in tables, as words without variables."""
    found = []
    for page in CURRENT:
        inline = re.findall(
            r"`((?:\w+=\S+ )*(?:make|python -m|\.venv/bin/)[^`\n]*)`", page.read_text()
        )
        for line in [*commands(page), *inline]:
            words = [one for one in shlex.split(line) if not re.match(r"[A-Z_]+=", one)]
            found.append((f"{page.name}: {line}", words))
    return found


def test_commands_of_osdp_are_accepted(capsys: pytest.CaptureFixture[str]):
    parser, seen, refused = argument_parser(), 0, []
    for line, words in typed():
        if "osdp_compile" in words and "-m" in words:
            words = ["osdp", *words[words.index("osdp_compile") + 1 :]]
        if words[:1] != ["osdp"] or len(words) < 3:
            continue
        seen += 1
        try:
            parser.parse_args(words[1:])
        except SystemExit as end:
            if end.code:
                refused.append(f"{line}: {capsys.readouterr().err}")
    assert seen >= 6
    assert not refused


def test_targets_of_make_and_scripts_are_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing, seen = [], 0
    for line, words in typed():
        if words[:1] == ["make"]:
            missing += [line for one in words[1:] if one not in targets]
            seen += 1
        for one in words:
            if re.fullmatch(r"(examples|tools|tests)/\S+", one):
                missing += [line] * (not (ROOT / one).exists())
                seen += 1
        if "-m" in words and words[words.index("-m") + 1].startswith(("benchmarks.", "tools.")):
            module = words[words.index("-m") + 1].replace(".", "/")
            missing += [line] * (not list(ROOT.glob(f"{module}*")))
            seen += 1
    assert seen > 10
    assert not missing


def test_the_table_of_options_is_of_this_code():
    text = options_page.PAGE.read_text()
    assert text == options_page.updated(text), "python -m tools.options_page writes it"


def test_the_reference_has_every_public_name():
    text = (DOCS / "api.md").read_text() + (DOCS / "api_passes.md").read_text()
    shown = re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)
    for path in filter(lambda path: importable(path.rpartition(".")[0]), shown):
        parts = path.split(".")
        while parts:
            try:
                found = importlib.import_module(".".join(parts))
                break
            except ImportError:
                parts.pop()
        for name in path.split(".")[len(parts) :]:
            found = getattr(found, name)
        assert found.__doc__, path
    headings = set(re.findall(r"osdp_compile\.(\w+)$", text, re.MULTILINE))
    assert set(osdp_compile.__all__) <= headings


def test_the_site_has_every_page():
    _, nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    listed = re.findall(r": (\w+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


def project() -> str:
    return (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("package", ["passes", "osdp_compile"])
def test_the_table_of_folders_is_the_import_contract(package: str):
    (layers,) = re.findall(
        rf'containers = \["{package}"\].*?layers = \[(.*?)\]\n', project(), re.DOTALL
    )
    contract = [set(one.split(" : ")) for one in re.findall(r'"([^"]+)"', layers)]
    page = (DOCS / "architecture.md").read_text()
    (table,) = re.findall(rf"\| `{package}/` \| content \|\n\|.*\n((?:\|.*\n)+)", page)
    rows = [re.match(r"\| (.*?) \|", row)[1] for row in table.splitlines()]
    shown = [{re.sub(r"\.py$|/$", "", one) for one in re.findall("`(.*?)`", row)} for row in rows]
    assert shown == contract[::-1]


def test_every_dependency_has_its_reason():
    table = (DOCS / "architecture.md").read_text().partition("## Dependencies")[2]
    required = set(re.findall(r'"([a-z][\w-]*)(?:\[\w+\])?>=', project()))
    missing = [one for one in required - {"setuptools"} if not re.search(rf"\b{one}\b", table)]
    assert len(required) > 15 and not missing


def test_the_table_of_passes_is_the_pipeline():
    page = (DOCS / "architecture.md").read_text()
    (table,) = re.findall(
        r"^\| pass \| runs on \| does \|\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    shown = [re.match(r"\| `(\w+)` \|", row)[1] for row in table.splitlines()]
    assert shown == [one.name for one in default_passes()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_row_of_a_table_has_a_head_above_it(page: Path):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    torn = [
        one.splitlines()[0] for one in tables if not re.search(r"\A\|.*\n\|[-:| ]+\|$", one, re.M)
    ]
    assert not torn


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200

"""The table of messages says what the code says, and all of it."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What is raised with a text of another error, or a name, says nothing itself.
_LEAST_LETTERS = 4
#: Those of rules that hold whatever a user does.
_OF_OURS = {"AssertionError", "AttributeError", "KeyError", "NotImplementedError", "StopIteration"}
#: Functions that return a message, which others print or raise.
_RETURNS_A_MESSAGE = {
    "_above",
    "_grown",
    "_none_stored",
    "_other_ranks",
    "_unfit_mesh",
    "lacks",
    "mismatch",
    "newer_than_tested",
    "prepare_file",
}


def plain(message: str) -> str:
    """A message as it is compared: parts that vary are ``…``, without quotes around them."""
    return " ".join(re.sub(r"(['\"]?)(?:…)+\1", "…", message).split())


def text_of(expression: ast.expr) -> str:
    """A string as it is written in the code, with ``…`` for what is filled in."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return re.sub(r"%[drs]", "…", expression.value)
    if isinstance(expression, ast.JoinedStr):
        return "".join(text_of(value) for value in expression.values)
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        return text_of(expression.left) + text_of(expression.right)
    return "…"


def exceptions(trees: list[ast.Module]) -> set[str]:
    """The names of all exceptions, torch's and Python's own and those that the packages define."""
    known = {name for name in dir(builtins) if isinstance(getattr(builtins, name), type)}
    known = {name for name in known if issubclass(getattr(builtins, name), Exception)}
    known |= {"ArgumentTypeError", "ArgumentError"}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        more = {c.name for c in classes if any(ast.unparse(base) in known for base in c.bases)}
        if more <= known:
            return {name for name in known - _OF_OURS if not name.startswith("_")}
        known |= more


def said_by(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The texts of the errors that a module raises, and of its warnings."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = {ast.unparse(node.targets[0]): node.value for node in assigned}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in known:
            for call in ast.walk(node):  # an error that words itself
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield from (text_of(argument) for argument in call.args[:1])
        if isinstance(node, ast.FunctionDef) and node.name in _RETURNS_A_MESSAGE:
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            yield from (
                text_of(value) for value in returned if isinstance(value, ast.JoinedStr | ast.BinOp)
            )
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in known or name in ("fail", "warn", "warning", "warn_once"):
                yield text_of(constants.get(ast.unparse(node.args[0]), node.args[0]))


def messages() -> set[str]:
    files = [*(ROOT / "osdp_compile").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    trees = [ast.parse(file.read_text()) for file in files]
    known = exceptions(trees)
    found = {plain(text) for tree in trees for text in said_by(tree, known)}
    return {text for text in found if len(re.findall(r"[A-Za-z]", text)) >= _LEAST_LETTERS}


def rows() -> list[str]:
    """The starts of messages that the table has, in the first column, each in backticks."""
    ours = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Messages of torch")[0]
    cells = re.findall(r"^\| (`.*?`) \| .+ \| .+ \|$", ours, flags=re.MULTILINE)
    return [plain(start) for cell in cells for start in re.findall(r"`([^`]+)`", cell)]


def test_every_message_has_a_row():
    said, starts = messages(), rows()
    assert len(said) > 100, "the code's messages are not found any more"
    missing = sorted(text for text in said if not text.startswith(tuple(starts)))
    assert not missing, "add rows to docs/troubleshooting.md for these"


def test_every_row_is_a_message():
    said, starts = messages(), rows()
    gone = [start for start in starts if not any(text.startswith(start) for text in said)]
    assert not gone, "docs/troubleshooting.md has rows of messages that the code no longer has"
    twice = {start for start in starts if starts.count(start) > 1}
    assert not twice

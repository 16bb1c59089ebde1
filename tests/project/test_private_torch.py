"""Private torch: no file but those of ``_torch`` names a private part of torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _dotted(node: ast.expr) -> list[str]:
    """``["torch", "_ops", "OpOverload"]`` of ``torch._ops.OpOverload``; empty: no such chain."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _is_private(names: list[str]) -> bool:
    # torch.ops holds operators by name, theirs and ours.
    return (
        names[:1] == ["torch"]
        and names[1:2] != ["ops"]
        and any(name.startswith("_") and not name.endswith("__") for name in names)
    )


def private_names(source: str) -> Iterator[str]:
    """The private names of torch in Python source."""
    for node in ast.walk(ast.parse(source)):
        found: list[list[str]] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [[*node.module.split("."), one.name] for one in node.names]
        elif isinstance(node, ast.Import):
            found = [one.name.split(".") for one in node.names]
        elif isinstance(node, ast.Attribute):
            found = [_dotted(node)]
        yield from (".".join(names) for names in found if _is_private(names))


def _files() -> list[Path]:
    found = [path for top in ("passes", "osdp_compile") for path in (ROOT / top).rglob("*.py")]
    return [path for path in found if "_torch" not in (path.stem, path.parent.name)]


def test_no_other_file_names_one():
    named = {
        path.relative_to(ROOT).as_posix(): names
        for path in _files()
        if (names := sorted(set(private_names(path.read_text()))))
    }
    assert not named, "import these in passes/_torch.py or osdp_compile/_torch/"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._guards import CompileId",
        "from torch.optim import _muon",
        "import torch\nx = torch._C._autograd",
    ],
)
def test_each_way_to_name_one_is_found(source):
    assert list(private_names(source))


def test_operators_and_special_names_are_public():
    assert not list(private_names("import torch\ntorch.ops._c10d.f, torch.__version__"))

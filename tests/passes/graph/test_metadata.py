"""Metadata: every key is declared once, and read and written through its declaration."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import fx

from passes.graph import metadata
from passes.graph.fx_utils import copy_module
from passes.graph.metadata import COLLECTIVE, DATAFLOW, GATHERED, MODULE_KEYS, SAVED, Key
from passes.types.plan import Collective

ROOT = Path(__file__).parents[3]
KEYS = {name: key for name, key in vars(metadata).items() if isinstance(key, Key)}
#: Keys of torch, which the packages read and write as text.
OF_TORCH = {
    "ac_graph_id": "the partitioner's order of checkpointed regions",
    "desc": "AOTAutograd's origins of inputs and outputs",
    "example_value": "Dynamo's fake value",
    "fwd_nn_module_stack": "AOTAutograd's calling modules of a backward's node",
    "nn_module_stack": "Dynamo's calling modules",
    "recompute": "the partitioner's policy",
    "saved_tensor_with_no_vc_check": "AOTAutograd's saved tensor without a version counter",
    "val": "AOTAutograd's fake value",
}


def is_meta(expression: ast.expr) -> bool:
    """Whether an expression is ``node.meta``, or a local variable or an argument for it."""
    return (isinstance(expression, ast.Attribute) and expression.attr == "meta") or (
        isinstance(expression, ast.Name) and expression.id == "meta"
    )


def texts_as_keys(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings that a module uses as keys of metadata, each with its line."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            found = [node.slice]
        elif isinstance(node, ast.Compare) and any(map(is_meta, node.comparators)):
            found = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if is_meta(node.func.value):  # get, pop, setdefault, update
                found = [*node.args, *(k for a in node.args for k in getattr(a, "keys", ()))]
        elif isinstance(node, ast.Assign) and any(map(is_meta, node.targets)):
            found = list(getattr(node.value, "keys", ()))
        for one in found:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one.lineno, one.value


def test_only_torchs_own_keys_are_text():
    used = {
        (str(path.relative_to(ROOT)), line, text)
        for package in ("passes", "osdp_compile")
        for path in (ROOT / package).rglob("*.py")
        for line, text in texts_as_keys(ast.parse(path.read_text()))
    }
    assert not sorted(one for one in used if one[2] not in OF_TORCH)
    assert {text for _, _, text in used} == set(OF_TORCH), "a key that is no longer used"


def test_a_text_as_a_key_is_found_in_every_form():
    source = """
node.meta["a"]; node.meta.get("b"); node.meta.pop("c", None); "d" in node.meta; meta["e"] = 1
node.meta.update({"f": 1}); node.meta = {"g": 1, **other.meta}; f"{node.meta['h']}"
meta[KEY.name]; node.args["i"]
"""
    assert sorted(text for _, text in texts_as_keys(ast.parse(source))) == [*"abcdefgh"]


def test_names_are_unique_and_not_torchs():
    names = [key.name for key in KEYS.values()]
    assert len(set(names)) == len(names) >= 23
    assert not set(names) & set(OF_TORCH)
    assert [key.name.upper() for key in KEYS.values()] == [*KEYS]


def node() -> fx.Node:
    return fx.Graph().placeholder("x")


def test_a_value_is_written_read_and_removed():
    one = node()
    assert GATHERED.get(one) is None and GATHERED.get(one, "w") == "w"
    assert not GATHERED.is_set(one) and GATHERED.pop(one) is None
    GATHERED.set(one, "head.weight")
    assert GATHERED.is_set(one) and GATHERED.of(one) == GATHERED.get(one) == "head.weight"
    assert one.meta == {"gathered": "head.weight"}
    assert GATHERED.pop(one) == "head.weight" and not one.meta


def test_one_value_goes_to_another_node():
    one, other = node(), node()
    GATHERED.copy(one, other)
    assert not other.meta
    GATHERED.set(one, "w")
    SAVED.set(one, True)
    GATHERED.copy(one, other)
    assert other.meta == {"gathered": "w"}


def test_a_missing_value_names_the_node_the_key_and_its_writer():
    said = r"node 'x' \(x\) has no meta\['collective'\], which shard writes"
    with pytest.raises(metadata.NoMetadata, match=said):
        COLLECTIVE.of(node())
    module = fx.GraphModule({}, fx.Graph())
    with pytest.raises(metadata.NoMetadata, match=r"the graph's module has no meta\['dataflow'\]"):
        DATAFLOW.of(module)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy_module])
def test_copies_of_a_module_have_its_values(copied):
    graph = fx.Graph()
    start = graph.placeholder("x")
    graph.output(start)
    purpose = Collective(("w",), gathers=True)
    COLLECTIVE.set(start, purpose)
    gm = copied(fx.GraphModule({}, graph))
    (again,) = gm.graph.find_nodes(op="placeholder")
    assert COLLECTIVE.of(again) == purpose


def test_keys_of_modules_are_listed():
    annotated = metadata.__annotations__
    of_modules = [key for name, key in KEYS.items() if "fx.GraphModule" in annotated[name]]
    assert of_modules == [*MODULE_KEYS]

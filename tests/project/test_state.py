"""State of modules: what a function returns follows from its arguments, with few exceptions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Hooks of torch and Dynamo give the object and nothing else.
FACTS = "facts about a user's objects, found from the object alone, for as long as it lives"
CACHE = "a cache of a function of its key"
ONCE = "what is logged or registered once in a process"
#: Every name of a module that changes while the program runs, with the reason why that is right.
REASONS = {
    "passes/_torch.py": {"_broadcast_is_use": CACHE},
    "passes/annotate/annotate_costs.py": {"_cost": CACHE},
    "passes/annotate/flops.py": {"_say": ONCE},
    "passes/graph/fx_utils.py": {"_shared": CACHE},
    "passes/graph/verifier.py": {"_results": CACHE},
    "passes/graph/module_path.py": {"_path": CACHE},
    "osdp_compile/calibration/profile_cache.py": {
        "_in_process": "measurements: all models of a process get the same profile",
        "_files": "the file of each of these profiles",
    },
    "osdp_compile/engine/backend.py": {"_said": ONCE},
    "osdp_compile/lowering/inductor_fusion.py": {
        "_needed": CACHE,
        "_extern_places": CACHE,
        "_last_readers": CACHE,
        "_source_digest": CACHE,
    },
    "osdp_compile/engine/no_sync.py": {
        "_waiting": "models inside the context; their first call finds itself here"
    },
    "osdp_compile/model/mixed_precision.py": {"_cast": FACTS},
    "osdp_compile/model/other_dims.py": {
        "_known": FACTS,
        "_before": FACTS,
        "_local": "models between their first trace and their sharding",
    },
    "osdp_compile/model/same_parameters.py": {"_runs": "runs by the unique names of groups"},
    "osdp_compile/optim/checks.py": {"_replaced": FACTS, "_looked_at": FACTS, "_watching": ONCE},
    "osdp_compile/optim/muon.py": {"_handled": ONCE},
    "osdp_compile/optim/step_hooks.py": {"_own": FACTS},
    "osdp_compile/optim/whole_state.py": {"_lay_out": FACTS},
    "osdp_compile/optim/owner_ranks.py": {"_shared": FACTS, "_rows": CACHE},
    "osdp_compile/optim/written_rows.py": {"_handle_all": ONCE},
    "osdp_compile/planning/frames.py": {
        "_collectors": "the step being traced; Dynamo calls the backend without it"
    },
    "osdp_compile/planning/plan_cache.py": {"source_digest": CACHE},
    "osdp_compile/progress.py": {"_under_way": "work shown on the terminal"},
    "osdp_compile/reports/cpu_memory.py": {
        "_last_peak": "the last count of the library, whose counters are the process's",
        "_library": CACHE,
    },
    "osdp_compile/runtime/eager_markers.py": {"_groups": "process groups by their unique names"},
    "osdp_compile/runtime/written_reads.py": {
        "_noted": "graphs being compiled; torch gives a functional operator its tensors alone",
        "_gathered": "the last reads in code left to Python, of all models",
    },
    "osdp_compile/tracking/memory_watch.py": {"_watches": "all live watches: memory is shared"},
    "osdp_compile/tracking/pending_model.py": {"_of_root": FACTS, "_plans_of_one_rank": FACTS},
    "osdp_compile/tracking/session.py": {"_of_parameter": FACTS, "_of_module": FACTS},
    "osdp_compile/tracking/uncovered.py": {"_looked_at": FACTS, "_alone": FACTS, "_watching": ONCE},
}
_CONTAINERS = ("dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "local")


def _is_state(value: ast.expr | None) -> bool:
    """Whether a value is an empty container, a weak one or a context variable."""
    if isinstance(value, ast.Dict | ast.List):
        return not ast.unparse(value).strip("{}[]")
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return (
        name.startswith("Weak")
        or name in ("ContextVar", "deque")
        or (name in _CONTAINERS and not value.args and not value.keywords)
    )


def state_of(tree: ast.Module) -> Iterator[str]:
    """The names of a module that change while the program runs."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_state(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from map(ast.unparse, targets)
        if isinstance(node, ast.FunctionDef):
            cached = [one for one in node.decorator_list if "cache" in ast.unparse(one)]
            yield from [node.name] * len(cached)
    for inside in ast.walk(tree):
        if isinstance(inside, ast.Global):
            yield from inside.names


def changed_arguments(tree: ast.Module) -> Iterator[str]:
    """Functions with a default that calls could change; writes to frozen objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            given = [*node.args.defaults, *node.args.kw_defaults]
            if any(isinstance(one, ast.List | ast.Dict | ast.Set) for one in given):
                yield f"line {node.lineno}: a default that calls share"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            yield f"line {node.lineno}: a frozen object is written"


def trees() -> dict[str, ast.Module]:
    files = [path for name in ("passes", "osdp_compile") for path in (ROOT / name).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def test_every_name_that_changes_has_a_reason():
    found = {path: {*state_of(tree)} for path, tree in trees().items()}
    assert {path: names for path, names in found.items() if names} == {
        path: {*names} for path, names in REASONS.items()
    }


def test_no_call_changes_a_default_or_a_frozen_object():
    found = {path: [*changed_arguments(tree)] for path, tree in trees().items()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    [
        "x = {}",
        "x: dict[str, int] = {}",
        "x = []",
        "x = collections.defaultdict()",
        "x: Any = WeakTensorKeyDictionary()",
        "x = weakref.WeakSet()",
        "x = ContextVar('x', default=None)",
        "def f():\n    global x",
        "@functools.lru_cache(maxsize=1)\ndef x(): pass",
    ],
)
def test_state_is_found(text):
    assert [*state_of(ast.parse(text))] == ["x"]


def test_a_table_is_no_state():
    assert not [*state_of(ast.parse("x = {1: 2}\ny = [1]\nz = ()\ndef f():\n    x = {}"))]


@pytest.mark.parametrize("text", ["def f(x=[]): ...", "def f(*, x={}): ...", "lambda x={1}: x"])
def test_a_shared_default_is_found(text):
    assert len([*changed_arguments(ast.parse(text))]) == 1

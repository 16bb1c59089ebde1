"""pytest plugin: snapshot tests of a model's lowered graphs, and budgets of its step.

    def test_my_model(osdp_graphs):
        osdp_graphs(MyModel(), torch.randn(4, 16), world_size=8, plan="shard_regather",
                    after=["forward/shard", "backward/reorder"])

    def test_it_fits(osdp_budget):
        osdp_budget(MyModel(), torch.randn(4, 16), world_size=64, hardware="h100-sxm",
                    memory_limit="80GB", step="300ms")

Each named graph, and the figures of each budget, are compared with a file under ``__snapshots__``
beside the test. ``pytest --snapshot-update`` writes the files. The text of a graph is the same on
every rank, run and machine. The plugin imports torch only when a test requests a fixture.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from passes.types.plan import Plan

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # a code for every character is no help in a log


@contextlib.contextmanager
def _unlogged_traces() -> Iterator[None]:
    """Keep the records of torch's trace log, which have no text, out of pytest's captured log.

    The trace log does not propagate, so pytest adds its handlers to it. The handlers of
    ``TORCH_TRACE`` stay.
    """
    log = logging.getLogger("torch.__trace")
    propagates, capturing = log.propagate, [h for h in log.handlers if h in logging.root.handlers]
    log.propagate = False
    for handler in capturing:
        log.removeHandler(handler)
    try:
        yield
    finally:
        log.propagate = propagates
        for handler in capturing:
            log.addHandler(handler)


@pytest.fixture
def osdp_graphs(request: pytest.FixtureRequest) -> Callable[..., dict[str, str]]:
    """Compare a model's graphs after named passes with stored files.

    The fixture is a function ``(model, *args, world_size, after, plan=None, rank=0,
    options=None, mesh=None)``. ``after`` has names of graphs from
    ``osdp_compile.trace.trace_graphs``. The function returns all texts.
    """
    _need_syrupy(request)
    from osdp_compile.integrations.snapshot_files import TextFile
    from osdp_compile.trace import trace_graphs

    snapshot = request.getfixturevalue("snapshot").use_extension(TextFile)

    def compare(
        model: Any,
        *args: Any,
        world_size: int,
        after: Sequence[str],
        plan: Any = None,
        rank: int = 0,
        options: dict[str, Any] | None = None,
        mesh: dict[str, int] | None = None,
    ) -> dict[str, str]:
        with _unlogged_traces():
            texts = trace_graphs(
                model,
                args,
                world_size=world_size,
                rank=rank,
                plan=plan,
                options=options,
                mesh=mesh,
            )
        for name in after:
            if name not in texts:
                pytest.fail(f"no graph is named {name!r}; there are {sorted(texts)}")
            stored = snapshot(name=name.replace("/", "-"))
            if texts[name] != stored:
                difference = _COLOURS.sub("", "\n".join(stored.get_assert_diff()))
                pytest.fail(
                    f"the graph {name} is not the stored one, or none is stored: "
                    f"pytest --snapshot-update writes it\n{difference}",
                    pytrace=False,
                )
        return texts

    return compare


@pytest.fixture
def osdp_budget(request: pytest.FixtureRequest) -> Callable[..., Plan]:
    """Fail where a model's predicted peak or step is above a budget, or has grown.

    The fixture is a function ``(model, *args, peak=None, step=None, grows=0.02, **options)``.
    ``peak`` is a size, ``step`` a duration, of one rank. ``grows`` is the share by which each may
    grow from the stored figures. ``options`` are those of ``osdp_compile.plan``, among them
    ``world_size``, ``hardware`` and ``memory_limit``. The function returns the plan.
    """
    _need_syrupy(request)
    from osdp_compile.integrations.budget import OverBudget, check_budget
    from osdp_compile.integrations.snapshot_files import JsonFile, StoredText

    snapshot = request.getfixturevalue("snapshot").use_extension(JsonFile)
    names = _numbered("budget")

    def check(model: Any, *args: Any, **given: Any) -> Plan:
        stored = StoredText(snapshot, next(names))
        try:
            with _unlogged_traces():
                return check_budget(model, args, stored, **given)
        except OverBudget as error:
            said = str(error)
        pytest.fail(said, pytrace=False)  # outside of the handler, or pytest prints both errors

    return check


def _numbered(name: str) -> Iterator[str]:
    """Names of the files of a test: ``budget``, ``budget-2``, ``budget-3``, ..."""
    yield name
    for number in itertools.count(2):
        yield f"{name}-{number}"


def _need_syrupy(request: pytest.FixtureRequest) -> None:
    """Fail the test if syrupy, an extra, is not installed."""
    try:
        import syrupy  # noqa: F401
    except ImportError:
        pytest.fail(
            f"the {request.fixturename} fixture needs syrupy: pip install 'osdp-compile[snapshots]'"
        )

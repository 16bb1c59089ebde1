"""pytest plugin: snapshot tests of a model's lowered graphs.

    def test_my_model(osdp_graphs):
        osdp_graphs(MyModel(), torch.randn(4, 16), world_size=8, plan="shard_regather",
                    after=["forward/shard", "backward/reorder"])

Each named graph is compared with a file under ``__snapshots__`` beside the test.
``pytest --snapshot-update`` writes the files. The text is the same on every rank, run and machine.
The plugin imports torch only when a test requests the fixture.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

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
    try:
        from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
    except ImportError:
        pytest.fail("the osdp_graphs fixture needs syrupy: pip install 'osdp-compile[snapshots]'")
    from osdp_compile.trace import trace_graphs

    class GraphText(SingleFileSnapshotExtension):
        _write_mode = WriteMode.TEXT
        file_extension = "txt"

        def serialize(self, data: Any, **kwargs: Any) -> str:
            return str(data)

    snapshot = request.getfixturevalue("snapshot").use_extension(GraphText)

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

"""Fixtures and test order: ranks start once for the whole test session; long files run first."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest's workers share the cores; before torch

from tests.chosen import ALL_WITH_INDUCTOR
from tests.ranks import Ranks
from tests.searching import short_searches

with contextlib.suppress(ImportError):  # the GPU kit's tests do without hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine an example may wait seconds for a core.
    settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

#: Files that take minutes, the longest first: at the end no worker waits for one of them.
_LONGEST_FILES = ("test_elastic.py", "test_gpu_kit.py", "test_parallelized.py", "test_search.py")
_LONGEST_FILES += ("test_few_layers.py", "test_parallelized_hosts.py", "test_hf_trainer.py")
_LONGEST_FILES += ("test_examples.py", "test_one_rank.py", "test_limit_is_kept.py")
#: Files that take a minute or so and do not use the fixtures with ranks.
_LONG_FILES = ("test_logs.py", "test_monotone_search.py", "test_offline.py", "test_plan.py")
_LONG_FILES += ("test_planner.py", "test_prediction.py", "test_pytest_plugin.py")
_LONG_FILES += ("test_recompute_activations.py", "test_snapshots.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by what it needs. Run long files first, and those that use ranks.

    pytest-xdist gives whole files to its workers (``--dist loadfile``), so that all tests of a
    file use the same ranks. The short files then fill the ends of the workers.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & {"two_ranks", "four_ranks", "native_ranks"}:
            item.add_marker("ranks")
        elif "inductor_cache" in fixtures and item.get_closest_marker("ranks") is None:
            item.add_marker("inductor")
        if not any(item.get_closest_marker(name) for name in ("ranks", "inductor")):
            item.add_marker("unit")
    long = {
        item.path
        for item in items
        if item.path.name in _LONG_FILES or item.get_closest_marker("ranks")
    }
    place = {name: number for number, name in enumerate(_LONGEST_FILES)}
    last = len(place)
    items.sort(key=lambda item: (place.get(item.path.name, last), item.path not in long))


@pytest.fixture(autouse=True)
def no_inductor_in_unit_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """``pytest -m unit`` fails a test that compiles in this process: it is to be ``inductor``."""
    chosen = request.config.getoption("markexpr")
    if "unit" not in chosen or request.node.get_closest_marker("unit") is None:
        yield
        return
    error = AssertionError("Inductor compiles here: mark the test with pytest.mark.inductor")
    with mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", side_effect=error):
        yield


@pytest.fixture(autouse=True)
def boxed_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ranks run graphs without Inductor in tests that are not marked otherwise.

    Functions that a fixture of a module or a session runs on ranks are compiled with Inductor.
    """
    boxed = not (request.node.get_closest_marker("inductor") or ALL_WITH_INDUCTOR)
    with mock.patch.object(Ranks, "boxed", boxed):
        yield


def pytest_collection_finish() -> None:
    """Exclude the objects of imports and test collection from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # as on ranks (tests/imported.py)


@pytest.fixture(scope="session", autouse=True)
def no_kept_profiles() -> Iterator[None]:
    """Neither read nor write measured profiles in the user's cache folder."""
    with mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": ""}):
        yield


@pytest.fixture
def short_search() -> Iterator[None]:
    """The planner evaluates few plans, as on ranks."""
    with short_searches():
        yield


@pytest.fixture
def medium_search() -> Iterator[None]:
    """The planner evaluates enough plans for small steps, and not as many as for users."""
    with short_searches(60):
        yield


@pytest.fixture(scope="session")
def inductor_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled code for all ranks and sessions; ``pytest --cache-clear`` empties it.

    ``OSDP_TEST_INDUCTOR_CACHE`` names another folder. Several clones may share it.
    """
    if os.environ.get("OSDP_TEST_INDUCTOR_CACHE"):
        return Path(os.environ["OSDP_TEST_INDUCTOR_CACHE"])
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    if cache is None:  # -p no:cacheprovider
        return tmp_path_factory.mktemp("inductor")
    return Path(cache.mkdir("inductor"))


@pytest.fixture(scope="session")
def two_ranks(inductor_cache: Path) -> Iterator[Ranks]:
    """Two processes that run functions: ``two_ranks.run(function, ...)``."""
    with Ranks(2, inductor_cache) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks(inductor_cache: Path) -> Iterator[Ranks]:
    """Four processes that run functions: ``four_ranks.run(function, ...)``."""
    with Ranks(4, inductor_cache) as ranks:
        yield ranks

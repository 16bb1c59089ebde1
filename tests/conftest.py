"""Fixtures that start ranks once for the whole test session."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.ranks import Ranks
from tests.searching import short_searches

#: Files of a minute and more that use no ranks of ours.
_LONG_FILES = ("test_examples.py", "test_offline.py", "test_planner.py", "test_prediction.py")
_LONG_FILES += ("test_slice_some.py", "test_snapshots.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests that use ranks go first, and others that take a minute or more.

    What takes moments then fills the ends of pytest-xdist's workers, which are given whole files
    (``--dist loadfile``): all tests of one run on the same ranks.
    """
    long = {
        item.path
        for item in items
        if item.path.name in _LONG_FILES
        or {"two_ranks", "four_ranks", "native_ranks"} & set(getattr(item, "fixturenames", ()))
    }
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """The garbage collector leaves out what imports and collecting made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_kept_profiles() -> Iterator[None]:
    """Measured profiles are neither taken from this user's cache folder nor left there."""
    with mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": ""}):
        yield


@pytest.fixture
def short_search() -> Iterator[None]:
    """The planner looks at few plans, as it does on ranks."""
    with short_searches():
        yield


@pytest.fixture(scope="session")
def inductor_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled code, shared by ranks and by sessions; ``pytest --cache-clear`` empties it.

    ``OSDP_TEST_INDUCTOR_CACHE`` names another folder, which several clones may share.
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

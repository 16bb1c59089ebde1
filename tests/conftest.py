"""Fixtures that start ranks once for the whole test session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.ranks import Ranks

#: Files whose tests start processes of their own, a minute or two each.
_LONG_FILES = ("test_examples.py",)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, tests of one file that use ranks run in one, on the same ranks.

    These files take minutes each and go first: what takes moments fills the workers' ends.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    long: list[pytest.Item] = []
    for item in items:
        if {"two_ranks", "four_ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))
            long.append(item)
        elif item.path.name in _LONG_FILES:
            long.append(item)
    first = set(map(id, long))
    items[:] = long + [item for item in items if id(item) not in first]


@pytest.fixture(scope="session", autouse=True)
def no_kept_profiles() -> Iterator[None]:
    """Measured profiles are neither taken from this user's cache folder nor left there."""
    with mock.patch.dict(os.environ, {"OSDP_CACHE_DIR": ""}):
        yield


@pytest.fixture(scope="session")
def inductor_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled code, shared by ranks and by sessions; ``pytest --cache-clear`` empties it."""
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

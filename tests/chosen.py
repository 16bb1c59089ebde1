"""Selection of test cases: one of each kind, or all with ``OSDP_TEST_ALL=1``.

Those marked ``thorough`` run in ``make test-all``, and not in ``make test``.

Tests on ranks run their graphs without Inductor (:mod:`tests.boxed`), except for those marked
``inductor``. With ``OSDP_TEST_ALL=1``, or ``OSDP_TEST_INDUCTOR=1`` alone, all of
them run with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

_Case = TypeVar("_Case")
_ALL = os.environ.get("OSDP_TEST_ALL") == "1"
ALL_WITH_INDUCTOR = _ALL or os.environ.get("OSDP_TEST_INDUCTOR") == "1"


def more(*cases: _Case) -> list[_Case]:
    """Redundant cases of a test: all of them with ``OSDP_TEST_ALL=1``, else none."""
    return list(cases) if _ALL else []


def thorough(*cases: object) -> list[Any]:
    """Cases of a test that ``make test`` leaves to ``make test-all``; tuples are arguments."""
    given = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in given]


def core(cases: Iterable[object], *always: object) -> list[object]:
    """All cases of a test; ``make test`` has those of ``always`` alone."""
    return [*always, *thorough(*(case for case in cases if case not in always))]


def others(cases: Iterable[_Case], always: Iterable[_Case]) -> list[_Case]:
    """The cases that are not among those that always run; none without ``OSDP_TEST_ALL=1``."""
    given = list(always)
    return more(*(case for case in cases if case not in given))

"""Short plan searches, for tests of other subjects."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

#: Evaluation budget of the local search here. ``tests/passes`` tests the search itself. Tests of
#: the command line and of the examples use the full budget.
_MOST_REFINED = 30


def short_searches() -> AbstractContextManager[Any]:
    """Limit the planner of this process to few plans, to shorten tests with a memory limit."""
    return mock.patch("passes.plan.evaluator._MOST_REFINED", _MOST_REFINED)

"""Short searches, for tests whose subject is not the search."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

#: How many plans refining looks at here. The search itself has tests of its own in
#: ``tests/passes``; the command line and the examples search as users do.
_MOST_REFINED = 30


def short_searches() -> AbstractContextManager[Any]:
    """In this process, the planner looks at few plans: tests with a limit take half the time."""
    return mock.patch("passes.plan.evaluator._MOST_REFINED", _MOST_REFINED)

"""Short plan searches, for tests of other subjects."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from passes.plan.constants import CONSTANTS

#: Evaluation budget here. ``tests/passes`` tests the search itself. Most tests of the command
#: line and those of the examples use the full budget.
_FEW = 20


def short_searches(plans: int = _FEW) -> AbstractContextManager[Any]:
    """Limit the planner of this process to few plans, to shorten tests with a memory limit."""
    short = dataclasses.replace(CONSTANTS, most_plans=plans)
    return mock.patch("passes.plan.search.CONSTANTS", short)

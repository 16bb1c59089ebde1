"""Which cases run: one of each kind, and with ``OSDP_TEST_ALL=1`` all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

_Case = TypeVar("_Case")
_ALL = os.environ.get("OSDP_TEST_ALL") == "1"


def more(*cases: _Case) -> list[_Case]:
    """Cases that show what others of their test show: none of them, unless all are asked for."""
    return list(cases) if _ALL else []


def others(cases: Iterable[_Case], always: Iterable[_Case]) -> list[_Case]:
    """Of cases those that are not among some that always run, if all are asked for."""
    given = list(always)
    return more(*(case for case in cases if case not in given))

"""Budget: limits on the predicted peak and step of a model, and on their growth.

The figures of an earlier run are stored beside the test. A failure names what grew since then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from osdp_compile.errors import InfeasibleLimit, OsdpError
from osdp_compile.planning.offline import OfflineStep, offline_step
from osdp_compile.reports.budget_figures import (
    BudgetFigures,
    budget_figures,
    parameter_figures,
    settings_of,
)
from osdp_compile.reports.budget_growth import (
    changed_decisions,
    changed_settings,
    growth_of_parameters,
    growth_of_peak,
    growth_of_step,
)
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_seconds, parse_limit, parse_seconds


class OverBudget(OsdpError):
    """A step is over its budget, does not fit at all, or has no stored figures."""


class Excess(NamedTuple):
    """Sentences about a figure; empty: within its limit.

    ``above``: it is above the limit. ``grown``: it grew too much.
    """

    above: str
    grown: str

    @property
    def sentences(self) -> list[str]:
        return [one for one in self if one]


class Limit(NamedTuple):
    """The limit of a figure, in bytes or in seconds.

    ``name``: ``peak`` or ``step``. ``given``, ``most``: as the user gives it, and as a number;
    None: no limit. ``grows``: the share of the stored figure by which it may grow. ``text``:
    formats it.
    """

    name: str
    given: float | str | None
    most: float | None
    grows: float
    text: Callable[[float], str]

    def excess(self, now: float, before: float | None = None) -> Excess:
        """Compare a figure. ``before``: the stored one; None: its growth does not count."""
        above = grown = ""
        if self.most is not None and now > self.most:
            above = self._above(now, self.most)
        if before is not None and now > before * (1 + self.grows):
            grown = self._grown(now, before)
        return Excess(above, grown)

    def _above(self, now: float, most: float) -> str:
        return (
            f"the predicted {self.name} is {self.text(now)}, {self.text(now - most)} above the "
            f"budget {self.name}={self.given!r}"
        )

    def _grown(self, now: float, before: float) -> str:
        return (
            f"the predicted {self.name} grew by {self.text(now - before)} "
            f"({now / before - 1:.1%}), from {self.text(before)} to {self.text(now)}: "
            f"more than grows={self.grows:g}"
        )


class Budget(NamedTuple):
    """The budget of a test: a limit of the peak in bytes, and one of the step in seconds."""

    peak: Limit
    step: Limit

    @classmethod
    def parse(cls, peak: int | str | None, step: float | str | None, grows: float) -> Budget:
        """The budget from the arguments of a test.

        Raises:
            ValueError: for a malformed one, naming it.
        """
        is_number = isinstance(grows, int | float) and not isinstance(grows, bool)
        if not is_number or not 0 <= grows < math.inf:
            raise ValueError(f"grows={grows!r} is not a share: give 0.02 for two percent")
        try:
            most_bytes = None if peak is None else parse_limit(peak)
        except ValueError as error:
            raise ValueError(f"peak of osdp_budget: {error}") from None
        try:
            most_seconds = None if step is None else parse_seconds(step)
        except ValueError as error:
            raise ValueError(f"step of osdp_budget: {error}") from None
        return cls(
            Limit("peak", peak, most_bytes, grows, format_bytes),
            Limit("step", step, most_seconds, grows, format_seconds),
        )


class Stored(Protocol):
    """The stored text of a budget (``osdp_compile/integrations/snapshot_files.py``)."""

    @property
    def updates(self) -> bool: ...

    @property
    def path(self) -> str: ...

    def read(self) -> str | None: ...

    def store(self, text: str) -> bool: ...


def check_budget(
    model: nn.Module,
    args: Sequence[Any],
    stored: Stored,
    *,
    peak: int | str | None = None,
    step: float | str | None = None,
    grows: float = 0.02,
    **options: Any,
) -> Plan:
    """Plan a model without the machine, and compare the prediction with a budget.

    ``peak``, ``step``, ``grows``: the budget. ``options``: the other arguments of
    ``osdp_compile.plan``.

    Raises:
        OverBudget: the message says what grew.
        ValueError, TypeError, OsdpError: for a malformed argument, and as ``osdp_compile.plan``.
    """
    kept = stored.read()
    try:
        budget = Budget.parse(peak, step, grows)
        before = None if kept is None else _figures(kept, stored)
        now, plan = _planned(offline_step(model, args, **options), before)
    except Exception:
        if kept is not None:
            stored.store(kept)  # --snapshot-update deletes a file that no test compares
        raise
    over_peak, over_step = _excesses(budget, now, None if stored.updates else before)
    grew = bool(over_peak.grown or over_step.grown)
    is_stored = stored.store(now.to_text() if kept is None or grew or stored.updates else kept)
    lines = [*over_peak.sentences, *over_step.sentences]
    if kept is None and not is_stored:
        lines.append(_none_stored(stored.path))
    if not lines:
        return plan
    lines += _explained(now, before, bool(over_peak.sentences), bool(over_step.sentences))
    if grew:
        lines.append(
            f"if the growth is wanted: pytest --snapshot-update stores it in {stored.path}"
        )
    raise OverBudget("\n".join(lines))


def _planned(step: OfflineStep, before: BudgetFigures | None) -> tuple[BudgetFigures, Plan]:
    """The plan and its figures.

    Raises:
        OverBudget: if no plan fits: the planner's message, and the parameters that grew.
    """
    try:
        plan = step.plan()
    except InfeasibleLimit as error:
        lines = [str(error)]
        if before is not None:
            own = parameter_figures(step.step.parameters)
            lines += changed_settings(settings_of(step), before.settings)
            lines += growth_of_parameters(own, before.parameters)
        raise OverBudget("\n".join(lines)) from error
    return budget_figures(step, plan), plan


def _excesses(
    budget: Budget, now: BudgetFigures, before: BudgetFigures | None
) -> tuple[Excess, Excess]:
    """Of the peak, and of the step. ``before``: the stored figures; None: growth does not count."""
    if before is None:
        return budget.peak.excess(now.peak_bytes), budget.step.excess(now.step_seconds)
    return (
        budget.peak.excess(now.peak_bytes, before.peak_bytes),
        budget.step.excess(now.step_seconds, before.step_seconds),
    )


def _explained(
    now: BudgetFigures, before: BudgetFigures | None, peak: bool, step: bool
) -> list[str]:
    """What grew, in lines. ``peak``, ``step``: whether to explain it."""
    lines: list[str] = []
    if before is not None:
        lines += changed_settings(now.settings, before.settings)
        lines += growth_of_parameters(now.parameters, before.parameters)
        lines += changed_decisions(now, before)
    if peak:
        lines += growth_of_peak(now, before)
    if step:
        lines += growth_of_step(now, before)
    return lines


def _none_stored(path: str) -> str:
    return f"no figures are stored in {path}: pytest --snapshot-update writes them"


def _figures(text: str, stored: Stored) -> BudgetFigures | None:
    """The stored figures; None: they are damaged, and the user asked to write them.

    Raises:
        OverBudget: if they are damaged.
    """
    try:
        return BudgetFigures.from_text(text)
    except ValueError as error:
        if stored.updates:
            return None
        raise OverBudget(
            f"no budget figures are in {stored.path}: {error}. pytest --snapshot-update writes them"
        ) from error

"""osdp_compile: sharded data-parallel training, decided on the traced graph.

    model = torch.compile(model, backend="osdp", options={"memory_limit": "8GiB"})

Importing this package changes nothing. ``torch.compile`` finds the backend by its name. The
package imports its names, and torch with them, on first access.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osdp_compile.engine.no_sync import no_sync
    from osdp_compile.errors import InfeasibleLimit, OsdpError, PlanMismatch, RanksDiffer
    from osdp_compile.full_parameters import full_parameters
    from osdp_compile.optim.owner_ranks import update_by_owners
    from osdp_compile.options import Options
    from osdp_compile.planning.offline import plan
    from osdp_compile.reports.peak_memory import PeakMemory
    from osdp_compile.reports.step_report import Report, report
    from osdp_compile.shard import shard
    from osdp_compile.tracking.session import plan_of
    from passes.types.decision import Decision
    from passes.types.hardware import Hardware
    from passes.types.plan import ParameterPlan, Plan, Prediction

__all__ = [
    "Decision",
    "Hardware",
    "InfeasibleLimit",
    "Options",
    "OsdpError",
    "ParameterPlan",
    "PeakMemory",
    "Plan",
    "PlanMismatch",
    "Prediction",
    "RanksDiffer",
    "Report",
    "full_parameters",
    "no_sync",
    "plan",
    "plan_of",
    "report",
    "shard",
    "update_by_owners",
]

#: Name -> module that defines it.
_MODULES = {
    "Decision": "passes.types.decision",
    "Hardware": "passes.types.hardware",
    "InfeasibleLimit": "osdp_compile.errors",
    "Options": "osdp_compile.options",
    "OsdpError": "osdp_compile.errors",
    "ParameterPlan": "passes.types.plan",
    "PeakMemory": "osdp_compile.reports.peak_memory",
    "Plan": "passes.types.plan",
    "PlanMismatch": "osdp_compile.errors",
    "Prediction": "passes.types.plan",
    "RanksDiffer": "osdp_compile.errors",
    "Report": "osdp_compile.reports.step_report",
    "full_parameters": "osdp_compile.full_parameters",
    "no_sync": "osdp_compile.engine.no_sync",
    "plan": "osdp_compile.planning.offline",
    "plan_of": "osdp_compile.tracking.session",
    "report": "osdp_compile.reports.step_report",
    "shard": "osdp_compile.shard",
    "update_by_owners": "osdp_compile.optim.owner_ranks",
}


class _Package(types.ModuleType):
    """This package; imports each name on first access."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        importlib.import_module("osdp_compile.private_names")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds an imported submodule to its name here. Users still get the function of that
        # name.
        if isinstance(value, types.ModuleType) and _MODULES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package

"""osdp_compile: sharded data-parallel training, decided on the traced graph.

    model = torch.compile(model, backend="osdp", options={"memory_limit": "8GiB"})

Importing this package changes nothing; ``torch.compile`` finds the backend by its name. What it
offers is imported, and torch with it, when it is asked for.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osdp_compile.accumulating import no_sync
    from osdp_compile.errors import InfeasibleLimit, OsdpError, PlanMismatch, RanksDiffer
    from osdp_compile.full_parameters import full_parameters
    from osdp_compile.measure import PeakMemory
    from osdp_compile.offline import plan
    from osdp_compile.session import plan_of
    from osdp_compile.sharding import shard
    from osdp_compile.step_report import Report, report
    from passes.decisions import Decision, ParameterPlan, Plan, Prediction
    from passes.hardware import Hardware

__all__ = [
    "Decision",
    "Hardware",
    "InfeasibleLimit",
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
]

#: The module of each name.
_MODULES = {
    "Decision": "passes.decisions",
    "Hardware": "passes.hardware",
    "InfeasibleLimit": "osdp_compile.errors",
    "OsdpError": "osdp_compile.errors",
    "ParameterPlan": "passes.decisions",
    "PeakMemory": "osdp_compile.measure",
    "Plan": "passes.decisions",
    "PlanMismatch": "osdp_compile.errors",
    "Prediction": "passes.decisions",
    "RanksDiffer": "osdp_compile.errors",
    "Report": "osdp_compile.step_report",
    "full_parameters": "osdp_compile.full_parameters",
    "no_sync": "osdp_compile.accumulating",
    "plan": "osdp_compile.offline",
    "plan_of": "osdp_compile.session",
    "report": "osdp_compile.step_report",
    "shard": "osdp_compile.sharding",
}


class _Package(types.ModuleType):
    """This package, whose names are imported when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        importlib.import_module("osdp_compile.private_names")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a submodule to its name here once it is imported: the function of that name
        # stays what users get.
        if isinstance(value, types.ModuleType) and _MODULES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package

"""osdp_compile: sharded data-parallel training, decided on the traced graph.

    model = torch.compile(model, backend="osdp", options={"memory_limit": "8GiB"})

Importing this package changes nothing; ``torch.compile`` finds the backend by its name.
"""

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

"""Session: state of a planned model from its first call on, for later compilations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile.errors import OsdpError
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.alternatives import SearchedStep
from osdp_compile.sharding.parameter_reads import Reading
from osdp_compile.tracking.memory_watch import Watch
from osdp_compile.tracking.pending_model import waiting
from osdp_compile.tracking.step_timer import Observed
from passes.annotate.training_state import LIBRARIES, OTHER_MODELS, held_between_steps
from passes.pipeline import Pass
from passes.types.context import Context
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_limit


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """A planned model: its plan, its mesh, and the settings that lower its graphs.

    ``mesh``: over all ranks; None: there is one.
    ``context``: holds the plan, the hardware, the parameters, and in ``base_bytes`` the bytes
    that this rank holds between steps.
    ``reading``: how the modules read the parameters.
    ``frames``: the step is several graphs, separated by graph breaks.
    ``observed``: the compiled graphs and the step times.
    ``watch``: memory during the graphs that the plan does not count.
    ``model_groups``: names of the process groups in the model's graphs, in their order.
    ``searched``: the step, on the rank that searched the plan; None: another rank did, or the plan
    was given or kept.
    """

    plan: Plan
    mesh: DeviceMesh | None
    context: Context
    options: CheckedOptions
    passes: tuple[Pass, ...]
    reading: Reading
    frames: bool = False
    observed: Observed = dataclasses.field(default_factory=Observed)
    watch: Watch = dataclasses.field(default_factory=Watch)
    model_groups: list[str] = dataclasses.field(default_factory=list)
    searched: SearchedStep | None = None


def base_parts(session: Session) -> dict[str, int]:
    """Bytes that this rank holds between steps, by part; their sum is the ``base_bytes``."""
    ctx = session.context
    parts = held_between_steps(ctx, session.plan)
    for kind, size_bytes in (
        ("accumulated", ctx.accumulated_bytes),
        (OTHER_MODELS, ctx.other_models_bytes),
        (LIBRARIES, ctx.hardware.library_bytes),
    ):
        if size_bytes:
            parts[kind] = size_bytes
    return {**parts, "inputs": ctx.base_bytes - sum(parts.values())}


def check_kept(session: Session, options: CheckedOptions) -> None:
    """Refuse options of a later ``torch.compile`` that contradict the plan in force.

    Options that are not given keep their first values.

    Raises:
        OsdpError: naming the option.
    """
    if options == session.options:
        return
    first = session.options
    wrong = ""
    limit_bytes, said = options.memory_limit_bytes, session.plan.prediction
    if limit_bytes is not None and said is not None and said.peak_bytes > limit_bytes:
        wrong = (
            f"memory_limit={format_limit(limit_bytes)} is less than the "
            f"{format_bytes(said.peak_bytes)} that the plan in force takes"
        )
    for name in ("plan", "slices", "param_dtype", "reduce_dtype", "inductor"):
        given = getattr(options, name)
        before = session.plan if name == "plan" else getattr(first, name)
        if given is not None and given != before and given != getattr(first, name):
            wrong = f"{name!r} is another than at the model's first call"
    if options.accumulate and first.accumulate not in (True, options.accumulate):
        wrong = "'accumulate' was not given at the model's first call"
    if wrong:
        raise OsdpError(
            f"options: {wrong}. A model is planned once: give the option at its first call, or "
            "build the model again and load a checkpoint into it"
        )


_of_parameter: Any = WeakTensorKeyDictionary()
_of_module: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()


def remember(
    session: Session, roots: Sequence[nn.Module], parameters: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Keep the session while the model is alive."""
    for root in roots:
        _of_module[root] = session
    for name, parameter in parameters:
        _of_parameter[parameter] = (name, session)


def find(parameter: Tensor) -> tuple[str, Session] | None:
    """A parameter's name and session; None if no session has it."""
    found: tuple[str, Session] | None = _of_parameter.get(parameter)
    return found


def session_for(model: nn.Module) -> Session | None:
    """The session of a model; None before its first call that needs gradients.

    ``model``: as for :func:`plan_of`.
    """
    inner = getattr(model, "_orig_mod", model)
    if inner in _of_module:
        return _of_module[inner]
    for parameter in inner.parameters():
        found = find(parameter)
        if found is not None:
            return found[1]
    return None


def plan_of(model: nn.Module) -> Plan | None:
    """The plan in force for a model; None before its first call that needs gradients.

    After ``osdp_compile.shard`` a model has a plan at once.

    Args:
        model: the module, the result of ``torch.compile`` for it, or a module that contains the
            planned module or is contained in it.
    """
    session = session_for(model)
    if session is not None:
        return session.plan
    for _, laid_out in waiting(getattr(model, "_orig_mod", model).parameters()):
        return laid_out.plan
    return None

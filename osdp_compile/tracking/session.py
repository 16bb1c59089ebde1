"""What is remembered of a model between its first call and later compilations of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile.errors import OsdpError
from osdp_compile.model.shard_in_place import Reading
from osdp_compile.options import Options
from osdp_compile.tracking.memory_watch import Watch
from osdp_compile.tracking.pending_model import waiting
from osdp_compile.tracking.step_timer import Observed
from passes.annotate.training_state import OTHER_MODELS, held_between_steps
from passes.pipeline import Pass
from passes.types.context import Context
from passes.types.plan import Plan
from passes.types.units import format_bytes, format_limit


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """A model that was sharded: its plan, its mesh, and how its graphs are lowered.

    ``context``: with the plan, the hardware, the parameters, and the bytes this rank holds
    between steps as ``base_bytes``.
    ``reading``: how its modules read its parameters.
    ``frames``: its step is several graphs, cut by graph breaks.
    ``observed``: its graphs as they were compiled, and how long its steps take.
    ``watch``: what is there while its graphs run, beside what the plan counts.
    """

    plan: Plan
    mesh: DeviceMesh
    context: Context
    options: Options
    passes: tuple[Pass, ...]
    reading: Reading
    frames: bool = False
    observed: Observed = dataclasses.field(default_factory=Observed)
    watch: Watch = dataclasses.field(default_factory=Watch)


def base_parts(session: Session) -> dict[str, int]:
    """Bytes this rank holds between steps, by part: the session's ``base_bytes`` taken apart."""
    ctx = session.context
    parts = held_between_steps(ctx, session.plan)
    for kind, size_bytes in (
        ("accumulated", ctx.accumulated_bytes),
        (OTHER_MODELS, ctx.other_models_bytes),
    ):
        if size_bytes:
            parts[kind] = size_bytes
    return {**parts, "inputs": ctx.base_bytes - sum(parts.values())}


def check_kept(session: Session, options: Options) -> None:
    """Refuse options, of a later ``torch.compile`` of a model, that what is in force does not keep.

    What they leave out stays as it was given first.

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
    for name in ("plan", "slices", "param_dtype", "reduce_dtype"):
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
    """Keep the session for as long as the model lives."""
    for root in roots:
        _of_module[root] = session
    for name, parameter in parameters:
        _of_parameter[parameter] = (name, session)


def find(parameter: Tensor) -> tuple[str, Session] | None:
    """A sharded parameter's name and session; None if no session laid it out."""
    found: tuple[str, Session] | None = _of_parameter.get(parameter)
    return found


def session_for(model: nn.Module) -> Session | None:
    """The session of a model, or None before its first call that needs gradients.

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
    """The plan in force for a model, or None before its first call that needs gradients.

    After :func:`osdp_compile.shard` there is one at once.

    ``model``: the module itself or what ``torch.compile`` returned for it, or any module
    that contains or is contained in the one that was planned.
    """
    session = session_for(model)
    if session is not None:
        return session.plan
    for _, laid_out in waiting(getattr(model, "_orig_mod", model).parameters()):
        return laid_out.plan
    return None

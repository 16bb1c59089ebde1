"""The first call: agree, measure, plan, shard in place."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

from osdp_compile.calibrate import measure_hardware
from osdp_compile.capture import capture
from osdp_compile.errors import InfeasibleLimit, OsdpError, PlanMismatch, RanksDiffer
from osdp_compile.lower import static_inputs
from osdp_compile.optimizer_names import state_bytes_per_element
from osdp_compile.optimizers import OptimizerIndex
from osdp_compile.options import Options
from osdp_compile.report import log_plan
from osdp_compile.roots import find_roots
from osdp_compile.session import Session, remember
from osdp_compile.state import (
    ModelParameter,
    buffers_of,
    check_shardable,
    model_parameters,
    shard_in_place,
    synchronize,
)
from passes.context import Context, Parameter
from passes.decisions import Plan
from passes.hardware import Hardware
from passes.pipeline import default_passes, validate
from passes.plan import Infeasible, make_plan
from passes.predict import state_bytes

log = logging.getLogger("osdp_compile")
_measured: dict[str, Hardware] = {}


def first_call(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Session:
    """Plan the model that owns the graph's parameters, and shard it in place.

    Nothing is changed before the plan is known to fit.

    Raises:
        InfeasibleLimit, PlanMismatch, RanksDiffer, OsdpError.
    """
    passes = tuple(options.passes or default_passes())
    validate(passes)
    roots = find_roots(gm, inputs)
    entries = model_parameters(roots)
    check_shardable(entries)
    device = entries[0].parameter.device
    mesh = options.mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    group = mesh.get_group()
    agree(fingerprint(gm, entries), group)

    optimizers = OptimizerIndex(entry.parameter for entry in entries)
    context = Context(
        plan=Plan((), world_size=mesh.size()),
        hardware=options.hardware or _hardware(group, device),
        parameters=tuple(_described(entry, optimizers, options) for entry in entries),
        world_size=mesh.size(),
        rank=mesh.get_local_rank(),
        group_name=group.group_name,
        base_bytes=sum(b.numel() * b.element_size() for b in buffers_of(roots)),
        limit_bytes=options.memory_limit_bytes,
        by_exchange=dist.get_backend(group) == "gloo",
    )
    plan = _given(options.plan, context) if options.plan is not None else None
    if plan is None:
        plan = _from_rank_zero(lambda: _planned(gm, inputs, entries, context, passes), group)
    synchronize(entries, list(buffers_of(roots)), mesh)
    renewed = shard_in_place(entries, plan, mesh, optimizers)
    state = state_bytes(context, plan)
    context = context.replace(
        plan=plan, base_bytes=context.base_bytes + state["parameters"] + state["optimizer"]
    )
    session = Session(plan, mesh, context, options, passes)
    names = [entry.name for entry in entries]
    remember(session, [root for _, root in roots], list(zip(names, renewed, strict=True)))
    if context.rank == 0:
        log_plan(plan, log)
    return session


def _planned(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    entries: Sequence[ModelParameter],
    context: Context,
    passes: Sequence[Any],
) -> Plan:
    by_id = {id(entry.parameter): entry.name for entry in entries}
    names = {i: by_id[id(value)] for i, value in enumerate(inputs) if id(value) in by_id}
    static = {**static_inputs(gm, inputs), **names}
    captured = capture(gm, inputs, names, static, context, passes)
    try:
        return make_plan(captured, context, passes)
    except Infeasible as error:
        raise InfeasibleLimit(str(error)) from None


def _given(plan: Plan, context: Context) -> Plan:
    rows = [(p.name, p.shape, p.dtype) for p in context.parameters]
    difference = plan.mismatch(rows, context.world_size)
    if difference is not None:
        raise PlanMismatch(f"the plan given in options does not fit: {difference}")
    return plan


def _described(entry: ModelParameter, optimizers: OptimizerIndex, options: Options) -> Parameter:
    parameter = entry.parameter
    return Parameter(
        name=entry.name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        numel=parameter.numel(),
        element_bytes=parameter.element_size(),
        requires_grad=parameter.requires_grad,
        optimizer_bytes=_optimizer_bytes(parameter, optimizers, options),
    )


def _optimizer_bytes(parameter: nn.Parameter, optimizers: OptimizerIndex, options: Options) -> int:
    """Bytes of optimizer state the whole parameter has or will get."""
    if not parameter.requires_grad:
        return 0
    if isinstance(options.optimizer, int):
        return options.optimizer * parameter.numel()
    if isinstance(options.optimizer, str):
        return (
            state_bytes_per_element(options.optimizer, parameter.element_size()) * parameter.numel()
        )
    holding = optimizers.holding(parameter)
    if holding:
        return sum(optimizers.state_bytes(parameter, optimizer) for optimizer in holding)
    return state_bytes_per_element("adamw", parameter.element_size()) * parameter.numel()


def _hardware(group: dist.ProcessGroup, device: torch.device) -> Hardware:
    key = f"{group.group_name} {device.type}"
    if key not in _measured:
        _measured[key] = measure_hardware(group, device)
    return _measured[key]


def fingerprint(gm: fx.GraphModule, entries: Sequence[ModelParameter]) -> list[str]:
    """What must be the same on every rank, line by line; batch sizes may differ."""
    lines = [
        f"parameter {e.name}: {tuple(e.parameter.shape)} {e.parameter.dtype} "
        f"requires_grad={e.parameter.requires_grad} has_grad={e.parameter.grad is not None}"
        for e in entries
    ]
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module"):
            target = node.target if isinstance(node.target, str) else _qualified(node.target)
            lines.append(f"operation {target}")
    return lines


def _qualified(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"


def agree(lines: list[str], group: dist.ProcessGroup) -> None:
    """Make sure every rank traced the same model.

    Raises:
        RanksDiffer: on every rank, naming the first difference.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [None] * len(digests)
    dist.all_gather_object(texts, lines, group=group)
    other = next(i for i, d in enumerate(digests) if d != digests[0])
    first, second = texts[0], texts[other]
    for index in range(max(len(first), len(second))):
        ours = first[index] if index < len(first) else "nothing"
        theirs = second[index] if index < len(second) else "nothing"
        if ours != theirs:
            raise RanksDiffer(
                f"ranks traced different models; the first difference: rank 0 has {ours!r}, "
                f"rank {other} has {theirs!r}. Build the same model and call it the same way on "
                "every rank."
            )
    raise AssertionError("digests differ and texts do not")


def _from_rank_zero(make: Any, group: dist.ProcessGroup) -> Plan:
    """Rank 0's plan on every rank; its error too, so that no rank is left waiting."""
    made: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            made = [make().to_dict()]
        except Exception as error:
            failure = error
            made = [(type(error).__name__, str(error))]
    dist.broadcast_object_list(made, src=dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    if isinstance(made[0], tuple):
        kind, text = made[0]
        raise (
            InfeasibleLimit(text)
            if kind == "InfeasibleLimit"
            else OsdpError(f"rank 0: {kind}: {text}")
        )
    return Plan.from_dict(made[0])

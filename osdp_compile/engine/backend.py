"""The backend: ``torch.compile(model, backend="osdp")`` calls it with every graph.

The planner plans on the first graph that needs gradients. The backend then shards the model in
place and has Dynamo trace the frame again. This trace and every later one read the parameters
through markers, and are lowered by the plan. A model that ``osdp_compile.shard`` sharded is read
through markers from the start: its first graph is lowered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

import osdp_compile.private_names  # noqa: F401
from osdp_compile import _torch
from osdp_compile.engine.first_call import first_call, first_call_of_sharded
from osdp_compile.engine.uncaught import print_for_users, raise_briefly
from osdp_compile.errors import OsdpError
from osdp_compile.log_lines import NAMES, OF_ALL_RANKS, ensure_visible, leave_to_torch
from osdp_compile.lowering.graph_lowering import Compiler
from osdp_compile.lowering.lower import lower, session_of
from osdp_compile.model.find_modules import plain_parameters
from osdp_compile.model.mixed_precision import cast_while_traced, end_casting, is_cast
from osdp_compile.model.other_dims import (
    are_on_other_dims,
    distributed_modules,
    give_back,
    mesh_of,
    take_local,
)
from osdp_compile.model.own_data import beside_theirs, check_batches
from osdp_compile.model.wrapped import check_not_wrapped
from osdp_compile.options import CheckedOptions, with_mode
from osdp_compile.planning.frames import collected, is_collecting
from osdp_compile.planning.planner_inputs import step_roots
from osdp_compile.runtime.current_call import interrupted_call
from osdp_compile.runtime.meshes import number_of_ranks
from osdp_compile.runtime.pipeline_stage import check_no_sync, check_ranks
from osdp_compile.torch_versions import newer_than_tested
from osdp_compile.tracking.pending_model import plan_for_one_rank, waiting
from osdp_compile.tracking.session import check_kept, find
from osdp_compile.tracking.uncovered import compiled_models, leave_alone, watch_optimizers
from passes.pipeline import Observer

log = logging.getLogger("osdp_compile")
_said: set[str] = set()


def osdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile one Dynamo graph; see :class:`osdp_compile.options.Options` for the options.

    ``mode``: the argument of ``torch.compile``, which omits ``"default"``.

    Raises:
        ValueError: for an unknown or malformed option, and for a mode that the plan does not allow.
        OsdpError: if the model cannot be sharded, or no plan fits under the limit.
    """
    try:
        parsed = CheckedOptions.parse(with_mode(options, mode))
    except ValueError as error:
        raise_briefly(error)
    try:
        return compile_graph(gm, example_inputs, parsed)
    except OsdpError as error:
        raise_briefly(error)
    except ValueError as error:
        _torch.dynamo.raise_to_user(error)


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: CheckedOptions,
    compile_inner: Compiler | None = None,
    observe: Observer | None = None,
) -> Any:
    """Compile one Dynamo graph with checked options.

    ``compile_inner``, ``observe``: see :func:`osdp_compile.lowering.lower.lower`.
    """
    if is_collecting():
        return collected(gm, inputs)
    leave_to_torch(_torch.logs.shown_by_torch(NAMES))
    _warn_of_newer_torch()
    alone = why_alone(options)
    if alone is not None and options.plan is None:
        kept = plan_for_one_rank(inputs)
        options = options if kept is None else options.with_plan(kept)
    plans = options.memory_limit_bytes is not None or options.plan is not None
    if alone is not None and not plans and not _is_planned(inputs):
        say_once(f"{alone}: compiling with Inductor, nothing is sharded")
        leave_alone(inputs)
        return _torch.inductor.compile_fx(
            gm, list(inputs), config_patches=dict(options.inductor or {})
        )
    check_not_wrapped(gm, inputs)
    check_ranks(options.mesh)
    given_mesh = options.mesh
    options = dataclasses.replace(options, mesh=beside_theirs(inputs, given_mesh))
    if _is_on_other_dims(inputs, options):
        if not torch.is_grad_enabled():
            return _torch.inductor.compile_fx(
                gm, list(inputs), config_patches=dict(options.inductor or {})
            )
        _take_local(gm, inputs, options.mesh, has_own_data=options.mesh is not given_mesh)
    _first_call_of_sharded(gm, inputs, options)
    unplanned = [p for _, p in plain_parameters(gm, inputs) if find(p) is None]
    if any(p.requires_grad for p in unplanned) and torch.is_grad_enabled():
        _first_call(gm, inputs, options)
    session = session_of(gm, inputs)
    if session is None:
        return _torch.inductor.compile_fx(
            gm, list(inputs), config_patches=dict(options.inductor or {})
        )
    print_for_users()
    check_kept(session, options)
    if session.reading.leaves is not None:
        check_no_sync()
    return lower(gm, inputs, session, compile_inner, observe)


def _first_call(gm: fx.GraphModule, inputs: Sequence[Any], options: CheckedOptions) -> NoReturn:
    """Plan the model and shard it; then Dynamo traces the frame again."""
    modules = _modules(gm, inputs)
    if not is_cast(modules, options.precision):
        cast_while_traced(modules, options.precision)
        _torch.dynamo.restart_tracing()
    try:
        # The trace to come has no readers of this one: the restart below clears Dynamo's log.
        with contextlib.suppress(_torch.dynamo.RestartTracing):
            first_call(gm, inputs, options)
    finally:  # also after an error
        end_casting(modules)
        give_back()
    _torch.dynamo.restart_tracing()


def _first_call_of_sharded(
    gm: fx.GraphModule, inputs: Sequence[Any], options: CheckedOptions
) -> None:
    """Start the sessions of models that ``osdp_compile.shard`` sharded and that the graph reads."""
    for root, laid_out in waiting(inputs):
        if laid_out.others:
            _check_is_one_graph(gm, inputs)
        parts = compiled_models(osdp)
        if laid_out.read_in(root, options.precision, inputs, parts):
            _torch.dynamo.restart_tracing()
        before = laid_out.reading.leaves
        first_call_of_sharded(gm, inputs, options, root, laid_out)
        if laid_out.reading.leaves is not before:  # the call is inside no_sync
            _torch.dynamo.restart_tracing()


def _take_local(
    gm: fx.GraphModule, inputs: Sequence[Any], ours: DeviceMesh | None, has_own_data: bool
) -> NoReturn:
    """Make parameters on other mesh dimensions local; then Dynamo traces the frame again.

    ``ours``: the mesh to shard over. ``has_own_data``: the ranks of the other dimensions have
    batches of their own.
    """
    _check_is_one_graph(gm, inputs)
    modules = distributed_modules(gm, inputs)
    if has_own_data:
        theirs = mesh_of(one for one in inputs if isinstance(one, nn.Parameter))
        assert ours is not None and theirs is not None
        check_batches(inputs, ours, theirs)
    take_local(modules, has_own_data)
    _torch.dynamo.restart_tracing()


def _check_is_one_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse a part of the step of a model on other mesh dimensions too."""
    if interrupted_call(gm, inputs) is not None:
        _torch.dtensor.forget_placements()  # this graph may end with an embedding's partial sum
        raise OsdpError(
            "the model's parameters are on other mesh dimensions too (parallelize_module), and its "
            "step is several graphs: that is not supported. torch.compile(..., fullgraph=True) "
            "says where the graph breaks: make it one graph"
        )


def _is_on_other_dims(inputs: Sequence[Any], options: CheckedOptions) -> bool:
    """Whether the graph reads parameters, not planned yet, that are on other mesh dimensions."""
    unplanned = [one for one in inputs if isinstance(one, nn.Parameter) and find(one) is None]
    is_waiting = any(True for _ in waiting(inputs))
    return not is_waiting and are_on_other_dims(unplanned, options.mesh)


def _is_planned(inputs: Sequence[Any]) -> bool:
    """Whether the graph reads a parameter of a planned model."""
    return any(isinstance(one, nn.Parameter) and find(one) is not None for one in inputs)


def _modules(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[nn.Module]:
    """The modules that own the graph's parameters; none if :func:`first_call` will refuse it."""
    try:
        roots = step_roots(gm, inputs, interrupted_call(gm, inputs))
        return [one for _, root in roots for one in root.modules()]
    except OsdpError:
        return []


def why_alone(options: CheckedOptions) -> str | None:
    """Why there is only one rank to train on; None if there are several.

    Raises:
        OsdpError: if ``WORLD_SIZE`` is above one and there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        started = os.environ.get("WORLD_SIZE", "")
        if started.isdigit() and int(started) > 1:
            raise OsdpError(
                f"there is no process group, and WORLD_SIZE={started} in the environment: each of "
                "the ranks would train a model of its own. Call torch.distributed."
                "init_process_group() before the model's first call; to train in this process "
                "alone, unset WORLD_SIZE"
            )
        return "no process group (torch.distributed.init_process_group was not called)"
    return "a world of one rank" if number_of_ranks(options.mesh) == 1 else None


def _warn_of_newer_torch() -> None:
    """Warn once of a torch version that is newer than the tested ones."""
    newer = newer_than_tested(torch.__version__)
    if newer is not None and newer not in _said:
        _said.add(newer)
        log.warning(newer, extra=OF_ALL_RANKS)


def say_once(message: str) -> None:
    """Log a line the first time it occurs."""
    if message not in _said:
        _said.add(message)
        ensure_visible(log)
        log.info(message)


# torch.compile imports this module when a user names the backend. Dynamo may never call the
# backend, so the check for uncovered parameters begins here.
watch_optimizers(osdp)

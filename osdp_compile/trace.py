"""Trace: a model's lowered graphs, for any world size, in one process, without a GPU.

A fake process group replaces the ranks; its collectives do nothing. The rest is as in training:
Dynamo, the first call, the passes. Only Inductor is left out.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from osdp_compile import _torch
from osdp_compile.engine.backend import compile_graph
from osdp_compile.errors import OsdpError
from osdp_compile.options import CheckedOptions
from passes.graph.printer import graph_text
from passes.pipeline import Pass, graph_name
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A fake process group of ``world_size`` ranks; only this rank exists.

    Raises:
        OsdpError: if this process has a real process group already.
    """
    if dist.is_initialized():
        raise OsdpError(
            "a process group is initialized in this process: trace in a process of its own"
        )
    dist.init_process_group(
        "fake", store=_torch.distributed.fake_store(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_graphs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int,
    rank: int = 0,
    plan: Plan | Decision | str | None = None,
    options: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The canonical text of a training step's graphs after every pass.

    Args:
        model: a module on any real device; the trace uses a copy.
        args: one rank's inputs.
        kwargs: its keyword arguments.
        world_size: number of ranks.
        rank: the rank whose graphs are traced.
        plan: a Plan, or one decision for all parameters (``"shard_regather"``); None: the
            planner's plan under ``options["memory_limit"]`` for generic hardware.
        options: as for ``torch.compile(model, backend="osdp", options=...)``.
        mesh: ranks by dimension of a two-dimensional mesh, the outer first, such as
            ``{"host": 2, "gpu": 4}``; without a profile the inner one is ten times as fast.

    Returns:
        The texts in the order of the passes, by graph and pass: ``"forward/shard"``,
            ``"backward/reorder"``, ``"joint/tag"``. The graph is checked after every pass.
    """
    model = copy.deepcopy(model)
    given = {"debug": True, **(options or {})}
    if isinstance(plan, Decision | str):
        plan = Plan.uniform(
            model.named_parameters(),
            plan,
            world_size=world_size,
            ranks_of_a_host=None if mesh is None else list(mesh.values())[-1],
        )
    if plan is not None:
        given["plan"] = plan
    texts: dict[str, str] = {}

    def observe(one: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        texts[f"{graph_name(one, ctx)}/{one.name}"] = graph_text(gm, ctx)

    def uncompiled(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return make_boxed_func(gm.forward)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_graph(gm, inputs, CheckedOptions.parse(given), uncompiled, observe)

    torch.compiler.reset()
    with fake_world(world_size, rank):
        if mesh is not None:
            given["mesh"] = _mesh(model, mesh, world_size)
        returned = torch.compile(model, backend=backend)(*args, **(kwargs or {}))
        tensors = [t for t in _tensors(returned) if t.requires_grad]
        torch.autograd.backward([t.sum() for t in tensors])
    torch.compiler.reset()
    return texts


def _mesh(model: nn.Module, mesh: Mapping[str, int], world_size: int) -> DeviceMesh:
    """The mesh of all ranks.

    Raises:
        ValueError: if the product of ``mesh`` is not ``world_size``.
    """
    if math.prod(mesh.values()) != world_size:
        raise ValueError(f"mesh={dict(mesh)} is not a mesh of {world_size} ranks (world_size)")
    device_type = next(model.parameters()).device.type
    return init_device_mesh(device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = _torch.tensors.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

"""Capture: the training step's forward and backward graphs, before the model is sharded.

The Dynamo graph takes the same path as in a compilation (AOTAutograd, Inductor's joint-graph
passes, the partitioner), so the planner sees the graphs that will run. The compilation is then
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from functorch.compile import min_cut_rematerialization_partition
from torch import fx

from osdp_compile import _torch
from osdp_compile.runtime.written_reads import refuse_write
from passes.capture.captured_step import add_markers, mark_inputs
from passes.graph.captured import Captured
from passes.graph.fx_utils import output_node
from passes.pipeline import Pass, Stage, run
from passes.recompute.rng_states import settle_rng_states
from passes.recompute.written_inputs import save_reads_of_written_inputs, written_inputs
from passes.types.context import Context, Phase
from passes.types.decision import Decision
from passes.types.plan import Plan


class NeedsNoGradients(Exception):
    """No graph output needs gradients, so AOTAutograd does not partition the graph."""


class _Done(Exception):
    def __init__(self, captured: Captured) -> None:
        super().__init__("captured")
        self.captured = captured


def capture(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    names: Mapping[int, str],
    static: Mapping[int, str],
    ctx: Context,
    passes: Sequence[Pass],
) -> Captured:
    """The partitioned step of a Dynamo graph with whole parameters; inserts the markers.

    Args:
        names: index of a graph input -> its parameter's name.
        static: index -> kind of each input
            (:func:`~osdp_compile.model.find_modules.static_inputs`).

    Raises:
        NeedsNoGradients: if no graph output needs gradients.
        OsdpError: if the forward writes into a trained parameter.
    """
    everything_again = ctx.replace(
        plan=Plan.uniform(_named(ctx), Decision.SHARD_REGATHER, world_size=1)
    )
    known = frozenset(names.values())

    def partition(
        joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        shards: dict[fx.Node, str] = {}
        by_index: dict[int, fx.Node] = {}
        for node in joint.graph.find_nodes(op="placeholder"):
            index = _torch.aot_autograd.input_index(node)
            if index is not None and index in names and node.name.startswith("primals"):
                shards[node] = names[index]
                by_index[index] = node
        for node in written_inputs(joint.graph) & shards.keys():
            if ctx.parameter(shards[node]).requires_grad:
                refuse_write(shards[node])
        gradients: dict[int, fx.Node] = {}
        described = output_node(joint.graph).meta.get("desc") or []
        for position, description in enumerate(described):
            index = _torch.aot_autograd.gradient_input_index(description)
            if index is not None and index in by_index:
                gradients[position] = by_index[index]
        add_markers(joint, shards, gradients, ctx)
        joint = run(passes, Stage.JOINT, joint, everything_again)
        forward, backward = partitioned(joint, joint_inputs, **kwargs)
        for part, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
            found = [
                _torch.aot_autograd.input_index(n) for n in part.graph.find_nodes(op="placeholder")
            ]
            mark_inputs(
                part, [static.get(i) if i is not None else None for i in found], known, phase
            )
        raise _Done(Captured(forward, backward))

    try:
        with _torch.aot_autograd.without_cache():
            _torch.inductor.compile_fx(
                gm,
                list(inputs),
                config_patches={
                    "custom_partitioner_fn": _torch.aot_autograd.Partitioner(partition)
                },
                inner_compile=_compiles_nothing,
            )
    except _Done as done:
        return done.captured
    raise NeedsNoGradients


def partitioned(
    joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph, by torch's partitioner.

    Parameters and buffers are free to save. AOTAutograd names them by their places among the
    inputs of the Dynamo graph. In the joint graph a DTensor is several inputs, and the places
    behind it are others.
    """
    free = set(kwargs.pop("static_lifetime_input_indices", None) or ())
    inputs = joint.graph.find_nodes(op="placeholder")
    own = [
        place for place, node in enumerate(inputs) if _torch.aot_autograd.input_index(node) in free
    ]
    save_reads_of_written_inputs(joint)
    forward, backward = min_cut_rematerialization_partition(
        joint, joint_inputs, static_lifetime_input_indices=own, **kwargs
    )
    settle_rng_states(forward, backward, kwargs["num_fwd_outputs"])
    return forward, backward


def _compiles_nothing(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Replaces Inductor; called for a graph that is not partitioned."""
    raise NeedsNoGradients


def _named(ctx: Context) -> list[tuple[str, Any]]:
    return [(p.name, p) for p in ctx.parameters]

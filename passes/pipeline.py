"""The pipeline: the list of passes, their order, and their contracts.

A pass is a function ``(GraphModule, Context) -> GraphModule`` with a name, a stage, and a
contract: the properties that it needs and the properties that it leaves. To add a pass of your
own, insert it next to another one:

    from passes.pipeline import Pass, default_passes, insert_after

    mine = Pass("mine", my_function, Stage.PARTS)
    torch.compile(model, backend="osdp",
                  options={"passes": insert_after(default_passes(), "bucket", mine)})
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from passes.annotate.annotate_costs import annotate
from passes.chunk.chunk_tokens import chunk, chunk_inference
from passes.graph.metadata import DATAFLOW, MEMORY, Key
from passes.graph.step_module import graphs_of
from passes.graph.verifier import check_step
from passes.move.move_activations import move, move_inference
from passes.overlap.bucket_collectives import bucket
from passes.overlap.hierarchical_collectives import hierarchical
from passes.overlap.hoist_gradients import hoist
from passes.overlap.reorder_collectives import reorder
from passes.recompute.recompute_activations import recompute
from passes.shard.dedupe_markers import dedupe
from passes.shard.lower_markers import shard
from passes.shard.narrow_reads import narrow
from passes.shard.settle_collectives import settle
from passes.shard.tag_recompute import tag
from passes.simulate.lent import lend
from passes.split.save_slices import save_slices
from passes.split.split_operators import split
from passes.types.context import Context, Phase


class Stage(str, enum.Enum):
    """The graph that a pass gets.

    Attributes:
        JOINT: the joint forward and backward before partitioning, or an inference graph.
        STEP: the partitioned forward and backward together (``passes/graph/step_module.py``).
        PARTS: the forward and the backward, each on its own, or an inference graph.
    """

    JOINT = "joint"
    STEP = "step"
    PARTS = "parts"


PassFunction = Callable[[fx.GraphModule, Context], fx.GraphModule]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass and its contract.

    Attributes:
        name: unique in a list of passes.
        function: ``(GraphModule, Context) -> GraphModule``.
        stage: the graph that it gets.
        needs: words that earlier passes must leave.
        leaves: words that later passes may need.
    """

    name: str
    function: PassFunction
    stage: Stage = Stage.PARTS
    needs: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def default_passes() -> list[Pass]:
    """The default passes in execution order."""
    return [
        Pass("dedupe", dedupe, Stage.JOINT, leaves=("one marker each",)),
        Pass("narrow", narrow, Stage.JOINT, needs=("one marker each",), leaves=("narrow reads",)),
        Pass("tag", tag, Stage.JOINT, needs=("one marker each",), leaves=("tags",)),
        Pass("settle", settle, Stage.JOINT, leaves=("settled collectives",)),
        Pass("recompute", recompute, Stage.STEP, needs=("one marker each",), leaves=("copies",)),
        Pass("chunk", chunk, Stage.STEP, needs=("copies",), leaves=("chunks",)),
        Pass("move", move, Stage.STEP, needs=("chunks",), leaves=("moved activations",)),
        Pass("save_slices", save_slices, Stage.STEP, needs=("copies",), leaves=("saved slices",)),
        Pass("lend", lend, Stage.STEP, needs=("saved slices",), leaves=("lent inputs",)),
        Pass("chunk_inference", chunk_inference, needs=("one marker each",)),
        Pass("move_inference", move_inference, needs=("one marker each",)),
        Pass("split", split, needs=("one marker each", "saved slices"), leaves=("slices",)),
        Pass("hoist", hoist, needs=("one marker each",), leaves=("gradients first",)),
        Pass("shard", shard, needs=("one marker each",), leaves=("collectives",)),
        Pass("bucket", bucket, needs=("collectives",), leaves=("buckets",)),
        Pass("hierarchical", hierarchical, needs=("collectives",), leaves=("stages",)),
        Pass("annotate", annotate, leaves=("costs",)),
        Pass("reorder", reorder, needs=("collectives", "costs"), leaves=("schedule",)),
    ]


def graph_name(one: Pass, ctx: Context) -> str:
    """A name for the graph that a pass gets: joint, forward, backward or inference."""
    return "joint" if one.stage is Stage.JOINT else ctx.phase.value


class PipelineError(ValueError):
    """This list of passes cannot run in this order."""


def validate(passes: Sequence[Pass]) -> None:
    """Check names and contracts.

    Raises:
        PipelineError: a pass needs a property that no earlier pass leaves, or two passes have the
            same name. The message names the pass.
    """
    left: set[str] = set()
    names: set[str] = set()
    for one in sorted(passes, key=lambda p: list(Stage).index(p.stage)):
        if one.name in names:
            raise PipelineError(f"two passes are named {one.name!r}: names must differ")
        names.add(one.name)
        missing = [need for need in one.needs if need not in left]
        if missing:
            known = [p.name for p in passes if set(p.leaves) & set(missing)]
            raise PipelineError(
                f"pass {one.name!r} needs {missing} and no pass before it leaves that"
                + (f": put it after {known}" if known else "")
            )
        left.update(one.leaves)


def insert_before(passes: Sequence[Pass], name: str, new: Pass) -> list[Pass]:
    """A new list with ``new`` directly before the pass called ``name``."""
    index = _index(passes, name)
    return [*passes[:index], new, *passes[index:]]


def insert_after(passes: Sequence[Pass], name: str, new: Pass) -> list[Pass]:
    """A new list with ``new`` directly after the pass called ``name``."""
    index = _index(passes, name) + 1
    return [*passes[:index], new, *passes[index:]]


def _index(passes: Sequence[Pass], name: str) -> int:
    for index, one in enumerate(passes):
        if one.name == name:
            return index
    raise PipelineError(f"no pass is named {name!r}; there are {[p.name for p in passes]}")


#: Module metadata that describes the whole graph. Only the next pass may read it: that pass may
#: change the graph.
_OF_ONE_PASS: tuple[Key[fx.GraphModule, Any], ...] = (DATAFLOW, MEMORY)

Observer = Callable[[Pass, fx.GraphModule, Context], None]


def run(
    passes: Sequence[Pass],
    stage: Stage,
    gm: fx.GraphModule,
    ctx: Context,
    observe: Observer | None = None,
    recompile: bool = True,
) -> fx.GraphModule:
    """Run the passes of one stage in order.

    Args:
        passes: the whole list; passes of other stages are left out.
        stage: the stage to run.
        gm: the graph of that stage.
        ctx: the context; its phase is the graph's.
        observe: gets the graph after each pass; of a step, both graphs one after the other. That
            they fit each other is checked before.
        recompile: regenerate the module's code at the end, so that passes need not. Callers that
            only read the graph save time without it; module metadata of the last pass then stays.
    """
    for one in passes:
        if one.stage is stage:
            known = {key: key.get(gm) for key in _OF_ONE_PASS}
            gm = one.function(gm, ctx)
            for key, value in known.items():  # it describes the graph before this pass
                if value is not None and key.get(gm) is value:
                    key.pop(gm)
            if observe is not None:
                _show(one, gm, ctx, observe)
    if recompile:
        for key in _OF_ONE_PASS:
            key.pop(gm)
        for graph, _ in _graphs(stage, gm, ctx):
            graph.recompile()
    return gm


def _show(one: Pass, gm: fx.GraphModule, ctx: Context, observe: Observer) -> None:
    """Check that the graphs of a step fit each other, and give all graphs to ``observe``."""
    if one.stage is Stage.STEP:
        check_step(gm, one.name)
    for graph, phase in _graphs(one.stage, gm, ctx):
        observe(one, graph, ctx.replace(phase=phase))


def _graphs(stage: Stage, gm: fx.GraphModule, ctx: Context) -> list[tuple[fx.GraphModule, Phase]]:
    """The graphs of a stage's module, each with its phase."""
    if stage is Stage.STEP:
        return list(zip(graphs_of(gm), (Phase.FORWARD, Phase.BACKWARD), strict=True))
    return [(gm, ctx.phase)]

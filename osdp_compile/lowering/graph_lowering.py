"""Graph lowering: the partition and the passes of one graph, and the notes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from osdp_compile import _torch
from osdp_compile.lowering import kept_graphs, warn
from osdp_compile.lowering.agreeing import Sent
from osdp_compile.lowering.graph_log import GraphLog
from osdp_compile.lowering.inductor_fusion import in_place
from osdp_compile.lowering.kept_graphs import KeptGraph, KeptPhase, Record
from osdp_compile.model.find_modules import static_inputs
from osdp_compile.model.same_parameters import gathered_in
from osdp_compile.planning.capture import partitioned
from osdp_compile.runtime.model_collectives import groups_named
from osdp_compile.runtime.written_reads import refuse_written_reads
from osdp_compile.tracking.larger_inputs import GrowingPeak, of_symbolic_size, symbols_of
from osdp_compile.tracking.memory_watch import GraphInput
from osdp_compile.tracking.profiler_ranges import Range, ranges_of
from osdp_compile.tracking.session import Session, base_parts, find
from osdp_compile.tracking.step_timer import OTHER_FRAMES, CompiledStep
from passes.annotate.training_state import shard_bytes
from passes.capture.captured_step import mark_inputs
from passes.graph.fx_utils import bytes_of
from passes.graph.metadata import (
    GATHERED,
    MODULE_KEYS,
    NOT_CHUNKED,
    NOT_MOVED,
    NOT_RECOMPUTED,
    SAVES,
)
from passes.graph.printer import graph_text
from passes.graph.step_module import graphs_of, step_module
from passes.graph.verifier import check
from passes.ops.markers import unshard_of, unshards
from passes.pipeline import Observer, Pass, Stage, graph_name, run
from passes.pricing.predict import in_flight_bytes, kept_bytes_of
from passes.simulate.lent import output_bytes, returned_bytes
from passes.simulate.simulator import simulate
from passes.simulate.skeleton import of_rows, rows_of, skeleton_of
from passes.simulate.timeline import Timeline, timeline_of
from passes.types.context import Context, Phase

Compiler = Callable[..., Any]


def name_in_session(parameter: nn.Parameter) -> str | None:
    """The name by which graphs read a parameter: of alike frames, that in the first of them."""
    found = find(parameter)
    return None if found is None else found[1].reading.alike.first_of.get(found[0], found[0])


class GraphLowering:
    """Partition and passes of one graph, as Inductor calls them.

    It lives as long as the compiled graph. So it holds no real input.

    ``step``: the compiled graphs, filled in as they are lowered.
    ``log``: log lines and artifacts.
    ``gathered``: what the forward gathers, and what the backward gathers and reduces.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        session: Session,
        compile_inner: Compiler,
        observe: Observer | None,
        context: Context,
        graph_log: GraphLog,
    ) -> None:
        self._context, self.log = context, graph_log
        self._sent = Sent((), {})
        self.gathered: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        self._gradient_buffer_bytes = 0
        static = static_inputs(gm, inputs, name_in_session)
        self._static, self._session, self._compile_inner = static, session, compile_inner
        self._parameters = frozenset(p.name for p in session.context.parameters)
        self._watch = _observer(session, observe, graph_log)
        own = tuple(sorted(name for name in static.values() if name in self._parameters))
        times = session.reading.alike.times_of(own)
        self.step = CompiledStep((_torch.dynamo.current_frame(), own), times)
        self._symbols = symbols_of(inputs)
        batch = [inputs[index] for index, name in static.items() if name == "batch"]
        self._growing = of_symbolic_size(batch)
        self._kept: KeptGraph | None = None
        self._inference_bytes: int | None = None
        self._has_warned = False
        called_with = _called_with(inputs, static)
        self._difference = session.watch.lowers(self.step.frame, called_with, session.frames)
        session.observed.interrupted()

    def find_kept(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> KeptGraph | None:
        """The place where the compiled graph is kept; None: it cannot be kept."""
        session = self._session
        alone = not session.frames and self.step.times == 1 and session.reading.leaves is None
        if alone and not (self._symbols or session.options.debug or self.log.is_on):
            ctx = self._context
            self._kept = kept_graphs.find(gm, inputs, self._static, ctx, session.passes)
        return self._kept

    def take_if_found(self) -> None:
        """Note what the record says, if AOTAutograd has found the graph and nothing was lowered."""
        is_lowered = self.step.timelines or self._inference_bytes is not None
        if self._kept is not None and not is_lowered:
            assert self._kept.record is not None  # AOTAutograd's key has its token
            self._take(self._kept.record)

    def _keep(self) -> None:
        """Keep what lowering noted, of both phases; AOTAutograd keeps the graph then, too."""
        step = self.step
        if self._kept is None or self._has_warned:
            return
        phases = {
            phase.value: KeptPhase(
                timeline, rows_of(step.skeletons[phase]), tuple(step.ranges.of[phase])
            )
            for phase, timeline in step.timelines.items()
        }
        self._kept.keep(
            Record(
                token=self._kept.token,
                phases=phases,
                inference_bytes=self._inference_bytes,
                gathered=self.gathered,
                parameters=tuple(sorted(step.parameters)),
                model_groups=tuple(self._session.model_groups),
                returned_bytes=step.returned_bytes,
                kept_bytes=step.kept_bytes,
                sent=self._sent.lines,
            )
        )

    def _take(self, record: Record) -> None:
        session, step = self._session, self.step
        self.gathered, self._sent = record.gathered, Sent((), self._symbols, record.sent)
        step.parameters = frozenset(record.parameters)
        step.returned_bytes, step.kept_bytes = record.returned_bytes, record.kept_bytes
        known = session.model_groups
        known += [name for name in record.model_groups if name not in known]
        for name, one in record.phases.items():
            self._note(Phase(name), one.timeline, of_rows(one.skeleton), one.ranges)
        if record.inference_bytes is not None:
            warn.above_limit(
                session, step, Phase.INFERENCE, record.inference_bytes, self._difference
            )

    def _note(
        self, phase: Phase, timeline: Timeline, skeleton: fx.Graph, ranges: Sequence[Range]
    ) -> None:
        """Note a lowered forward or backward for timers, watches, profilers and reports."""
        session, step = self._session, self.step
        step.skeletons[phase], step.ranges.of[phase] = skeleton, ranges
        session.observed.compiled(step, phase, timeline)
        others_bytes = timeline.base.get(OTHER_FRAMES, 0)
        session.watch.runs(timeline.peak_bytes - timeline.base_bytes + others_bytes)
        warn.above_limit(session, step, phase, timeline.peak_bytes, self._difference)

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Partition a joint graph into forward and backward, and run the passes before lowering."""
        refuse_written_reads()
        session, step = self._session, self.step
        _mark(joint, self._static, self._parameters, Phase.FORWARD)
        joint = run(self.log.passes, Stage.JOINT, joint, self._context, self._watch)
        for name in (name for node in joint.graph.nodes for name in groups_named(node)):
            if name not in session.model_groups:
                session.model_groups.append(name)
        forward, backward = partitioned(joint, joint_inputs, **kwargs)
        _mark_kept(forward, backward)
        step.parameters = frozenset(unshard_of(node).name for node in unshards(forward.graph))
        self.gathered = gathered_in(forward.graph), gathered_in(backward.graph)
        warn.of_rows_at_once(forward, step.parameters, session)
        both = step_module(forward, backward)
        both = run(self.log.passes, Stage.STEP, both, self._context, self._watch)
        missing = NOT_RECOMPUTED.get(both, [])
        self._has_warned |= bool(missing or NOT_CHUNKED.get(both, {}))
        warn.of_not_recomputed(forward, missing, session)
        forward, backward = graphs_of(both)
        self._sends([forward, backward], NOT_MOVED.get(both, {}))
        warn.of_whole_tokens(NOT_CHUNKED.get(both, {}))
        step.returned_bytes = returned_bytes(forward.graph, backward.graph)
        own_bytes = output_bytes(forward.graph, backward.graph)
        self._gradient_buffer_bytes = self._context.gradient_buffers * own_bytes
        return forward, backward

    def compile_part(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Any:
        """Lower and compile a forward, a backward, or a graph for inference."""
        session, step = self._session, self.step
        phase = Phase.BACKWARD if kwargs.get("is_backward") else Phase.FORWARD
        if kwargs.get("is_inference"):
            phase = Phase.INFERENCE
        _mark(graph, self._static, self._parameters, phase)
        ctx = self._context.replace(phase=phase)
        others_bytes = _held_by_other_frames(graph, session, step, phase)
        others_bytes += self._held_by_alike_frames(graph, ctx)
        others_bytes += self._held_by_calls_in_flight(graph, ctx)
        held_bytes = others_bytes + (step.returned_bytes if phase is Phase.BACKWARD else 0)
        ctx = ctx.replace(base_bytes=ctx.base_bytes + held_bytes)
        if phase is Phase.INFERENCE:
            refuse_written_reads()
            graph = run(self.log.passes, Stage.JOINT, graph, ctx, self._watch)
            read = frozenset(unshard_of(node).name for node in unshards(graph.graph))
            self.gathered = gathered_in(graph.graph), ()
        graph = run(self.log.passes, Stage.PARTS, graph, ctx, self._watch)
        if phase is Phase.INFERENCE:
            step.parameters = read
            self._sends([graph], NOT_MOVED.get(graph, {}))
            self._has_warned |= bool(NOT_CHUNKED.get(graph, {}))
            warn.of_whole_tokens(NOT_CHUNKED.get(graph, {}))
        self._look_at(graph, ctx, others_bytes)
        if self._symbols and phase in step.timelines:
            alive = {one.name for one in step.timelines[phase].peak_buffers}
            growing = GrowingPeak(graph.graph, alive, self._growing, self._symbols)
            step.growing[phase] = growing
        for key in MODULE_KEYS:
            key.pop(graph)  # Inductor's cache key covers everything in a graph
        with in_place(), self._without_token():
            given = _torch.inductor.real_meshes(example_inputs)
            compiled = self._compile_inner(graph, given, **kwargs)
        if phase is not Phase.FORWARD:
            self._keep()
        return compiled

    def _without_token(self) -> AbstractContextManager[None]:
        """A context in which Inductor's key of a lowered graph has no token.

        That graph says everything.
        """
        plain = _torch.aot_autograd.Partitioner(self.partition)
        return _torch.inductor.with_settings({"custom_partitioner_fn": plain})

    def _look_at(self, gm: fx.GraphModule, ctx: Context, others_bytes: int) -> None:
        """Simulate a lowered graph in its final order; note its timeline.

        ``others_bytes``: held by other frames and calls.
        """
        session, step = self._session, self.step
        base = base_parts(session)
        if others_bytes:
            base[OTHER_FRAMES] = others_bytes
        if session.reading.leaves is not None:
            # The room is for the gradients of two backwards; the graph itself holds those of one.
            own_bytes = ctx.accumulated_bytes // 2
            ctx = ctx.replace(base_bytes=ctx.base_bytes - own_bytes)
            base["accumulated"] = own_bytes
        is_backward = ctx.phase is Phase.BACKWARD
        if is_backward:
            base["returned"] = step.returned_bytes
        simulation = simulate(gm.graph, idle_seconds=step.idle_seconds if is_backward else 0.0)
        described = functools.partial(
            timeline_of, gm.graph, simulation, phase=ctx.phase.value, base=base
        )
        if ctx.phase is Phase.INFERENCE:
            self.log.schedule(ctx.phase.value, described)
            peak_bytes = self._inference_bytes = ctx.base_bytes + simulation.peak_bytes
            warn.above_limit(session, step, ctx.phase, peak_bytes, self._difference)
            return
        if ctx.phase is Phase.FORWARD:
            step.kept_bytes = simulation.memory.kept_bytes
            step.idle_seconds = simulation.idle_seconds
        timeline = described()
        self.log.schedule(ctx.phase.value, lambda: timeline)
        self._note(ctx.phase, timeline, skeleton_of(gm.graph), ranges_of(gm.graph, timeline))

    def _held_by_alike_frames(self, graph: fx.GraphModule, ctx: Context) -> int:
        """More bytes of other frames in that run of the shared code in which they hold the most.

        A frame keeps tensors for its backward, and in later backwards its gradients.
        """
        step, session = self.step, self._session
        before = [one.frame for one in session.observed.before(step.frame)]
        more = step.times - 1 - before.count(step.frame)
        if ctx.limit_bytes is None or ctx.phase is Phase.INFERENCE or more <= 0:
            return 0
        if ctx.phase is Phase.BACKWARD:
            return more * max(0, step.kept_bytes - _gradient_bytes(session, step.parameters))
        return more * kept_bytes_of(graph, ctx, self.log.passes)

    def _held_by_calls_in_flight(self, graph: fx.GraphModule, ctx: Context) -> int:
        """Bytes of calls whose backward is still to come, beside this one, and their gradients."""
        if ctx.phase is Phase.INFERENCE:
            return 0
        buffer_bytes, returned = self._gradient_buffer_bytes, self.step.returned_bytes
        if ctx.phase is Phase.BACKWARD:
            return buffer_bytes + (ctx.calls_in_flight - 1) * (self.step.kept_bytes + returned)
        return buffer_bytes + in_flight_bytes(graph, returned, ctx, self.log.passes)

    def key(self, args: Sequence[Any]) -> int:
        """A number for the tokens that a call sends (``osdp_compile/lowering/agreeing.py``)."""
        return self._sent.key(args, self._session.context.rank)

    def _sends(self, graphs: Sequence[fx.GraphModule], refused: Mapping[str, str]) -> None:
        """Remember what the graphs send; warn of weights that they gather all the same."""
        self._sent = Sent((gm.graph for gm in graphs), self._symbols)
        self._has_warned |= bool(refused)
        warn.of_weights_that_travel(refused)


def _called_with(inputs: Sequence[Any], static: dict[int, str]) -> tuple[GraphInput, ...]:
    """The tensor inputs of a graph, without parameters and buffers."""
    return tuple(
        GraphInput(
            tuple(size if isinstance(size, int) else -1 for size in value.shape),
            value.requires_grad,
        )
        for index, value in enumerate(inputs)
        if static[index] == "batch" and isinstance(value, torch.Tensor)
    )


def _held_by_other_frames(
    gm: fx.GraphModule, session: Session, step: CompiledStep, phase: Phase
) -> int:
    """Bytes of other frames of the current step: saved for their backwards, and gradients.

    In a backward they include the incoming gradients, which autograd holds until it ends, and
    the gradients from later frames: their backwards run first. A step of one graph has none.
    """
    if not session.frames or phase is Phase.INFERENCE:
        return 0
    before = session.observed.before(step.frame)
    held_bytes = sum(one.kept_bytes for one in before)
    if phase is Phase.BACKWARD:
        earlier = step.parameters.union(*(one.parameters for one in before))
        later = {one.name for one in session.context.parameters} - earlier
        held_bytes += _gradient_bytes(session, later)
        held_bytes += sum(
            bytes_of(node.meta["val"])
            for node in gm.graph.find_nodes(op="placeholder")
            if node.name.startswith("tangents")
        )
    return held_bytes


def _gradient_bytes(session: Session, names: Collection[str]) -> int:
    """Bytes of the gradients of some parameters on this rank."""
    ctx = session.context
    return sum(
        shard_bytes(ctx, session.plan, one)
        for one in ctx.parameters
        if one.requires_grad and one.name in names
    )


def _mark_kept(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Mark the backward's inputs that are gathered weights, not activations."""
    gathered = {node.name: unshard_of(node).name for node in unshards(forward.graph)}
    for node in backward.graph.find_nodes(op="placeholder"):
        name = SAVES.get(node, node.name)
        if name in gathered:
            GATHERED.set(node, gathered[name])


def _mark(
    gm: fx.GraphModule, static: dict[int, str], parameters: frozenset[str], phase: Phase
) -> None:
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        index = _torch.aot_autograd.input_index(node)
        names.append(static.get(index) if index is not None else None)
    mark_inputs(gm, names, parameters, phase)


def _observer(session: Session, observe: Observer | None, graph_log: GraphLog) -> Observer:
    debug = session.options.debug
    folder = debug if isinstance(debug, Path) else None
    counts: dict[str, int] = {}

    def watch(one: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        if debug:
            check(gm, one.name)
        if folder is not None and ctx.rank == 0:
            write(folder, one, gm, ctx, counts)
        graph_log.after(one, gm, ctx)
        if observe is not None:
            observe(one, gm, ctx)

    return watch


def write(
    folder: Path, one: Pass, gm: fx.GraphModule, ctx: Context, counts: dict[str, int]
) -> None:
    """Write the graph after a pass to ``00-forward-shard.txt``; files are numbered in order."""
    folder.mkdir(parents=True, exist_ok=True)
    number = counts.setdefault("files", 0)
    counts["files"] += 1
    name = f"{number:02d}-{graph_name(one, ctx)}-{one.name}.txt"
    (folder / name).write_text(graph_text(gm, ctx))

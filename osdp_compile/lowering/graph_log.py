"""Log lines and trace artifacts of a graph's lowering, for ``TORCH_LOGS`` and ``TORCH_TRACE``.

At DEBUG rank 0 logs a line for each pass, and the schedule. With ``TORCH_TRACE`` every rank writes
the plan, the graph after each pass, and the schedule into torch's structured log. tlparse shows
them as files under the id of the compilation. Otherwise nothing is computed.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from torch import fx

from osdp_compile import _torch
from osdp_compile.log_lines import is_rank_zero
from osdp_compile.reports.plan_table import plan_text
from osdp_compile.reports.schedule_text import schedule_text
from passes.graph.printer import graph_text
from passes.graph.step_module import graphs_of
from passes.pipeline import Pass, Stage, graph_name
from passes.simulate.timeline import Timeline
from passes.types.context import Context
from passes.types.plan import Plan
from passes.types.units import format_seconds

log = logging.getLogger("osdp_compile")
#: Columns of the plan's table in an artifact: the same on every terminal.
_WIDTH = 160


class GraphLog:
    """The log of one graph's lowering.

    ``passes``: the passes to run. At DEBUG each logs its nodes and seconds.
    """

    def __init__(
        self, plan: Plan, passes: Sequence[Pass], gathers_for: GraphLog | None = None
    ) -> None:
        """``gathers_for``: that of a graph of which this one gathers all weights, in a later call.

        The names of its artifacts then start with ``osdp_gathers_all``.
        """
        self._logs = is_rank_zero() and log.isEnabledFor(logging.DEBUG)
        self._traces = _torch.logs.is_traced()
        self._start = "osdp_" if gathers_for is None else "osdp_gathers_all_"
        self._compiled: _torch.dynamo.CompileId | None = _torch.dynamo.compile_id()
        if gathers_for is not None:
            self._compiled = gathers_for._compiled
        self._numbers = {one.name: number for number, one in enumerate(passes)}
        self.passes = tuple(map(_logged, passes)) if self._logs else tuple(passes)
        self._artifact("plan", plan.to_json, "json")
        self._artifact("plan_table", lambda: plan_text(plan, width=_WIDTH))

    @property
    def is_on(self) -> bool:
        """Whether anything is logged or traced."""
        return self._logs or self._traces

    def after(self, one: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        """Trace the graph after a pass: ``osdp_forward_09_shard``, numbered as the passes are."""
        name = f"{graph_name(one, ctx)}_{self._numbers[one.name]:02d}_{one.name}"
        self._artifact(name, lambda: graph_text(gm, ctx))

    def schedule(self, phase: str, timeline: Callable[[], Timeline]) -> None:
        """Log and trace the schedule: ``osdp_forward_schedule``."""
        if not (self._logs or self._traces):
            return
        text = schedule_text(timeline())
        if self._logs:
            log.debug("%s", text)
        self._artifact(f"{phase}_schedule", lambda: text)

    def _artifact(self, name: str, payload: Callable[[], str], encoding: str = "string") -> None:
        if self._traces:
            _torch.logs.trace_artifact(self._start + name, encoding, payload, self._compiled)


def _logged(one: Pass) -> Pass:
    """The same pass, with a line at DEBUG for each run."""

    def function(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
        before, started = _nodes(one, gm), time.perf_counter()
        made = one.function(gm, ctx)
        seconds = time.perf_counter() - started
        log.debug(
            "%s, pass %s: %d nodes before, %d after, %s",
            "step" if one.stage is Stage.STEP else graph_name(one, ctx),
            one.name,
            before,
            _nodes(one, made),
            format_seconds(seconds),
        )
        return made

    return dataclasses.replace(one, function=function)


def _nodes(one: Pass, gm: fx.GraphModule) -> int:
    """The number of nodes of a pass's graph; of a step, of both graphs."""
    graphs = graphs_of(gm) if one.stage is Stage.STEP else (gm,)
    return sum(len(graph.graph.nodes) for graph in graphs)

"""Join frames: combine the graphs of a step with graph breaks into one forward and one backward.

Needs: the frames of one step in execution order, each captured with markers, and the tensors
that travel between them.
Leaves: one captured step. Every parameter is gathered once. Its gradients are added and reduced
once. A tensor that one frame gives to a later one is an edge. A tensor that several frames get is
one input. The joined step serves planning only and never runs: each frame is lowered by itself,
with its part of the plan (``Plan.order_for``).

Before::                                  After::

    def forward_0(p, x): return h, x          def forward(p, q, x):
    def forward_1(q, h): return y, h              h = ...; y = ...
                                                  return y, x, h
    def backward_1(h, dy): return dq, dh      def backward(x, h, dy):
    def backward_0(x, dh): return dp              dq, dh = ...; dp = ...
                                                  return dq, dp
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from passes._torch import FakeTensorMode
from passes.graph.captured import Captured
from passes.graph.fx_utils import bytes_of, concrete, hint, module_of, output_node
from passes.graph.metadata import LENT, OPERATOR_KEY, PARAMETER, SAVED, SAVES
from passes.graph.step_module import saved_count, saved_name
from passes.ops.markers import REDUCE_GRAD, UNSHARD, reduce_grad_of, set_args, unshard_of
from passes.recompute.recompute_activations import keys_of
from passes.simulate.lent import mark_lent

_ADD = torch.ops.aten.add.Tensor


@dataclasses.dataclass(frozen=True)
class FrameRun:
    """One run of a captured frame within a step, and the tensors at its borders.

    A tensor that travels between frames has the same number in all frames.

    ``names``: by parameter name of the capture, the name in this run (equal blocks share a graph).
    ``inputs``: by placeholder name of the forward, the number of its tensor.
    ``outputs``: by position in the forward's results, the number of a tensor for the caller.
    ``tangents``: by placeholder name of the backward, the number of the tensor of this gradient.
    ``gradients``: by position in the backward's results, the number of the tensor of this gradient.
    """

    captured: Captured
    names: Mapping[str, str]
    inputs: Mapping[str, int]
    outputs: Mapping[int, int]
    tangents: Mapping[str, int]
    gradients: Mapping[int, int]

    @property
    def saved_count(self) -> int:
        """Number of saved tensors: the last results of the forward."""
        return saved_count(self.captured.backward.graph)


def join_frames(runs: Sequence[FrameRun]) -> Captured:
    """Join the runs of one step into one captured step. See the module's docstring."""
    for one in runs:  # in the joined step, results of the early frames are not the caller's
        mark_lent(one.captured.forward.graph, one.captured.backward.graph)
    values = _Values()
    forward = _Forward(runs, values)
    backward = _Backward(runs, values, forward)
    return Captured(
        forward.module,
        backward.module,
        is_joined=len(runs) > 1,
        border_bytes=max(backward.given_bytes),
        runs=tuple(run.names for run in runs),
    )


class _Values:
    """Copies of the frames' node values in one fake tensor mode, with concrete sizes."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, tuple[Any, Any]] = {}  # holds the originals: their ids stay unique

    def of(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        if isinstance(value, torch.SymInt):
            return hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._known:
            shape, stride = concrete(value.shape), concrete(value.stride())
            with self.mode, torch.no_grad():
                made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
            self._known[id(value)] = value, made
        return self._known[id(value)][1]

    def like(self, value: torch.Tensor) -> torch.Tensor:
        with self.mode, torch.no_grad():
            return torch.empty_like(value)


class _Part:
    """A joined graph under construction: placeholders first, then the operators frame by frame."""

    def __init__(self, values: _Values) -> None:
        self.graph, self.owner, self.values = fx.Graph(), nn.Module(), values
        self._last_input: fx.Node | None = None
        self._gathered: dict[str, fx.Node] = {}

    def add_input(self, name: str, meta: Mapping[str, Any]) -> fx.Node:
        graph = self.graph
        last = self._last_input
        with graph.inserting_after(last) if last is not None else graph.inserting_before():
            self._last_input = graph.placeholder(name)
        self._last_input.meta = dict(meta)
        if "val" in meta:
            self._last_input.meta["val"] = self.values.of(meta["val"])
        return self._last_input

    def copy(
        self, node: fx.Node, nodes: Mapping[fx.Node, fx.Node], run: FrameRun, gm: fx.GraphModule
    ) -> fx.Node:
        """Copy a node of a frame. A parameter that an earlier frame gathered is not copied."""
        if node.target is UNSHARD:
            name = run.names[unshard_of(node).name]
            if name not in self._gathered:
                self._gathered[name] = self._copy(node, nodes)
                marker = self._gathered[name]
                set_args(marker, unshard_of(marker)._replace(name=name))
            return self._gathered[name]
        copied = self._copy(node, nodes)
        if node.target is REDUCE_GRAD:
            marked = reduce_grad_of(copied)
            set_args(copied, marked._replace(name=run.names[marked.name]))
        elif node.op == "get_attr":
            held: Any = gm
            for part in str(node.target).split("."):
                held = getattr(held, part)
            copied.target = f"{copied.name}_held"
            setattr(self.owner, copied.target, held)
        return copied

    def _copy(self, node: fx.Node, nodes: Mapping[fx.Node, fx.Node]) -> fx.Node:
        copied = self.graph.node_copy(node, nodes.__getitem__)
        if "val" in node.meta:
            copied.meta["val"] = self.values.of(node.meta["val"])
        return copied

    def ended(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        return module_of(self.owner, self.graph)


class _Forward:
    """The joined forward.

    ``nodes``: by run, the joined node of each node of the run's forward.
    ``saved``: the tensors that it saves for the backward, each once.
    """

    def __init__(self, runs: Sequence[FrameRun], values: _Values) -> None:
        self.part = _Part(values)
        self.nodes: list[dict[fx.Node, fx.Node]] = []
        self.saved: dict[fx.Node, None] = {}
        self._parameters: dict[str, fx.Node] = {}
        self._given: dict[int, fx.Node] = {}  # by number, tensors that no frame makes
        self._made: dict[int, fx.Node] = {}  # by number, results of frames for their callers
        self._returned: dict[int, fx.Node] = {}  # of these, the ones that no later frame reads
        for run in runs:
            self._add(run)
        returned = list(dict.fromkeys(self._returned.values()))
        self.module = self.part.ended([*returned, *self.saved])

    def _add(self, run: FrameRun) -> None:
        gm = run.captured.forward
        keys = keys_of(gm.graph)
        nodes: dict[fx.Node, fx.Node] = {}
        self.nodes.append(nodes)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                nodes[node] = self._input(node, run)
            elif node.op != "output":
                nodes[node] = self.part.copy(node, nodes, run, gm)
                if node in keys:
                    OPERATOR_KEY.set(nodes[node], keys[node])
        results: Sequence[Any] = output_node(gm.graph).args[0]  # type: ignore[assignment]
        first_saved = len(results) - run.saved_count
        for position, result in enumerate(results):
            if not isinstance(result, fx.Node):
                continue
            if position >= first_saved:
                self.saved[nodes[result]] = None
            elif position in run.outputs:
                self._made[run.outputs[position]] = nodes[result]
                self._returned[run.outputs[position]] = nodes[result]

    def _input(self, node: fx.Node, run: FrameRun) -> fx.Node:
        if PARAMETER.is_set(node):
            name = run.names[PARAMETER.of(node)]
            if name not in self._parameters:
                self._parameters[name] = made = self.part.add_input(node.name, node.meta)
                PARAMETER.set(made, name)
            return self._parameters[name]
        number = run.inputs.get(node.name)
        if number is not None and number in self._made:
            self._returned.pop(number, None)
            return self._made[number]
        if number is None:
            return self.part.add_input(node.name, node.meta)
        if number not in self._given:
            self._given[number] = self.part.add_input(node.name, node.meta)
        return self._given[number]


class _Backward:
    """The joined backward. The backward of the last frame comes first.

    ``given_bytes``: by run, bytes of the gradients that it gets from later frames.
    """

    def __init__(self, runs: Sequence[FrameRun], values: _Values, forward: _Forward) -> None:
        self.part = _Part(values)
        self._given = {node: self.part.add_input(node.name, node.meta) for node in forward.saved}
        for node, given in self._given.items():
            SAVED.set(given, SAVED.get(node, node.op != "placeholder"))
            SAVES.set(given, node.name)
        self._gradients: dict[int, fx.Node] = {}  # by number, of tensors that travel
        self._reduced: dict[str, fx.Node] = {}
        self._returned: dict[fx.Node, None] = {}
        self._tangents = 0
        self.given_bytes = [0] * len(runs)
        made: set[int] = set()
        made_before: list[frozenset[int]] = []
        for run in runs:
            made_before.append(frozenset(made))
            made.update(run.outputs.values())
        for index in reversed(range(len(runs))):
            origins = {node.name: own for node, own in forward.nodes[index].items()}
            self._add(index, runs[index], origins, made_before[index])
        self.module = self.part.ended(list(self._returned))

    def _add(
        self, index: int, run: FrameRun, origins: Mapping[str, fx.Node], before: frozenset[int]
    ) -> None:
        """Add the backward of a run.

        ``before``: numbers of the tensors that earlier frames make.
        """
        gm = run.captured.backward
        nodes: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            origin = origins.get(saved_name(node))
            if node.op == "placeholder":
                nodes[node] = self._input(node, run, origin)
                if nodes[node] in self._gradients.values():
                    self.given_bytes[index] += bytes_of(nodes[node].meta["val"])
            elif node.op != "output":
                nodes[node] = copied = self.part.copy(node, nodes, run, gm)
                SAVES.set(copied, origin.name if origin is not None else "")
                if node.target is REDUCE_GRAD:
                    self._reduce_once(copied)
        results: Sequence[Any] = output_node(gm.graph).args[0]  # type: ignore[assignment]
        for position, result in enumerate(results):
            if not isinstance(result, fx.Node):
                continue
            number = run.gradients.get(position)
            if number is None or number not in before:
                self._returned[nodes[result]] = None
            elif number in self._gradients:
                self._gradients[number] = self._sum(self._gradients[number], nodes[result])
            else:
                self._gradients[number] = nodes[result]

    def _input(self, node: fx.Node, run: FrameRun, origin: fx.Node | None) -> fx.Node:
        if origin is not None and origin in self._given:
            given = self._given[origin]
            if LENT.is_set(node):
                LENT.set(given, True)
            return given
        number = run.tangents.get(node.name)
        if number is not None and number in self._gradients:
            return self._gradients[number]
        self._tangents += 1
        given = self.part.add_input(f"tangents_{self._tangents}", node.meta)
        SAVES.set(given, "")
        return given

    def _reduce_once(self, node: fx.Node) -> None:
        """Reduce the sum of a parameter's gradients after the last of them."""
        marker = reduce_grad_of(node)
        name = marker.name
        before = self._reduced.get(name)
        self._reduced[name] = node
        if before is None:
            return
        with self.part.graph.inserting_before(node):
            total = self._sum(reduce_grad_of(before).gradient, marker.gradient)
        set_args(node, marker._replace(gradient=total))
        before.replace_all_uses_with(node)
        self._returned.pop(before, None)
        self.part.graph.erase_node(before)

    def _sum(self, one: fx.Node, other: fx.Node) -> fx.Node:
        total = self.part.graph.call_function(_ADD, (one, other))
        total.meta["val"] = self.part.values.like(one.meta["val"])
        SAVES.set(total, "")
        return total

"""Fold layers: leave the inner ones of many equal layers out of a captured step.

Needs: a captured step with layers that are equal node by node.
Leaves: a captured step with the first and the last layers only.

The costs of the whole step follow from these few layers, so planning a model of a hundred layers
takes as long as planning one of six. Extra nodes hold the memory of the layers left out: their
saved activations, their kept gathered weights, and their gradients (:func:`put_in`). The seconds of
a layer left out are those between two equal neighbours (:func:`seconds_of`).

A step is folded if all inner layers are equal node by node, and each layer reads from its
neighbours only (``passes/capture/alike_layers.py``). The step may also be the trace of a model that
calls a few of its layers only (:func:`stretched`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Sequence

import torch
from torch import fx

from passes.annotate.annotate_costs import cost_of, stands_alone
from passes.annotate.flops import flops_of
from passes.annotate.training_state import shard_bytes
from passes.capture.alike_layers import (
    are_equal,
    descriptions,
    give_to_readers,
    layers_of,
    layers_of_nodes,
)
from passes.capture.layer_keys import layer_keys
from passes.graph.captured import Captured
from passes.graph.fx_utils import (
    bytes_of,
    copy_module,
    fake_mode_of,
    group_of,
    is_collective,
    is_model_collective,
    module_of,
    once,
    output_node,
    root_of,
)
from passes.graph.metadata import (
    ANCHOR,
    COLLECTIVE,
    GATHERED,
    GRADIENT_OF,
    LAYER,
    NOT_RECOMPUTED,
    OPERATOR_KEY,
    PARAMETER,
    RECOMPUTED,
    SAVED,
    STATIC,
)
from passes.graph.step_module import step_module
from passes.ops.markers import LEFT_OUT, REDUCE_GRAD, UNSHARD, reduce_grad_of, set_args
from passes.ops.slicing import TAKE_SLICE, parameter_of
from passes.recompute.recompute_activations import keys_of, recompute, recomputed
from passes.simulate.simulator import Simulation
from passes.types.context import Context, Parameter, Phase
from passes.types.plan import Plan

#: Number of layers that stay at the beginning, and at the end.
_ENDS = 3
#: Least number of layers for folding.
FEWEST_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class Folded:
    """A captured step without its inner layers.

    ``layers``: the parameter names of every layer in execution order; corresponding parameters are
    at the same place.
    ``inner``: the indices in ``layers`` of the layers left out.
    ``operators``: the keys (:func:`passes.recompute.recompute_activations.keys_of`) of the
    forward's operators in every layer except the first and the last; corresponding operators are
    at the same place.
    """

    captured: Captured
    layers: tuple[tuple[str, ...], ...]
    inner: range
    operators: tuple[tuple[str, ...], ...]

    def decisions(self, layer: int, plan: Plan) -> tuple[Hashable, ...]:
        """The decisions of a layer's parameters, with their slices, what moves and its chunks."""
        rows = (plan[name] for name in self.layers[layer])
        return tuple(
            (
                (row.decision, row.slices, row.along, row.kept_slices),
                (row.moves, row.dim, row.alone, row.chunks),
            )
            for row in rows
        )

    def is_like_before(self, layer: int, plan: Plan) -> bool:
        """Whether a layer left out has the decisions of the last layer before the gap.

        Otherwise it has those of the first layer after the gap.

        Raises:
            ValueError: it has neither.
        """
        own = self.decisions(layer, plan)
        if own == self.decisions(self.inner[0] - 1, plan):
            return True
        if own == self.decisions(self.inner[-1] + 1, plan):
            return False
        raise ValueError(
            f"layer {layer} of a folded step has other decisions than both layers "
            f"{self.inner[0] - 1} and {self.inner[-1] + 1}: it cannot be priced"
        )

    @functools.cached_property
    def alike(self) -> dict[str, tuple[str, ...]]:
        """By operator key, the keys of the corresponding operators of all layers."""
        return {key: own for own in zip(*self.operators, strict=True) for key in own}

    @functools.cached_property
    def left_out(self) -> frozenset[str]:
        """The names of the parameters left out."""
        return frozenset(name for layer in self.inner for name in self.layers[layer])

    @functools.cached_property
    def _gone(self) -> frozenset[str]:
        """The keys of the operators left out that no other layer has.

        Layers that are runs of one frame have the same keys.
        """
        first = self.inner[0] - 1  # the first and the last layer are not in ``operators``
        last = first + len(self.inner)
        kept = {key for own in (*self.operators[:first], *self.operators[last:]) for key in own}
        left_out = self.operators[first:last]
        return frozenset(key for own in left_out for key in own if key not in kept)

    @property
    def at_the_cut(self) -> tuple[int, int]:
        """The layers directly before and after the gap, numbered from 1 as in node metadata."""
        return self.inner[0], self.inner[-1] + 2

    @functools.cached_property
    def gap(self) -> tuple[int, int]:
        """The places of the last nodes before the gap, in the forward and in the backward."""
        before, behind = self.at_the_cut
        places = [
            next(place for place, node in enumerate(gm.graph.nodes) if _of_its_own(node) == layer)
            for gm, layer in ((self.captured.forward, behind), (self.captured.backward, before))
        ]
        return places[0] - 1, places[1] - 1

    def copies_of(self, node: fx.Node) -> int:
        """The nodes of the whole step that a node of this step stands for."""
        return 1 + len(self.inner) if LAYER.get(node) == self.at_the_cut[0] else 1

    def whole_nodes(self) -> int:
        """Number of nodes of the whole step."""
        graphs = (self.captured.forward.graph, self.captured.backward.graph)
        return sum(self.copies_of(node) for graph in graphs for node in graph.nodes)

    def without_inner(self, plan: Plan) -> Plan:
        """The plan without the recomputations of the layers left out."""
        gone = self._gone
        return plan.replace(
            recompute=tuple(key for key in plan.recompute if key not in gone),
            also_save=tuple(key for key in plan.also_save if key not in gone),
        )

    def layer_bytes(self, ctx: Context) -> int:
        """Bytes of one layer's parameters, unsharded."""
        return sum(ctx.parameter(name).full_bytes for name in self.layers[0])

    def representatives(self, plan: Plan) -> dict[str, str]:
        """For each parameter left out, the corresponding parameter of the layer that it equals."""
        found: dict[str, str] = {}
        for layer in self.inner:
            like = self.inner[0] - 1 if self.is_like_before(layer, plan) else self.inner[-1] + 1
            found.update(zip(self.layers[layer], self.layers[like], strict=True))
        return found


def fold(captured: Captured, parameters: Sequence[Parameter]) -> Folded | None:
    """Leave out the inner layers; None: too few layers, or layers that differ."""
    layers = layers_of(captured, parameters)
    if len(layers) < FEWEST_LAYERS:
        return None
    inner = range(_ENDS, len(layers) - _ENDS)
    number = {name: index + 1 for index, names in enumerate(layers) for name in names}
    saved_in: dict[str, int] = {}  # layers of forward nodes, by their names
    keys = keys_of(captured.forward.graph)
    operators: list[list[str]] = [[] for _ in layers]
    graphs: list[fx.GraphModule] = []
    for gm, phase in (
        (captured.forward, Phase.FORWARD),
        (captured.backward, Phase.BACKWARD),
    ):
        layer = layers_of_nodes(gm.graph, phase, number, saved_in, len(layers))
        if captured.is_joined:
            give_to_readers(gm.graph, layer)
        if phase is Phase.FORWARD:
            saved_in = {node.name: layer[node] for node in gm.graph.nodes}
            for node, key in keys.items():
                if layer[node]:
                    operators[layer[node] - 1].append(key)
        cut = _cut(gm, phase, layer, inner, number, keys)
        if cut is None:
            return None
        graphs.append(cut)
    forward, backward = graphs
    alike = tuple(map(tuple, operators[1:-1]))
    few = dataclasses.replace(captured, forward=forward, backward=backward, values={})
    return Folded(few, layers, inner, alike)


def _saved_bytes(forward: fx.Graph, number: int) -> int:
    """Bytes that the forward saves of one layer; views of one tensor count once."""
    roots = dict.fromkeys(map(_saved_root, output_node(forward).all_input_nodes))
    return sum(
        bytes_of(node.meta["val"])
        for node in roots
        if LAYER.get(node) == number and not STATIC.get(node) and node.target is not UNSHARD
    )


def _saved_root(node: fx.Node) -> fx.Node:
    """The tensor whose memory is saved; of a slice, the tensor that is saved in slices."""
    root = root_of(node)
    source = root.args[0] if root.target is TAKE_SLICE else root
    assert isinstance(source, fx.Node)
    return root_of(source)


def stretched(folded: Folded, prefix: str, count: int) -> Folded | None:
    """The folded step of ``count`` layers, from the trace of a few of them.

    ``folded``: of the trace, whose layers are the first and the last ones of the model, by name.
    It has the same graphs, with the layers' numbers and the keys of the whole step.
    ``prefix``: the name of the list of layers, with its dot.

    None: the trace has other layers, or other keys do not follow from its keys.
    """
    kept = len(folded.layers)
    ahead = kept // 2
    numbers = [*range(ahead), *range(count - kept + ahead, count)]
    template = [name.removeprefix(f"{prefix}0.") for name in folded.layers[0]]
    layers = tuple(tuple(f"{prefix}{n}.{name}" for name in template) for n in range(count))
    if folded.layers != tuple(layers[number] for number in numbers):
        return None
    keys = layer_keys(folded.operators, prefix, count)
    if keys is None:
        return None
    for gm in (folded.captured.forward, folded.captured.backward):
        for node in gm.graph.nodes:
            if LAYER.get(node, 0) > ahead:
                LAYER.set(node, LAYER.of(node) + count - kept)
            if OPERATOR_KEY.is_set(node):
                OPERATOR_KEY.set(node, keys.renamed(OPERATOR_KEY.of(node)))
    return dataclasses.replace(
        folded, layers=layers, inner=range(_ENDS, count - _ENDS), operators=keys.operators
    )


def _cut(
    gm: fx.GraphModule,
    phase: Phase,
    layer: dict[fx.Node, int],
    inner: range,
    number: dict[str, int],
    keys: dict[fx.Node, str],
) -> fx.GraphModule | None:
    """The graph without the inner layers; None: the layers differ."""
    members: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op != "output":
            members.setdefault(layer[node], []).append(node)
    place = {node: index for nodes in members.values() for index, node in enumerate(nodes)}
    before, behind = inner[0], inner[-1] + 2  # the layers at the gap, numbered from 1
    # All layers except the first and the last, where the step begins and ends.
    alike = range(2, max(number.values()))
    described = {
        index: descriptions(members.get(index, []), layer, place, number) for index in alike
    }
    if not are_equal(described, before, behind):
        return None
    source_layer = before if phase is Phase.FORWARD else behind
    left_in = {index for index in members if index <= before or index >= behind}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        if layer[node] not in left_in:
            node = members[source_layer][place[node]]
        return copies[node]

    anchor = _anchor(members[before])
    for node in gm.graph.nodes:
        if node.op == "output":
            kept = [
                one for one in node.args[0] if not isinstance(one, fx.Node) or layer[one] in left_in
            ]
            graph.output(tuple(copy_of(n) if isinstance(n, fx.Node) else n for n in kept))
            output_node(graph).meta = dict(node.meta)
        elif layer[node] in left_in:
            copies[node] = graph.node_copy(node, copy_of)
            _name_by_shard(copies[node])
            LAYER.set(copies[node], layer[node])
            ANCHOR.set(copies[node], layer[node] in alike and place[node] == anchor)
            if node in keys:
                OPERATOR_KEY.set(copies[node], keys[node])
    return module_of(gm, graph)


def _name_by_shard(node: fx.Node) -> None:
    """Give a ``reduce_grad`` the name of its shard, which may be of another layer than before.

    The gradient of a layer's first parameter is with the operators of the layer ahead of it.
    """
    if node.target is REDUCE_GRAD:
        mark = reduce_grad_of(node)
        set_args(node, mark._replace(name=PARAMETER.get(mark.shard, mark.name)))


def _anchor(nodes: Sequence[fx.Node]) -> int:
    """The place within a layer of the operator with the most FLOPs; the first one on a tie."""
    return max(range(len(nodes)), key=lambda index: (_flops(nodes[index]), -index))


def _flops(node: fx.Node) -> int:
    return flops_of(node) if stands_alone(node) else 0


def put_in(laid: Captured, folded: Folded, plan: Plan, ctx: Context) -> None:
    """Insert nodes that hold the memory of the layers left out.

    ``laid``: the folded step's graphs for this plan (:func:`passes.capture.captured_step.lay_out`).
    """
    owned = [ctx.parameter(name) for layer in folded.inner for name in folded.layers[layer]]
    before, behind = folded.at_the_cut
    saved = {
        "activations": _saved_bytes(laid.forward.graph, before) * len(folded.inner),
        "gathered": sum(round(plan[p.name].kept_share * p.full_bytes) for p in owned),
    }
    gradient_bytes = sum(shard_bytes(ctx, plan, p) for p in owned if p.requires_grad)
    forward, backward = laid.forward.graph, laid.backward.graph
    ends, begins = _end_before(forward, behind), _end_before(backward, before)
    inputs: list[fx.Node] = []
    last = list(backward.find_nodes(op="placeholder"))[-1]
    for kind, size_bytes in saved.items():
        ends = _held(forward, ends, size_bytes)
        with backward.inserting_after(last):
            last = backward.placeholder(f"left_out_{kind}")
        last.meta["val"] = ends.meta["val"]
        SAVED.set(last, True)
        inputs.append(last)
        if kind == "gathered":
            for node in (ends, last):
                GATHERED.set(node, "the layers left out")
        _return(forward, ends)
    # Each layer frees its saved tensors and allocates its gradients: all saved tensors and all
    # gradients are never alive together.
    freed = _held(backward, begins, 0, inputs)
    gradients = _held(backward, freed, gradient_bytes, [freed])
    GRADIENT_OF.set(gradients, "the layers left out")
    _return(backward, gradients)


def _end_before(graph: fx.Graph, layer: int) -> fx.Node:
    """The last node before the gap.

    ``layer``: the first layer that runs after the gap.
    """
    first: fx.Node = next(node for node in graph.nodes if _of_its_own(node) == layer)
    return first.prev


def _of_its_own(node: fx.Node) -> int | None:
    """The layer of a captured operator; None for a recomputed one and for other nodes."""
    own = node.op == "call_function" and not RECOMPUTED.is_set(node)
    return LAYER.get(node) if own else None


def _held(
    graph: fx.Graph, before: fx.Node, size_bytes: int, inputs: Sequence[fx.Node] = ()
) -> fx.Node:
    """Insert a node after ``before`` that holds ``size_bytes``."""
    with graph.inserting_after(before):
        node = graph.call_function(LEFT_OUT, tuple(inputs))
    with fake_mode_of(graph):
        node.meta["val"] = once(
            ("left out", size_bytes), lambda: torch.empty(size_bytes, dtype=torch.uint8)
        )
    return node


def _return(graph: fx.Graph, node: fx.Node) -> None:
    output = output_node(graph)
    output.args = ((*output.args[0], node),)  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Step time and compute time of one layer or of several."""

    step: float
    compute: float

    def times(self, count: int) -> Seconds:
        return Seconds(self.step * count, self.compute * count)

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.step + other.step, self.compute + other.compute)


def seconds_of(folded: Folded, plan: Plan, lowered: fx.Graph, simulation: Simulation) -> Seconds:
    """The seconds of the layers left out in one of the two graphs, lowered and simulated.

    A layer takes the time between the same operator of two neighbours with the same decisions, with
    the compute overhead of its own collectives in place of that of the collectives that start
    there: these may run ahead. It takes at least the time of its collectives on their network,
    because collectives that fall behind must be waited for in the end. If all four neighbours have
    the same decisions, the shorter of both times counts: the longer one holds a wait for what lies
    outside the layers, such as the gradient of the words.
    """
    like_before = sum(folded.is_like_before(layer, plan) for layer in folded.inner)
    anchors = _anchors(lowered)
    before, behind = folded.at_the_cut

    def of_layer(one: int, other: int, layer: int) -> Seconds:
        passed = _between(lowered, simulation, anchors[one], anchors[other])
        own = _collectives_of(lowered, folded.layers[layer - 1], layer)
        step = passed.step + own.overhead_seconds
        compute = passed.compute + own.overhead_seconds
        return Seconds(max(step, own.network_seconds), compute)

    at_before = of_layer(before - 1, before, before)
    at_behind = of_layer(behind, behind + 1, behind)
    around = (before - 1, before, behind, behind + 1)
    if len({folded.decisions(layer - 1, plan) for layer in around}) == 1:
        at_before = at_behind = min(at_before, at_behind, key=lambda one: one.step)
    like_behind = len(folded.inner) - like_before
    return at_before.times(like_before).plus(at_behind.times(like_behind))


def recomputes_regularly(folded: Folded, one: Plan, ctx: Context) -> bool:
    """Whether as many nodes are recomputed between two layers before the gap as after it.

    And whether the layers are recomputed one after the other, the last one first. From the step's
    input on, all layers are recomputed at once, and the step holds all of their tensors.
    Otherwise the layers at the ends do not represent the layers left out.

    ``one``: a plan; only its recomputation counts.
    """
    forward, backward = map(copy_module, (folded.captured.forward, folded.captured.backward))
    ctx = ctx.replace(plan=folded.without_inner(one))
    if NOT_RECOMPUTED.of(recompute(step_module(forward, backward), ctx)):
        return False
    copied = itertools.accumulate(RECOMPUTED.is_set(node) for node in backward.graph.nodes)
    until: dict[fx.Node, int] = dict(zip(backward.graph.nodes, copied, strict=True))
    anchors = _anchors(backward.graph)
    before, behind = folded.at_the_cut
    places: dict[int, int] = {}  # of the first copy of a layer's operators
    for place, node in enumerate(backward.graph.nodes):
        if RECOMPUTED.is_set(node):
            places.setdefault(LAYER.get(node, 0), place)
    at_once = behind in places and places.get(before, place) < places[behind]
    return not at_once and (
        until[anchors[before - 1]] - until[anchors[before]]
        == until[anchors[behind]] - until[anchors[behind + 1]]
    )


def recomputed_of(folded: Folded, backward: fx.Graph) -> tuple[int, float]:
    """Recomputed bytes, and their seconds, of a lowered backward and of the layers left out."""
    size_bytes, seconds = recomputed(backward.nodes)
    before, _ = folded.at_the_cut
    one = [node for node in backward.nodes if LAYER.get(node) == before]
    each_bytes, each_seconds = recomputed(one)
    count = len(folded.inner)
    return size_bytes + count * each_bytes, seconds + count * each_seconds


def _anchors(graph: fx.Graph) -> dict[int, fx.Node]:
    """By layer, the node by which the layer is timed."""
    return {LAYER.of(node): node for node in graph.nodes if _of_its_own(node) and ANCHOR.get(node)}


def _between(graph: fx.Graph, simulation: Simulation, one: fx.Node, other: fx.Node) -> Seconds:
    """The time between two nodes, and its compute part, without our collectives' overhead."""
    compute, overhead, inside = 0.0, 0.0, False
    for node in graph.nodes:
        if node in (one, other):
            if inside:
                break
            inside = True
        if inside:
            cost = cost_of(node)
            if is_collective(node):
                overhead += cost.compute_overhead_seconds
            else:
                waits = is_model_collective(node)
                compute += cost.compute_overhead_seconds if waits else cost.seconds
    step = abs(simulation.start[other] - simulation.start[one])
    return Seconds(step - overhead, compute)


@dataclasses.dataclass(frozen=True)
class _Collectives:
    """The collectives of one layer: seconds on the process group that they use longest, and of
    compute overhead (of ours only)."""

    network_seconds: float
    overhead_seconds: float


def _collectives_of(graph: fx.Graph, names: Sequence[str], layer: int) -> _Collectives:
    """The collectives of a layer; of a bucket, the share of the layer's parameters.

    The model's own collectives count for the groups whose links they use.

    ``names``: the layer's parameters. ``layer``: its number, from 1.
    """
    taken: dict[str, float] = {}
    overhead_seconds = 0.0
    own = set(names)
    for node in graph.nodes:
        cost = cost_of(node)
        if is_model_collective(node) and LAYER.get(node) == layer:
            for group in cost.beside:
                taken[group] = taken.get(group, 0.0) + cost.seconds
        elif is_collective(node):
            served = COLLECTIVE.of(node).names
            share = sum(parameter_of(name) in own for name in served) / len(served)
            group = group_of(node)
            taken[group] = taken.get(group, 0.0) + share * cost.seconds
            overhead_seconds += share * cost.compute_overhead_seconds
    return _Collectives(max(taken.values(), default=0.0), overhead_seconds)

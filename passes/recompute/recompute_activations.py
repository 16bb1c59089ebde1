"""Recompute: the backward recomputes chosen activations instead of reading saved ones.

Needs: a step module (``passes/graph/step_module.py``) with a forward and a backward from
AOTAutograd's partitioner, and markers.
Leaves: copies of the operators of the chosen tensors in the backward, each directly before its
first use. The forward does not return these tensors. ``NOT_RECOMPUTED`` of the step: the keys
without effect. This forward does not compute or save the tensor, or the backward cannot recompute
it.

Before::                              After::

    def forward(p, x):                    def forward(p, x):
        h = mm(x, w); g = gelu(h)             h = mm(x, w); g = gelu(h)
        return g, x, h                        return g, x
    def backward(x, h, dg):               def backward(x, dg):
        dh = gelu_backward(dg, h)             h = mm(x, w)
                                              dh = gelu_backward(dg, h)

A copy reads tensors that the backward has anyway: saved tensors, tensors that it already
recomputes, parameters (regathered or kept gathered by the plan) and other inputs of the step. It
also reads tensors that the plan saves in addition (``plan.also_save``). Example: the partitioner
saves the normalized tensor of a layer norm. Its recomputation without the network before it needs
the norm's input saved, which at the start of a layer is the layer's input.

Random operators, operators with side effects, collectives and tensors that the user's own
activation checkpointing saves are never recomputed.

The pass rewrites the two partitioned graphs instead of tagging the joint graph. The partitioner
minimises a cut, so the effect of a tag depends on the whole graph. The planner must know the
result of many choices without running the partitioner for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes._torch import CheckpointPolicy, OpOverload
from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import bytes_of, is_collective, is_getitem, output_node, root_of
from passes.graph.metadata import (
    GATHERED,
    NOT_RECOMPUTED,
    OPERATOR_KEY,
    RECOMPUTED,
    STATIC,
)
from passes.graph.module_path import module_path
from passes.graph.step_module import graphs_of, saved_input, saved_name
from passes.ops.markers import REDUCE_GRAD, UNSHARD, unshard_of
from passes.recompute.written_inputs import written_inputs
from passes.types.context import Context
from passes.types.plan import Plan

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_UNREPEATABLE_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def keys_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """A key for every operator of a forward: ``blocks.0.up:addmm:0``.

    The key names the calling module, the operator, and the number of such calls before. It is
    equal on all ranks, and with or without markers.
    """
    counts: Counter[str] = Counter()
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not UNSHARD:
            place = f"{module_path(node.meta.get('nn_module_stack'))}:{_operator(node.target)}"
            found[node] = OPERATOR_KEY.get(node, f"{place}:{counts[place]}")
            counts[place] += 1
    return found


def _operator(target: Any) -> str:
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__name__", target))
    return str(target).removeprefix("aten.").removesuffix(".default")


class PartitionBoundary:
    """The partition of a step: saved tensors, and tensors that the backward can recompute.

    ``saved``: the forward's saved nodes, each with the backward's placeholder.
    ``there``: the forward's nodes that the backward already recomputes, each with its copy.
    """

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        by_name = {node.name: node for node in forward.nodes if node.op != "output"}
        self.saved: dict[fx.Node, fx.Node] = {}
        self.there: dict[fx.Node, fx.Node] = {}
        for node in backward.nodes:
            origin = by_name.get(saved_name(node))
            if origin is None:
                continue
            if node.op == "placeholder":
                self.saved[origin] = node
            elif node.op == origin.op and node.target == origin.target:
                self.there[origin] = node
        self._written = written_inputs(forward)

    def chain(
        self, node: fx.Node, besides: Collection[fx.Node] = ()
    ) -> tuple[list[fx.Node], list[fx.Node]] | None:
        """The nodes that recompute a tensor, and the nodes that they read; None: not possible.

        The chain ends at tensors that are saved or already recomputed, at tensors to save in
        addition (``besides``), at parameters and at inputs of the step. It is not sorted.
        """
        found: dict[fx.Node, None] = {node: None}
        reads: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            one = stack.pop()
            if not is_repeatable(one):
                return None
            for source in one.all_input_nodes:
                if source in found or source in reads:
                    continue
                if (
                    source in self.saved
                    or source in self.there
                    or source in besides
                    or source.target is UNSHARD
                ):
                    reads[source] = None
                elif source.op == "placeholder":
                    if not STATIC.get(source) or source in self._written:
                        return None
                    reads[source] = None
                else:
                    found[source] = None
                    stack.append(source)
        return list(found), list(reads)


def is_repeatable(node: fx.Node) -> bool:
    """Whether a second run of an operator is allowed and gives the same result."""
    if node.op != "call_function" or node.target in (UNSHARD, REDUCE_GRAD) or is_collective(node):
        return False
    if is_getitem(node):
        return True
    if node.meta.get("recompute") in _SAVE:
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")  # symbolic sizes
    if target._schema.is_mutable or target.namespace.startswith(("_c10d", "c10d")):
        return False
    if any(tag in target.tags for tag in _UNREPEATABLE_TAGS):
        return False
    if str(target).startswith("prims.inductor_"):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return True
    return drops_nothing(target, node.args, node.kwargs)


def drops_nothing(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator has an argument ``dropout_p`` of 0, and so is not random."""
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            default = args[index] if index < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", default) == 0)
    return False


def recomputed(backward: Iterable[fx.Node]) -> tuple[int, float]:
    """Bytes of the tensors that an annotated backward recomputes by plan; seconds of all copies.

    ``backward``: its nodes, or some of them.
    """
    copies = [node for node in backward if RECOMPUTED.is_set(node)]
    roots = {root_of(node): None for node in copies if RECOMPUTED.of(node)}
    return (
        sum(bytes_of(root.meta["val"]) for root in roots),
        sum((cost_of(node).seconds for node in copies), 0.0),
    )


def recompute(step: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Rewrite the graphs of a step by the plan. See the module's docstring."""
    plan = ctx.plan
    NOT_RECOMPUTED.set(step, [])
    if plan.recompute:
        kept = frozenset(p.name for p in plan.parameters if p.keeps_gathered)
        NOT_RECOMPUTED.set(step, _Rewriting(*graphs_of(step), kept).run(plan))
    return step


def save_instead(output: fx.Node, first: int, saved: Sequence[fx.Node]) -> None:
    """Replace the tensors that a forward saves for the backward.

    ``first``: index of the first saved tensor among the forward's outputs.
    """
    returned: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
    described = output.meta.get("desc")
    if described is not None:  # descriptions of saved tensors carry numbers
        numbered = list(described[first:])
        while len(numbered) < len(saved):
            numbered.insert(0, type(numbered[0])(len(numbered)))
        output.meta["desc"] = [*described[:first], *numbered[: len(saved)]]
    output.args = ((*returned[:first], *saved),)


class _Rewriting:
    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, kept: Collection[str]
    ) -> None:
        #: Parameters whose gathered weight is saved if the backward reads it.
        self.kept = kept
        self.forward, self.backward = forward, backward
        self.cut = PartitionBoundary(forward.graph, backward.graph)
        self.besides: dict[fx.Node, None] = {}  # to save if a copy reads it
        # Newly saved nodes, as in PartitionBoundary.saved.
        self.now_saved: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.chosen: dict[fx.Node, str] = {}  # with its key
        nodes = backward.graph.nodes
        #: Newly saved tensors precede all other tensors, copies precede the operators.
        self.first_saved = next(n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))
        self.top = next(n for n in nodes if n.op != "placeholder")

    def run(self, plan: Plan) -> list[str]:
        by_key: dict[str, list[fx.Node]] = {}  # in a step of several frames, one per frame
        for node, key in keys_of(self.forward.graph).items():
            by_key.setdefault(key, []).append(node)
        missing = [key for key in plan.also_save if key not in by_key]
        self.besides = dict.fromkeys(node for key in plan.also_save for node in by_key.get(key, ()))
        chain: dict[fx.Node, None] = {}
        for key in dict.fromkeys(plan.recompute):
            saved = [node for node in by_key.get(key, ()) if node in self.cut.saved]
            found = {node: self.cut.chain(node, self.besides) for node in saved}
            if not any(found.values()):
                missing.append(key)
            for node, way in found.items():
                if way is not None:
                    self.chosen[node] = key
                    chain.update(dict.fromkeys(way[0]))
        self._copy(sorted(chain))  # fx nodes compare by their order in the graph
        self._sink()
        self._save_no_more()
        self.forward.recompile()
        self.backward.recompile()
        return missing

    def _copy(self, chain: list[fx.Node]) -> None:
        """Put copies at the top of the backward; their inputs may be below them until ``_sink``."""
        graph = self.backward.graph
        for node in chain:
            inputs = {one: self._in_backward(one) for one in node.all_input_nodes}
            with graph.inserting_before(self.top):
                copied = graph.node_copy(node, inputs.__getitem__)
            RECOMPUTED.set(copied, self.chosen.get(node, ""))
            self.copies[node] = copied
        for node in self.chosen:
            placeholder = self.cut.saved[node]
            placeholder.replace_all_uses_with(self.copies[node])
            graph.erase_node(placeholder)

    def _in_backward(self, node: fx.Node) -> fx.Node:
        """The node of the backward for a node of the forward; saves or regathers it if needed."""
        for known in (self.copies, self.now_saved, self.cut.there):
            if node in known:
                return known[node]
        if node in self.cut.saved and node not in self.chosen:
            return self.cut.saved[node]
        if node.op == "placeholder" or node in self.besides or unshard_of(node).name in self.kept:
            return self._save(node)
        graph = self.backward.graph  # a second gather
        shard = self._in_backward(unshard_of(node).shard)
        with graph.inserting_before(self.top):
            gathered = graph.node_copy(node, lambda _: shard)
        self.copies[node] = gathered
        return gathered

    def _save(self, node: fx.Node) -> fx.Node:
        """Save a node of the forward: a new placeholder before the backward's other tensors."""
        graph = self.backward.graph
        with graph.inserting_before(self.first_saved):
            saved = saved_input(graph, node)
        saved.meta = {**node.meta, **saved.meta}
        if node.target is UNSHARD:
            GATHERED.set(saved, unshard_of(node).name)
        self.now_saved[node] = saved
        return saved

    def _sink(self) -> None:
        """Move every copy, and earlier recomputed nodes that it reads, before the first use."""
        moved = {**self.copies, **self.cut.there}
        for origin in sorted(moved, reverse=True):
            node = moved[origin]
            first = min(node.users)
            if origin in self.copies or first < node:
                first.prepend(node)
        for origin in sorted(self.copies):
            if is_getitem(origin):  # all results exist at once
                source = self.copies[origin].args[0]
                assert isinstance(source, fx.Node)
                source.append(self.copies[origin])

    def _save_no_more(self) -> None:
        """Remove recomputed tensors from the forward's outputs, and add newly saved tensors."""
        output = output_node(self.forward.graph)
        returned = list(output.args[0])  # type: ignore[arg-type]
        first = len(returned) - len(self.cut.saved)
        if set(returned[first:]) != set(self.cut.saved):
            raise ValueError("the last outputs of the forward are not the inputs of the backward")
        still = (node for node in returned[first:] if node not in self.chosen)
        save_instead(output, first, [*self.now_saved, *still])
        unused = list(self.chosen)
        while unused:
            node = unused.pop()
            if not node.users and node.op == "call_function":
                unused.extend(node.all_input_nodes)
                self.forward.graph.erase_node(node)

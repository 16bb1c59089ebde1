"""Recompute: what the forward saves for the backward, and the backward can compute again instead.

Needs: a forward and a backward that AOTAutograd's partitioner has cut, with markers.
Leaves: the backward with copies of the operators that make the chosen tensors, each right before
its first use there; the forward no longer returns those tensors.

Before::                              After::

    def forward(p, x):                    def forward(p, x):
        h = mm(x, w); g = gelu(h)             h = mm(x, w); g = gelu(h)
        return g, x, h                        return g, x
    def backward(x, h, dg):               def backward(x, dg):
        dh = gelu_backward(dg, h)             h = mm(x, w)
                                              dh = gelu_backward(dg, h)

A copy reads what the backward has anyway: tensors that stay saved, what it recomputes already,
parameters (gathered again or kept as the plan says) and other inputs of the step; and what the
plan says should be saved besides. (Of a layer norm the partitioner saves the normalized tensor.
To compute that again without the whole network before it, save what is normalized instead: where
layers begin, that is the layer's input.) Nothing random,
nothing with an effect, no collective and nothing that the user's own activation checkpointing
wants saved is computed twice.

This is done to the two cut graphs and not by tags on the joint one: the partitioner minimises a
cut, and what it makes of a tag depends on all the rest, whereas the planner must know what it
will get, for many choices, without asking the partitioner each time.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from passes._torch import CheckpointPolicy, InputMutationAOTOutput
from passes.annotate.annotate_costs import cost_of
from passes.graph.fx_utils import bytes_of, is_collective, is_getitem, output_node, root_of
from passes.graph.metadata import KEY, RECOMPUTED, SAVED, SAVES, STATIC
from passes.ops.markers import REDUCE_GRAD, UNSHARD
from passes.types.plan import Plan

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_UNREPEATABLE_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def keys_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every operator of a forward: ``blocks.0.up:addmm:0``.

    The module that calls it, the operator, and how many such came before. It is the same
    whether parameters are read as they are or through markers, and on every rank.
    """
    counts: Counter[str] = Counter()
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not UNSHARD:
            place = f"{_module_of(node)}:{_operator(node.target)}"
            found[node] = node.meta.get(KEY, f"{place}:{counts[place]}")
            counts[place] += 1
    return found


def _module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return _path(str(next(reversed(stack.values()))[0])) if stack else ""


@functools.lru_cache(maxsize=4096)
def _path(expression: str) -> str:
    """``L['self']._modules['blocks']._modules['0'].up`` as ``blocks.0.up``.

    Without what the model itself is called where it is called.
    """
    parts = re.findall(r"\['?(\w+)'?\]|\.(\w+)", re.sub(r"^[LG]\['\w+'\]", "", expression))
    names = (one or other for one, other in parts)
    return ".".join(name for name in names if name != "_modules")


def _operator(target: Any) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    return str(target).removeprefix("aten.").removesuffix(".default")


class PartitionBoundary:
    """How a step was cut: what the backward is given, and what it can make of that.

    ``saved``: the forward's nodes that are saved, each with the backward's placeholder.
    ``there``: the forward's nodes that the backward computes again already, each with its copy.
    """

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        by_name = {node.name: node for node in forward.nodes if node.op != "output"}
        self.saved: dict[fx.Node, fx.Node] = {}
        self.there: dict[fx.Node, fx.Node] = {}
        for node in backward.nodes:
            origin = by_name.get(node.meta.get(SAVES, node.name))
            if origin is None:
                continue
            if node.op == "placeholder":
                self.saved[origin] = node
            elif node.op == origin.op and node.target == origin.target:
                self.there[origin] = node
        self._written = _written(forward)

    def chain(
        self, node: fx.Node, besides: Collection[fx.Node] = ()
    ) -> tuple[list[fx.Node], list[fx.Node]] | None:
        """What must run to have a tensor again, and what that reads; None: it cannot be.

        The chain goes back to the nearest tensors that are saved, or are to be saved
        ``besides``, that are there, or are the step's inputs; it is in no order.
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
                    if not source.meta.get(STATIC) or source in self._written:
                        return None
                    reads[source] = None
                else:
                    found[source] = None
                    stack.append(source)
        return list(found), list(reads)


def _written(forward: fx.Graph) -> set[fx.Node]:
    """The inputs that the step writes: in the backward they are no longer what they were."""
    inputs = forward.find_nodes(op="placeholder")
    described = output_node(forward).meta.get("desc") or ()
    later = [one.mutated_input for one in described if isinstance(one, InputMutationAOTOutput)]
    return {node for node in inputs if node.meta.get("desc") in later} | {
        node.args[0]
        for node in forward.nodes
        if node.op == "call_function" and node.args and _writes(node.target)
    }


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def is_repeatable(node: fx.Node) -> bool:
    """Whether an operator gives the same when it runs a second time, and may do so."""
    if node.op != "call_function" or node.target in (UNSHARD, REDUCE_GRAD) or is_collective(node):
        return False
    if is_getitem(node):
        return True
    if node.meta.get("recompute") in _SAVE:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", None) in ("_operator", "math")  # of symbolic sizes
    if target._schema.is_mutable or target.namespace.startswith(("_c10d", "c10d")):
        return False
    if any(tag in target.tags for tag in _UNREPEATABLE_TAGS):
        return False
    if str(target).startswith("prims.inductor_"):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return True
    return drops_nothing(target, node.args, node.kwargs)


def drops_nothing(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an operator that may drop some of its inputs at random is told not to."""
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            default = args[index] if index < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", default) == 0)
    return False


def recomputed(backward: Iterable[fx.Node]) -> tuple[int, float]:
    """Bytes of what an annotated backward was not given but computes again, and the seconds.

    ``backward``: its nodes, or some of them.
    """
    copies = [node for node in backward if RECOMPUTED in node.meta]
    roots = {root_of(node): None for node in copies if node.meta[RECOMPUTED]}
    return (
        sum(bytes_of(root.meta["val"]) for root in roots),
        sum(cost_of(node).seconds for node in copies),
    )


def recompute(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    plan: Plan,
    kept: Collection[str] = (),
) -> list[str]:
    """Rewrite both graphs as the plan says. See the module's docstring.

    ``kept``: the parameters whose gathered weight is saved if the backward reads it.

    Returns the keys of what this forward does not have or not save, or the backward could not
    compute: for these nothing was done.
    """
    if not plan.recompute:
        return []
    return _Rewriting(forward, backward, kept).run(plan)


def save_instead(output: fx.Node, first: int, saved: Sequence[fx.Node]) -> None:
    """Have a forward return other tensors for the backward.

    ``first``: of what it returns, the first that is not its caller's.
    """
    returned: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
    described = output.meta.get("desc")
    if described is not None:  # what is saved is numbered
        numbered = list(described[first:])
        while len(numbered) < len(saved):
            numbered.insert(0, type(numbered[0])(len(numbered)))
        output.meta["desc"] = [*described[:first], *numbered[: len(saved)]]
    output.args = ((*returned[:first], *saved),)


class _Rewriting:
    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule, kept: Collection[str]
    ) -> None:
        self.forward, self.backward, self.kept = forward, backward, kept
        self.cut = PartitionBoundary(forward.graph, backward.graph)
        self.besides: dict[fx.Node, None] = {}  # to be saved where it is read
        # As PartitionBoundary.saved; a node is in it that was not saved before.
        self.now_saved: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.chosen: dict[fx.Node, str] = {}  # and its key
        nodes = backward.graph.nodes
        #: What is saved besides stands before the other tensors, copies before the operators.
        self.first_saved = next(n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor))
        self.top = next(n for n in nodes if n.op != "placeholder")

    def run(self, plan: Plan) -> list[str]:
        by_key: dict[str, list[fx.Node]] = {}  # of a step of several frames, one a frame
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
        """Copies at the top of the backward; their inputs may stand below them for now."""
        graph = self.backward.graph
        for node in chain:
            inputs = {one: self._in_backward(one) for one in node.all_input_nodes}
            with graph.inserting_before(self.top):
                copied = graph.node_copy(node, inputs.__getitem__)
            copied.meta[RECOMPUTED] = self.chosen.get(node, "")
            self.copies[node] = copied
        for node in self.chosen:
            placeholder = self.cut.saved[node]
            placeholder.replace_all_uses_with(self.copies[node])
            graph.erase_node(placeholder)

    def _in_backward(self, node: fx.Node) -> fx.Node:
        """What stands for a node of the forward in the backward."""
        for known in (self.copies, self.now_saved, self.cut.there):
            if node in known:
                return known[node]
        if node in self.cut.saved and node not in self.chosen:
            return self.cut.saved[node]
        if node.op == "placeholder" or node in self.besides or node.args[1] in self.kept:
            return self._save(node)
        graph = self.backward.graph  # a second gather
        shard = self._in_backward(node.args[0])  # type: ignore[arg-type]
        with graph.inserting_before(self.top):
            gathered = graph.node_copy(node, lambda _: shard)
        self.copies[node] = gathered
        return gathered

    def _save(self, node: fx.Node) -> fx.Node:
        """Give a node of the forward to the backward, before the other tensors it is given."""
        graph = self.backward.graph
        with graph.inserting_before(self.first_saved):
            saved = graph.placeholder(node.name)
        saved.meta = dict(node.meta)
        saved.meta[SAVES] = node.name  # its own may be taken
        if node.op != "placeholder":
            saved.meta[SAVED] = True
        self.now_saved[node] = saved
        return saved

    def _sink(self) -> None:
        """Put every copy, and what it reads of what was there already, before its first use."""
        moved = {**self.copies, **self.cut.there}
        for origin in sorted(moved, reverse=True):
            node = moved[origin]
            first = min(node.users)
            if origin in self.copies or first < node:
                first.prepend(node)
        for origin in sorted(self.copies):
            if is_getitem(origin):  # all results are there at once
                source = self.copies[origin].args[0]
                assert isinstance(source, fx.Node)
                source.append(self.copies[origin])

    def _save_no_more(self) -> None:
        """Take what is recomputed from the forward's outputs, and put in what is now saved."""
        output = output_node(self.forward.graph)
        returned = list(output.args[0])  # type: ignore[arg-type]
        first = len(returned) - len(self.cut.saved)
        if set(returned[first:]) != set(self.cut.saved):
            raise ValueError("what the forward returns last is not what the backward is given")
        still = (node for node in returned[first:] if node not in self.chosen)
        save_instead(output, first, [*self.now_saved, *still])
        unused = list(self.chosen)
        while unused:
            node = unused.pop()
            if not node.users and node.op == "call_function":
                unused.extend(node.all_input_nodes)
                self.forward.graph.erase_node(node)

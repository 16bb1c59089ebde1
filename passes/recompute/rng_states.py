"""RNG states: repair the random operators that run twice in a checkpointed region.

Torch's partitioner starts both runs of such an operator from the same generator state. On a CPU
the forward saves the state; on a GPU AOTAutograd passes a generator to each graph. This pass:

* replaces an operator that is not random (attention with ``dropout_p=0``) by the plain operator:
  it needs no state, and it is priced, measured and fused as in any other graph;
* adds the ``meta["val"]`` that the partitioner omits for all others;
* moves the saved states before the saved objects (the mesh of a DTensor). AOTAutograd counts from
  the end of the forward's outputs: tensors, tensors without a version counter, objects, symbolic
  sizes. The partitioner puts the states after the objects. AOTAutograd then takes a mesh for a
  tensor and fails.

Before::                                          After::

    pair = run_and_save_rng_state(sdpa, q, k, v)      out = sdpa(q, k, v)
    state, out = pair[0], pair[1]
    return [..., mesh, state]                         return [..., mesh]

Needs: a forward and a backward from the partitioner. Leaves: ``meta["val"]`` on all nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from passes._torch import (
    GRAPHSAFE_RUN_WITH_RNG_STATE,
    RUN_AND_SAVE_RNG_STATE,
    RUN_WITH_RNG_STATE,
    OpOverload,
)
from passes.graph.fx_utils import fake_mode_of, is_getitem, output_node
from passes.graph.metadata import SAVES
from passes.recompute.recompute_activations import drops_nothing


class _Twice(NamedTuple):
    """A random operator in the forward and its second run in the backward.

    Pairs are (forward, backward). ``calls``: calls of the operator with a state. ``states``: the
    nodes that hold the state. ``result``: the forward's node of the operator's own result.
    """

    operator: OpOverload
    args: tuple[tuple[Any, ...], tuple[Any, ...]]
    kwargs: tuple[dict[str, Any], dict[str, Any]]
    calls: tuple[fx.Node, fx.Node]
    states: tuple[fx.Node, fx.Node]
    result: fx.Node


def settle_rng_states(forward: fx.GraphModule, backward: fx.GraphModule, first: int) -> None:
    """Rewrite both graphs. See the module's docstring.

    ``first``: index of the first saved value among the forward's outputs.
    """
    saved = list(_with_saved_states(forward.graph, backward.graph))
    generated = list(_with_generators(forward.graph, backward.graph))
    if not saved and not generated:
        return
    kept = []
    for one in [*saved, *generated]:
        if drops_nothing(one.operator, one.args[0], one.kwargs[0]):
            _without_state(one)
            continue
        ran, runs = one.calls
        value = one.result.meta["val"]
        runs.meta["val"] = value
        if one.result is not ran:
            ran.meta["val"] = (one.states[0].meta["val"], value)
            SAVES.set(one.states[1], one.states[0].name)
            kept.append(one.states)
    _put_before_objects(forward.graph, backward.graph, first, kept)
    forward.recompile()
    backward.recompile()


def _with_saved_states(forward: fx.Graph, backward: fx.Graph) -> Iterator[_Twice]:
    """Pairs by saved states: outputs of the forward and inputs of the backward, in one order."""
    runs_by_state = {node.args[0]: node for node in _calls(backward, RUN_WITH_RNG_STATE)}
    given = [node for node in backward.find_nodes(op="placeholder") if node in runs_by_state]
    state_of = {_item(node, 0): node for node in _calls(forward, RUN_AND_SAVE_RNG_STATE)}
    returned: Sequence[Any] = output_node(forward).args[0]  # type: ignore[assignment]
    states = [node for node in returned if node in state_of]
    for state, placeholder in zip(states, given, strict=True):
        ran, runs = state_of[state], runs_by_state[placeholder]
        yield _Twice(
            ran.args[0],  # type: ignore[arg-type]
            (ran.args[1:], runs.args[2:]),
            (dict(ran.kwargs), dict(runs.kwargs)),
            (ran, runs),
            (state, placeholder),
            _item(ran, 1),
        )


def _with_generators(forward: fx.Graph, backward: fx.Graph) -> Iterator[_Twice]:
    """Pairs by generators: the last inputs of both graphs, in one order."""
    both = [
        {node.kwargs["rng_state"]: node for node in _calls(graph, GRAPHSAFE_RUN_WITH_RNG_STATE)}
        for graph in (forward, backward)
    ]
    ordered = [
        [node for node in graph.find_nodes(op="placeholder") if node in calls]
        for graph, calls in zip((forward, backward), both, strict=True)
    ]
    for states in zip(*ordered, strict=True):
        ran, runs = (calls[state] for calls, state in zip(both, states, strict=True))
        kwargs = [
            {key: value for key, value in node.kwargs.items() if key != "rng_state"}
            for node in (ran, runs)
        ]
        operator: Any = ran.args[0]
        args, named = fx.node.map_arg((ran.args[1:], kwargs[0]), lambda node: node.meta["val"])
        with fake_mode_of(forward), torch.no_grad():
            ran.meta["val"] = operator(*args, **named)
        yield _Twice(
            operator,
            (ran.args[1:], runs.args[1:]),
            (kwargs[0], kwargs[1]),
            (ran, runs),
            (states[0], states[1]),
            ran,
        )


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def _item(node: fx.Node, index: int) -> fx.Node:
    return next(user for user in node.users if is_getitem(user) and user.args[1] == index)


def _without_state(one: _Twice) -> None:
    """Replace both calls by the operator without a state."""
    ran, runs = one.calls
    state, given = one.states
    plain = _plain(one, ran, 0)
    one.result.replace_all_uses_with(plain)
    again = _plain(one, runs, 1)
    SAVES.set(again, plain.name)
    runs.replace_all_uses_with(again)
    if one.result is not ran:
        output = output_node(state.graph)
        returned: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        output.args = (tuple(value for value in returned if value is not state),)
        ran.graph.erase_node(one.result)
        ran.graph.erase_node(state)
        ran.graph.erase_node(ran)
    else:
        ran.graph.erase_node(ran)
        ran.graph.erase_node(state)
    runs.graph.erase_node(runs)
    given.graph.erase_node(given)


def _plain(one: _Twice, call: fx.Node, which: int) -> fx.Node:
    with call.graph.inserting_before(call):
        plain = call.graph.call_function(one.operator, one.args[which], one.kwargs[which])
    plain.meta = {**one.result.meta, **call.meta, "val": one.result.meta["val"]}
    return plain


def _put_before_objects(
    forward: fx.Graph,
    backward: fx.Graph,
    first: int,
    states: Sequence[tuple[fx.Node, fx.Node]],
) -> None:
    """Move saved states after the saved tensors and before all other saved values."""
    if not states:
        return
    moved = [state for state, _ in states]
    output = output_node(forward)
    returned: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    others = [node for node in returned[first:] if node not in moved]
    at = next((i for i, node in enumerate(others) if not _is_plain(node)), len(others))
    output.args = ((*returned[:first], *others[:at], *moved, *others[at:]),)
    given = [placeholder for _, placeholder in states]
    names = {node.name for node in others[at:]}
    # The backward's inputs start with the symbolic sizes.
    for node in backward.find_nodes(op="placeholder"):
        is_size = isinstance(node.meta["val"], torch.SymInt | torch.SymFloat)
        if node.name in names and not is_size:
            for placeholder in given:
                node.prepend(placeholder)
            return


def _is_plain(node: fx.Node) -> bool:
    """Whether a saved value is a tensor with a version counter check."""
    checked = not node.meta.get("saved_tensor_with_no_vc_check", False)
    return isinstance(node.meta["val"], torch.Tensor) and checked

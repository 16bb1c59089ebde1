"""Written reads: a forward that writes into a parameter.

Inside a forward a parameter reads as a copy, gathered from the ranks::

    with torch.no_grad():
        self.weight.clamp_(-1, 1)  # changes the copy

The write would not reach the parameter. So it is an error. A functional tensor of AOTAutograd knows
whether it was written, also through a view or ``.data``. In code that Dynamo leaves to Python the
version of a gathered tensor tells it, but not of writes through ``.data``.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from passes.graph.fx_utils import output_node
from passes.ops.markers import UNSHARD, UNSHARD_CALLS, unshard_of

#: The reads of each graph being compiled: the name of the parameter, and the marker's result.
_noted: list[list[tuple[str, Tensor]]] = []

#: Last gathered reads outside of compiled code: the name of the parameter, an empty tensor with the
#: version counter of the gathered one, and its version then.
_gathered: deque[tuple[str, Tensor, int]] = deque(maxlen=256)


def _note(args: Sequence[Any], read: Tensor) -> None:
    if _noted:
        _noted[-1].append((args[1], read))


_torch.aot_autograd.watch_functional(UNSHARD, _note)


@contextlib.contextmanager
def noting_reads() -> Iterator[None]:
    """Note the reads of one graph, while it is compiled."""
    _noted.append([])
    try:
        yield
    finally:
        _noted.pop()


def refuse_written_reads() -> None:
    """Refuse the graph being compiled if it writes into a parameter. It is traced by now.

    Raises:
        OsdpError: if it does.
    """
    reads = _noted[-1]
    for name, read in reads:
        if _torch.aot_autograd.is_written(read):
            refuse_write(name)
    reads.clear()


def watch_gathered(name: str, gathered: Tensor) -> None:
    """Watch a parameter gathered outside of compiled code.

    Raises:
        OsdpError: if the forward wrote into one gathered before.
    """
    refuse_written_gathered()
    if not gathered.is_inference():  # such a tensor has no version
        counter = gathered.detach()
        counter.data = gathered.new_empty(0)  # frees the memory, keeps the version counter
        _gathered.append((name, counter, _torch.autograd.version_of(counter)))


def refuse_written_gathered() -> None:
    """Refuse a forward that wrote into a parameter gathered outside of compiled code.

    Raises:
        OsdpError: if one did.
    """
    for name, counter, version in _gathered:
        if _torch.autograd.version_of(counter) != version:
            _gathered.clear()
            refuse_write(name)


# Frames that Dynamo could not trace call these; Dynamo must not compile them by themselves.
for _function in (watch_gathered, refuse_written_gathered, _torch.autograd.version_of):
    _torch.dynamo.skip_code(_function.__code__)


def watching_returned(
    function: Callable[..., Any], gm: fx.GraphModule, names: Collection[str]
) -> Callable[..., Any]:
    """Wrap the compiled function of a graph that ends before a write into a read, as at a print.

    ``names``: the sharded parameters.
    """
    results: Any = output_node(gm.graph).args[0]
    returned = [
        (place, unshard_of(node).name)
        for place, node in enumerate(results)
        if isinstance(node, fx.Node) and node.target in UNSHARD_CALLS
    ]
    returned = [(place, name) for place, name in returned if name in names]
    if not returned:
        return function

    def watching(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        for place, name in returned:
            watch_gathered(name, results[place])
        return results

    return _torch.aot_autograd.with_attributes(watching, function)


def assigned_in(gm: fx.GraphModule, inputs: Sequence[Any], names: Mapping[int, str]) -> set[str]:
    """The names of parameters whose ``data`` a Dynamo graph assigns.

    ``names``: by the ``id`` of a parameter, its name.
    """
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), map(id, inputs), strict=True))
    assignments = gm.graph.find_nodes(op="call_function", target=torch.Tensor.set_)
    found = {names.get(given.get(node.args[0], 0)) for node in assignments}
    return {name for name in found if name is not None}


def refuse_assigned_reads(gm: fx.GraphModule, assigned: Collection[str]) -> None:
    """Refuse a Dynamo graph that ends before such an assignment to a read.

    Dynamo leaves it to Python and returns the read. What the forward gets from ``parameters()`` is
    no read, and takes the assignment.

    ``assigned``: names by :func:`assigned_in`, from before the sharding.

    Raises:
        OsdpError: if it does.
    """
    for node in output_node(gm.graph).all_input_nodes:
        if node.target in UNSHARD_CALLS:
            name = unshard_of(node).name
            if name in assigned:
                refuse_write(name)


def refuse_write(name: str) -> NoReturn:
    """Refuse a forward that writes into this parameter."""
    raise OsdpError(
        f"the forward writes into parameter {name!r}, which it reads as a copy: the write would be "
        "lost. Write into the parameter outside of the model's call, under torch.no_grad() (before "
        "the first call, or after optimizer.step()); a value that only the forward changes can be "
        "a buffer. An nn.Embedding writes if it has max_norm"
    )

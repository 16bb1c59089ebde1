"""Same parameters: ranks run graphs that gather and reduce the same parameters, call by call.

Ranks may take other branches: a layer or an expert chosen by the batch, LayerDrop. Collectives of
one rank then meet those of others for other parameters. Parameters of equal shapes would be mixed
up without a message. So ranks compare what they are about to gather or reduce: before each of the
first 64 runs of graphs after a model's first call, and before every 64th later one, with all runs
since the first call. A comparison takes 8 bytes of each rank.

Runs without communication do not count: one rank alone may have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from osdp_compile import _torch
from osdp_compile.errors import RanksDiffer
from osdp_compile.model.agreement import checksum, equal_on_all, from_all
from passes.ops.markers import REDUCE_GRAD, reduce_grad_of, unshard_of, unshards

#: Ranks compare each of the first runs, as many as this, and later one run of as many.
_EVERY = 64


class Runs:
    """The runs of graphs with communication in a process group, on this rank.

    ``checksum``: of all parameters that they gather and reduce, in order.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the runs before."""
        self.count, self.checksum = 0, 0

    def begin(
        self, names: tuple[str, ...], own: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Note a run, and compare it with those of other ranks if it is its turn. Collective.

        ``own``: the checksum of ``names``.

        Raises:
            RanksDiffer: on every rank, naming the first parameter that differs.
        """
        self.checksum = checksum([f"{self.checksum} {own}"])
        self.count += 1
        if self.count > _EVERY and self.count % _EVERY:
            return
        if not equal_on_all(self.checksum, group, device):
            self.start()
            _refuse(from_all(names, group))


#: By the unique names of process groups.
_runs: dict[str, Runs] = {}


def compare_anew(group: dist.ProcessGroup | None) -> None:
    """Compare each of the next runs in a process group. All its ranks call it at the same time.

    None: there is one rank.
    """
    if group is not None:
        _runs.setdefault(group.group_name, Runs()).start()


def _refuse(names_of: Sequence[tuple[str, ...]]) -> None:
    """Raise the error for ranks with these names."""
    other = next((i for i, names in enumerate(names_of) if names != names_of[0]), None)
    where = f"in one of the last {_EVERY} graphs"
    if other is not None:
        here, there = set(names_of[0]), set(names_of[other])
        found = [(name, 0, other) for name in here - there]
        name, rank, without = min(found + [(name, other, 0) for name in there - here])
        where = f"rank {rank} is about to {name} and rank {without} is not"
    raise RanksDiffer(
        f"ranks run different parts of the model, {where}: their collectives would mix up "
        "parameters. Take the same branches on every rank: choose layers and experts by a random "
        "number or a decision that all ranks share, or run all of them and multiply by zero "
        "(LayerDrop of Hugging Face's models: layerdrop=0)"
    )


def gathered_in(graph: fx.Graph) -> tuple[str, ...]:
    """What a graph with markers gathers and reduces, in an order that all ranks share."""
    reduced = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    found: Iterable[tuple[str, str, str]] = (
        *(
            ("gather", one.name, one.group_name)
            for one in map(unshard_of, unshards(graph))
            if one.sharded
        ),
        *(("reduce", one.name, one.group_name) for one in map(reduce_grad_of, reduced)),
    )
    return tuple(sorted({f"{verb} {name!r}" for verb, name, group in found if group}))


def comparing(
    function: Callable[..., Any],
    forward: tuple[str, ...],
    backward: tuple[str, ...],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[..., Any]:
    """Wrap the compiled function of a frame: ranks compare its runs and those of its backward.

    ``forward``, ``backward``: what they gather and reduce.
    """
    runs = _runs.setdefault(group.group_name, Runs())
    of_forward, of_backward = checksum(forward), checksum(backward)

    def compared(*args: Any, **kwargs: Any) -> Any:
        if forward:
            runs.begin(forward, of_forward, group, device)
        outputs = function(*args, **kwargs)
        made = (one.grad_fn for one in outputs if isinstance(one, Tensor))
        node = next(filter(None, made), None) if backward else None
        if node is not None:
            node.register_prehook(lambda _: runs.begin(backward, of_backward, group, device))
        return outputs

    return _torch.aot_autograd.with_attributes(compared, function)

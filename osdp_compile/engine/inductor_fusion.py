"""Fusing: what Inductor may fuse, so that kernels run where the schedule has them.

Inductor fuses a kernel with one that reads its result, and puts them where all that both need is
there. Whatever else reads the result then waits too, a collective that was to start meanwhile
among it. A norm was recomputed for the gradients of the weights behind it, and its own backward
reads it: the gradients of all eight slices came behind the last slice, and the peak was 1 % above
what was planned. What would so wait for an operator that is called is refused here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from osdp_compile import _torch

#: By scheduler, and by the name of one of its nodes: the place of the last operator that it needs.
_needed: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


class InPlace(_torch.InductorChoices):
    """Inductor's choices, but no result is put off behind an operator that it does not need."""

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """``node2`` reads ``node1``, which then waits, and with it whatever else reads it."""
        if _puts_off(scheduler, node1, node2) and _has_others(node1, node2):
            return False
        choose = _torch.InductorChoices.can_fuse_vertical
        return choose(scheduler, node1, node2, shared_data_score)


def in_place() -> AbstractContextManager[None]:
    """A context in which Inductor fuses so."""
    return _torch.with_choices(InPlace())


def _puts_off(scheduler: Any, earlier: Any, later: Any) -> bool:
    """Whether the later one needs an operator that comes after the earlier one."""
    return any(_last_needed(scheduler, node) > earlier.max_order for node in later.get_nodes())


def _last_needed(scheduler: Any, node: Any) -> int:
    known = _needed.setdefault(scheduler, {})
    name = node.get_name()
    if name not in known:
        ancestors = (scheduler.name_to_node[one] for one in node.ancestors)
        known[name] = max((one.min_order for one in ancestors if one.is_extern()), default=-1)
    return known[name]


def _has_others(node: Any, reader: Any) -> bool:
    """Whether anything but the reader reads a node's results."""
    own = {one.get_name() for one in (*node.get_nodes(), *reader.get_nodes())}
    users = (user.node for buffer in node.get_outputs() for user in buffer.users)
    return any(
        one.get_name() not in own
        for user in users
        if isinstance(user, _torch.BaseSchedulerNode)  # not the graph's output
        for one in user.get_nodes()
    )

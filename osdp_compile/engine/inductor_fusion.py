"""Inductor fusion: refuse fusions that move a kernel away from its place in the schedule.

Inductor fuses a kernel with a reader of its result. The fused kernel runs when the inputs of both
are ready. All other readers of the result then wait too, among them collectives that the schedule
starts earlier. This module refuses the fusion if the first kernel would so wait for an extern
kernel (an operator that Inductor calls and does not generate).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from osdp_compile import _torch

#: By scheduler and node name: the place of the last extern kernel that the node needs, or -1.
_needed: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()


class InPlace(_torch.InductorChoices):
    """Inductor's choices, but no result waits for an extern kernel that it does not need."""

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether to fuse ``node2``, a reader of ``node1``, into it."""
        if _puts_off(scheduler, node1, node2) and _has_others(node1, node2):
            return False
        choose = _torch.InductorChoices.can_fuse_vertical
        return choose(scheduler, node1, node2, shared_data_score)


def in_place() -> AbstractContextManager[None]:
    """A context in which Inductor uses :class:`InPlace`."""
    return _torch.with_choices(InPlace())


def _puts_off(scheduler: Any, earlier: Any, later: Any) -> bool:
    """Whether ``later`` needs an extern kernel that runs after ``earlier``."""
    return any(_last_needed(scheduler, node) > earlier.max_order for node in later.get_nodes())


def _last_needed(scheduler: Any, node: Any) -> int:
    known = _needed.setdefault(scheduler, {})
    name = node.get_name()
    if name not in known:
        ancestors = (scheduler.name_to_node[one] for one in node.ancestors)
        known[name] = max((one.min_order for one in ancestors if one.is_extern()), default=-1)
    return known[name]


def _has_others(node: Any, reader: Any) -> bool:
    """Whether nodes other than the reader read a node's results."""
    own = {one.get_name() for one in (*node.get_nodes(), *reader.get_nodes())}
    users = (user.node for buffer in node.get_outputs() for user in buffer.users)
    return any(
        one.get_name() not in own
        for user in users
        if isinstance(user, _torch.BaseSchedulerNode)  # not the graph's output
        for one in user.get_nodes()
    )

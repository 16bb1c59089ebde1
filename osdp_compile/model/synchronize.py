"""Synchronization of a model: rank 0's values go to all ranks, in place, as with DDP."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from osdp_compile.errors import OsdpError
from osdp_compile.runtime.collectives import Group


class Synchronization:
    """Broadcasts that have started; the end of the ``with`` block waits for them. Collective.

    ``group``: None: there is one rank.
    """

    def __init__(self, tensors: Iterable[Tensor], group: Group) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._strided: list[Tensor] = []
        if group is None:
            return
        source = dist.get_global_rank(group, 0)
        for tensor in tensors:
            if not tensor.is_contiguous():
                self._strided.append(tensor)
                continue
            work = dist.broadcast(tensor.detach(), src=source, group=group, async_op=True)
            assert work is not None  # this rank is in the group
            self._works.append(work)

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, OsdpError):  # which all ranks raise
            self.wait()

    def wait(self) -> None:
        """Wait for all values. A tensor that is not contiguous goes now, by a copy."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._group is None:
            return
        source = dist.get_global_rank(self._group, 0)
        with torch.no_grad():
            for tensor in self._strided:
                whole = tensor.contiguous()
                dist.broadcast(whole, src=source, group=self._group)
                tensor.copy_(whole)
        self._strided.clear()


def synchronize(tensors: Iterable[Tensor], group: Group) -> None:
    """Broadcast rank 0's values of some tensors to the group, in place."""
    Synchronization(tensors, group).wait()

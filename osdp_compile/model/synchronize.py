"""Synchronization of a model: rank 0's values go to all ranks, in place, as with DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from osdp_compile.errors import OsdpError
from osdp_compile.runtime.collectives import Group
from osdp_compile.runtime.meshes import local_part


@contextlib.contextmanager
def synchronized(tensors: Iterable[Tensor], group: Group) -> Iterator[None]:
    """A context in which rank 0's values travel; its end waits for them. Collective.

    A tensor that is not contiguous goes at the end, by a copy. ``group``: None: there is one rank.
    """
    if group is None:
        yield
        return
    source = dist.get_global_rank(group, 0)
    works: list[dist.Work] = []
    strided: list[Tensor] = []
    for tensor in tensors:
        local = local_part(tensor.detach())  # a buffer may be a DTensor on other mesh dimensions
        if not local.is_contiguous():
            strided.append(local)
            continue
        work = dist.broadcast(local, src=source, group=group, async_op=True)
        assert work is not None  # this rank is in the group
        works.append(work)
    try:
        yield
    except OsdpError:  # which all ranks raise
        _wait(works, strided, source, group)
        raise
    _wait(works, strided, source, group)


def _wait(
    works: Sequence[dist.Work], strided: Sequence[Tensor], source: int, group: dist.ProcessGroup
) -> None:
    for work in works:
        work.wait()
    with torch.no_grad():
        for tensor in strided:
            whole = tensor.contiguous()
            dist.broadcast(whole, src=source, group=group)
            tensor.copy_(whole)


def synchronize(tensors: Iterable[Tensor], group: Group) -> None:
    """Broadcast rank 0's values of some tensors to the group, in place."""
    with synchronized(tensors, group):
        pass

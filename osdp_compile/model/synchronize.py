"""Synchronization of a model: rank 0's values go to all ranks, in place, as with DDP.

Ranks often have equal values before: of one seed, or of one checkpoint. So on CPUs they compare
digests first, which takes less time than a network does for the values. Only tensors that differ
travel.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import from_all
from osdp_compile.runtime.collectives import Group
from osdp_compile.runtime.meshes import local_part

#: Bytes of both ends of a tensor. Where they differ, nothing else is compared.
_END_BYTES = 256
_DIGEST_BYTES = 8


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
    # A buffer may be a DTensor on other mesh dimensions.
    local_parts = [local_part(tensor.detach()) for tensor in tensors]
    for local in differing(local_parts, group):
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


def differing(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors that are not known to be equal on all ranks. Collective.

    Compared are contiguous tensors on CPUs: first their ends, then digests of all their bytes.
    """
    equal = [one for one in tensors if _has_bytes(one)]
    for end_bytes in (_END_BYTES, None):
        by_rank = from_all([_digest(one, end_bytes) for one in equal], group)
        if len({*map(len, by_rank)}) > 1:  # an error of the collectives says more
            return list(tensors)
        equal = [
            one
            for one, digests in zip(equal, zip(*by_rank, strict=True), strict=True)
            if len(set(digests)) == 1
        ]
    known = {*map(id, equal)}
    return [one for one in tensors if id(one) not in known]


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its values, and can be read here."""
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _digest(tensor: Tensor, end_bytes: int | None) -> bytes:
    """A digest of a tensor's bytes, or of so many at its two ends."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    parts = [data] if end_bytes is None else [data[:end_bytes], data[-end_bytes:]]
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest()[:_DIGEST_BYTES]

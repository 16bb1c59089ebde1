"""P2P collectives: all-gather and reduce-scatter's exchange on gloo, as send and recv.

Reasons not to use gloo's own collectives: P2P messages fill the link, make no copies, and run no
tensor code on gloo's threads, where it corrupts the heap (docs/experiments.md).

On a GPU gloo sends no messages, and its functional all-gather reads GPU memory as if it were the
CPU's. There its eager collectives run, which copy through the CPU's memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import passes.ops.p2p  # noqa: F401  (defines the operators)
from osdp_compile import _torch
from osdp_compile.runtime.collectives import GLOO_STAGES, Group, all_gather_single, backend_of
from osdp_compile.runtime.eager_markers import group_of

#: Tag of our messages, so that they do not match a script's own send and recv.
_TAG = 0x05D9

#: For developers: the value 1, on every rank, selects gloo's own collectives on a CPU. It runs
#: NCCL's path without a GPU.
_NATIVE = "OSDP_NATIVE_COLLECTIVES"


def group_uses_p2p(group: Group, device: torch.device) -> bool:
    """Whether this file runs the group's gathers and exchanges, instead of its backend."""
    if backend_of(group, device.type) != "gloo":
        return False
    return device.type != "cpu" or os.environ.get(_NATIVE) != "1"


def staged_kinds(group: Group, device: torch.device) -> frozenset[str]:
    """The kinds of collective for which the backend holds a copy of the whole tensor in flight.

    P2P collectives make no copies.
    """
    is_gloo = backend_of(group, device.type) == "gloo"
    return GLOO_STAGES if is_gloo and not group_uses_p2p(group, device) else frozenset()


def start_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start the gather of every rank's part [k] into ``gathered`` [N * k]."""
    if part.device.type != "cpu":
        work: Any = all_gather_single(gathered, part.view(-1), group=group, async_op=True)
        return [work]  # torch 2.15 types it as optional
    rows = gathered.view(group.size(), -1)
    rows[group.rank()] = part.view(-1)
    return _start(rows, [part.view(-1)] * group.size(), group)


def start_exchange(received: Tensor, packed: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start an all-to-all: row r of ``packed`` [N * k] goes to rank r; ours to ``received``."""
    if packed.device.type != "cpu":
        work: Any = dist.all_to_all_single(received, packed, group=group, async_op=True)
        return [work]
    rows, sent = received.view(group.size(), -1), packed.view(group.size(), -1)
    rows[group.rank()] = sent[group.rank()]
    return _start(rows, list(sent), group)


def _start(rows: Tensor, sent: list[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    size, rank = group.size(), group.rank()
    works = []
    for distance in range(1, size):  # in each round every rank receives from a different rank
        source, target = (rank - distance) % size, (rank + distance) % size
        works.append(group.recv([rows[source]], source, _TAG))
        works.append(group.send([sent[target]], target, _TAG))
    return works


@torch.library.impl("osdp::gather_parts", ("cpu", "cuda"))
def _gather_parts(
    part: Tensor, ranks: int, group_name: str, *, sent: Tensor | None = None
) -> Tensor:
    gathered = part.new_empty([ranks * part.numel()])
    return _until_waited_for(gathered, start_gather(gathered, part, group_of(group_name)))


@torch.library.impl("osdp::exchange", ("cpu", "cuda"))
def _exchange(packed: Tensor, ranks: int, group_name: str) -> Tensor:
    received = torch.empty_like(packed)
    return _until_waited_for(received, start_exchange(received, packed, group_of(group_name)))


def _until_waited_for(tensor: Tensor, works: list[dist.Work]) -> Tensor:
    """Register works: ``wait_tensor(tensor)`` waits for all of them."""
    for work in works:
        _torch.distributed.register_work(tensor, work)
    return tensor

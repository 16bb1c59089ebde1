"""Exchange: gathers and scatters on gloo as messages from rank to rank.

Better than gloo's own collectives in three ways: they fill the link (two hosts at 400
Mbit/s, 4 MiB at a time, one in flight: 1.7 times the rate of its all-to-all); nothing is
copied; and no tensor code runs on gloo's threads, where it corrupted the heap
(docs/design.md).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

import passes.ops.p2p  # noqa: F401  (defines the operators)
from osdp_compile import _torch
from osdp_compile.runtime.collectives import GLOO_STAGES, backend_of
from osdp_compile.runtime.eager_markers import group_of

#: Of our messages, so that a script's own send and recv do not meet them.
_TAG = 0x05D9

#: For developers: with this variable set to 1, on every rank, gloo's own collectives are used. So
#: the path that NCCL takes can be run without a GPU.
_NATIVE = "OSDP_NATIVE_COLLECTIVES"


def by_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gathers and scatters of a group are carried out here, and not by its backend."""
    return _on_gloo(group, device) and os.environ.get(_NATIVE) != "1"


def staged_kinds(group: dist.ProcessGroup, device: torch.device) -> frozenset[str]:
    """The kinds of collective of whose whole tensor a group's backend holds a copy in flight."""
    return GLOO_STAGES if _on_gloo(group, device) else frozenset()


def _on_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cpu" and backend_of(group, "cpu") == "gloo"


def start_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start gathering every rank's part [k] into ``gathered`` [N * k]."""
    rows = gathered.view(group.size(), -1)
    rows[group.rank()] = part.view(-1)
    return _start(rows, [part.view(-1)] * group.size(), group)


def start_exchange(received: Tensor, packed: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start sending row r of ``packed`` [N * k] to rank r; its rows for us go to ``received``."""
    rows, sent = received.view(group.size(), -1), packed.view(group.size(), -1)
    rows[group.rank()] = sent[group.rank()]
    return _start(rows, list(sent), group)


def _start(rows: Tensor, sent: list[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    size, rank = group.size(), group.rank()
    works = []
    for distance in range(1, size):  # at every moment each rank is to receive from another one
        source, target = (rank - distance) % size, (rank + distance) % size
        works.append(group.recv([rows[source]], source, _TAG))
        works.append(group.send([sent[target]], target, _TAG))
    return works


@torch.library.impl("osdp::gather_parts", "CPU")
def _gather_parts(
    part: Tensor, ranks: int, group_name: str, *, sent: Tensor | None = None
) -> Tensor:
    gathered = part.new_empty([ranks * part.numel()])
    return _until_waited_for(gathered, start_gather(gathered, part, group_of(group_name)))


@torch.library.impl("osdp::exchange", "CPU")
def _exchange(packed: Tensor, ranks: int, group_name: str) -> Tensor:
    received = torch.empty_like(packed)
    return _until_waited_for(received, start_exchange(received, packed, group_of(group_name)))


def _until_waited_for(tensor: Tensor, works: list[dist.Work]) -> Tensor:
    """Make ``wait_tensor`` of a tensor wait for these."""
    for work in works:
        _torch.register_work(tensor, work)
    return tensor

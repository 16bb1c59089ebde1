"""P2P collectives: an all-gather and an all-to-all of point-to-point messages, for gloo.

======================  ===============================================================
``osdp::gather_parts``  every rank's part (of equal size) -> all parts, in rank order
``osdp::exchange``      a table with one row per rank -> this rank's row of every rank
======================  ===============================================================

Graphs may read the result only after ``wait_tensor``, and must not write to the input before it.
Inductor enforces this for its own collectives, but not for these. So the operator after the wait
takes the input as an extra argument (``sent``), which keeps it alive. An input of the graph does
not need this: no kernel writes to it. In a hierarchical gather
(``passes/overlap/hierarchical_collectives.py``), the operator after the wait may be the next
stage's ``gather_parts``.

This file holds schemas and shapes; ``osdp_compile/runtime/p2p.py`` sends the messages.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("osdp", "FRAGMENT")
_LIBRARY.define(
    "gather_parts(Tensor part, int ranks, str group_name, *, Tensor? sent=None) -> Tensor"
)
_LIBRARY.define("exchange(Tensor packed, int ranks, str group_name) -> Tensor")


@torch.library.register_fake("osdp::gather_parts")
def _gather_parts_shape(
    part: Tensor, ranks: int, group_name: str, *, sent: Tensor | None = None
) -> Tensor:
    return part.new_empty([ranks * part.numel()])


@torch.library.register_fake("osdp::exchange")
def _exchange_shape(packed: Tensor, ranks: int, group_name: str) -> Tensor:
    return packed.new_empty([packed.numel()])


GATHER_PARTS = torch.ops.osdp.gather_parts.default
EXCHANGE = torch.ops.osdp.exchange.default

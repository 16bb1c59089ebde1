"""Exchange: gathering and scattering by messages from rank to rank, for gloo.

======================  ===============================================================
``osdp::gather_parts``  every rank's part (alike in size) -> all parts, in ranks' order
``osdp::exchange``      a table with a row for each rank -> the rows that all have for us
======================  ===============================================================

They are collectives: the result may be read after ``wait_tensor`` only, and the input must
stay as it is until then. Inductor knows that of its own collectives and not of these, so
whatever follows the wait takes the input as an argument too (``sent``), unless it is an
input of the graph, which nobody writes to. Where that is the next leg of a gather
(``passes/overlap/hierarchical_collectives.py``), it is a ``gather_parts`` itself.

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

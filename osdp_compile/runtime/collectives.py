"""Collectives under the names that this torch prefers, and who carries them out.

torch 2.13 renamed two and warns at the old names, which are the only ones 2.11 has.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: gloo gathers into a tensor of its own and copies out of it, and it reduces and scatters a copy.
#: 2.11.0, 2.13.0, 2.15.0: measured.
GLOO_STAGES = frozenset({"all_gather", "reduce_scatter"})


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend a group uses for a kind of device: ``"gloo"``, ``"nccl"``, ``"fake"``.

    ``dist.get_backend`` says "undefined" of a group that was made without naming one.
    """
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    pairs = dict(pair.split(":", 1) for pair in config.split(","))
    return pairs.get(device_type, "")

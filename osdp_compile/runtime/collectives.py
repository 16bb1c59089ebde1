"""Collectives under this torch version's names, and the backend of a group.

torch 2.13 renamed two of them and warns about the old names. torch 2.11 has only the old names.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Kinds for which gloo copies the whole tensor: it gathers into its own tensor and copies the
#: result out; it reduces and scatters a copy. Measured with 2.11.0, 2.13.0, 2.15.0.
GLOO_STAGES = frozenset({"all_gather", "reduce_scatter"})


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """A group's backend for a device type: ``"gloo"``, ``"nccl"``, ``"fake"``.

    ``dist.get_backend`` returns "undefined" for a group made without a backend name.
    """
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    pairs = dict(pair.split(":", 1) for pair in config.split(","))
    return pairs.get(device_type, "")

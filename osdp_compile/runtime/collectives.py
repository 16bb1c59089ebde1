"""Collectives under this torch version's names; groups of ranks, and their backends.

torch 2.13 renamed two of them and warns about the old names. torch 2.11 has only the old names.
"""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist

#: The ranks that train a model together; None: one rank, which needs no process group.
Group: TypeAlias = "dist.ProcessGroup | None"

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Kinds for which gloo copies the whole tensor: it gathers into its own tensor and copies the
#: result out; it reduces and scatters a copy. Measured with 2.11.0, 2.13.0, 2.15.0.
GLOO_STAGES = frozenset({"all_gather", "reduce_scatter"})


def backend_of(group: Group, device_type: str) -> str:
    """A group's backend for a device type: ``"gloo"``, ``"nccl"``, ``"fake"``; "": none.

    ``dist.get_backend`` returns "undefined" for a group made without a backend name.
    """
    if group is None:
        return ""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    pairs = dict(pair.split(":", 1) for pair in config.split(","))
    return pairs.get(device_type, "")


def size_of(group: Group) -> int:
    """The number of ranks of a group."""
    return 1 if group is None else group.size()


def rank_in(group: Group) -> int:
    """This rank's index in a group."""
    return 0 if group is None else group.rank()


def name_of(group: Group) -> str:
    """A group's name in graphs; "": one rank."""
    name: str = "" if group is None else group.group_name
    return name

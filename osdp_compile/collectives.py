"""Collectives under the names that this torch prefers.

torch 2.13 renamed two and warns at the old names, which are the only ones 2.11 has.
"""

from __future__ import annotations

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

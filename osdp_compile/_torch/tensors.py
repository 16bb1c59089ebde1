"""Tensors without memory, and the leaves of nested containers."""

from __future__ import annotations

# 2.11.0 to 2.15.0: tensors with a shape and a device, without memory.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# 2.11.0 to 2.15.0: leaves of nested containers and dataclasses such as model outputs.
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["FakeTensor", "FakeTensorMode", "tree_leaves", "tree_map_only"]

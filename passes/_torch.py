"""Everything private to torch that the passes rely on, each name with the versions checked.

Nothing else in ``passes/`` imports from ``torch._*``.
"""

from __future__ import annotations

# 2.11.0, 2.13.0: origins of joint-graph inputs and outputs (node.meta["desc"]).
from torch._functorch._aot_autograd.descriptors import (  # noqa: F401
    AOTInput,
    AOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
)

# 2.11.0, 2.13.0: FakeTensorMode of a graph's values; enables computing `meta["val"]` of new nodes.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: F401

# 2.11.0, 2.13.0: lazily compiled copies of graph modules are refused by deepcopy; plain ones
# are not.
from torch.fx.graph_module import GraphModule  # noqa: F401

# 2.11.0, 2.13.0: the policy tags the partitioner obeys (node.meta["recompute"]).
from torch.utils.checkpoint import CheckpointPolicy  # noqa: F401

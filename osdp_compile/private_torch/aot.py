"""AOTAutograd: origins of its graphs' inputs and outputs, the partitioner, saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

# 2.11.0 to 2.15.0: origins of AOTAutograd's inputs and outputs (node.meta["desc"]).
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# 2.11.0 to 2.15.0: the hook for the partitioner.
from torch._inductor.custom_graph_pass import CustomPartitionerFn

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Partitioner(CustomPartitionerFn):
    """A plain function as a partitioner for Inductor's settings."""

    def __init__(self, function: Partition) -> None:
        self.function = function

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.function(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        # Inductor's cache keys hold the graphs after our passes. So this key needs only the changed
        # fusion (``osdp_compile/engine/inductor_fusion.py``).
        return "osdp_compile, kernels in place"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # enough for the cache's key


def aot_input_index(node: fx.Node) -> int | None:
    """Index of the Dynamo graph's input behind an AOTAutograd placeholder; None: no such input."""
    return _plain_index(node.meta.get("desc"))


def gradient_input_index(description: Any) -> int | None:
    """Index of the input whose gradient is a joint graph output; None: no gradient."""
    while description is not None and not isinstance(description, GradAOTOutput):
        description = getattr(description, "base", None)
    return _plain_index(description.grad_of) if description is not None else None


def result_index(description: Any) -> int | None:
    """Index of the Dynamo graph's result that is a forward output; None: no result."""
    while description is not None and not isinstance(description, PlainAOTOutput):
        description = getattr(description, "base", None)
    return description.idx if description is not None else None


def tangent_result_index(description: Any) -> int | None:
    """Index of the Dynamo graph's result whose gradient is a backward input; None: no tangent."""
    return result_index(description.output) if isinstance(description, TangentAOTInput) else None


def _plain_index(description: Any) -> int | None:
    while description is not None and not isinstance(description, PlainAOTInput):
        description = getattr(description, "base", None)
    return description.idx if description is not None else None


def is_saved(tensor: Tensor) -> bool:
    """Whether autograd holds the tensor: it saved it, or will accumulate its gradient."""
    # 2.11.0 to 2.15.0: C++ references; all Python references count as one.
    counted: Any = tensor
    return bool(counted._use_count() > 1)


def hooks_saved_tensors() -> bool:
    """Whether hooks pack the tensors that autograd saves now."""
    # 2.11.0 to 2.15.0: AOTAutograd asks this too; True: also while tracing.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None

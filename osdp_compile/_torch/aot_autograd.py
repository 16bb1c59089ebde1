"""AOTAutograd: its settings, its partitioner, and the origins of its graphs' inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

# 2.11.0 to 2.15.0: AOTAutograd's settings, patched around one compilation.
from torch._functorch import config as functorch_config

# 2.11.0 to 2.15.0: origins of AOTAutograd's inputs and outputs (node.meta["desc"]).
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# 2.11.0 to 2.15.0: Inductor's settings.
from torch._inductor import config as inductor_config

# 2.11.0 to 2.15.0: the hook for the partitioner.
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from osdp_compile._torch.operators import OpOverload

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def input_index(node: fx.Node) -> int | None:
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


class Partitioner(CustomPartitionerFn):
    """A plain function as a partitioner for Inductor's settings.

    ``token``: stands for all that the partition depends on, in the key of AOTAutograd's cache.
    """

    def __init__(self, function: Partition, token: str = "") -> None:
        self.function, self.token = function, token

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.function(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        # Inductor's cache keys hold the graphs after our passes. So this key needs only the changed
        # fusion (``osdp_compile/lowering/inductor_fusion.py``).
        return f"osdp_compile, kernels in place{self.token}"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # enough for the cache's key


def with_attributes(wrapper: Callable[..., Any], compiled: Any) -> Callable[..., Any]:
    """A wrapper of a compiled function, with the attributes that AOTAutograd sets for Dynamo.

    (Not ``functools.wraps``: Dynamo would look through ``__wrapped__``.)
    """
    vars(wrapper).update(getattr(compiled, "__dict__", {}))
    return wrapper


def without_cache() -> Any:
    """A context without AOTAutograd's cache of Dynamo graphs: its key lacks the plan, on which the
    result depends."""
    return functorch_config.patch(enable_autograd_cache=False)


def has_cache() -> bool:
    """Whether AOTAutograd's cache and Inductor's, on which it depends, are on."""
    # 2.11.0, 2.13.0, 2.15.0
    off = torch.compiler.config.force_disable_caches
    return functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache and not off


def watch_functional(
    operator: OpOverload[..., Any], seen: Callable[[Sequence[Any], Tensor], None]
) -> None:
    """Call ``seen(args, result)`` with every functional result of an operator that is traced."""

    @operator.py_functionalize_impl  # 2.11.0, 2.13.0, 2.15.0
    def functional(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        with ctx.redispatch_to_next():
            result = operator(*ctx.unwrap_tensors(args), **ctx.unwrap_tensors(kwargs))
        wrapped = ctx.wrap_tensors(result)
        seen(args, wrapped)
        return wrapped


def is_written(functional: Any) -> bool:
    """Whether a functional tensor, or a view of it, was written since it was made."""
    # 2.11.0, 2.13.0, 2.15.0
    torch_: Any = torch
    written: bool = torch_._functionalize_has_data_mutation(functional.elem)
    return written


def settings() -> Iterator[tuple[str, Any]]:
    """Settings of torch on which AOTAutograd's graphs depend, each with its value."""
    # 2.11.0 to 2.15.0: get_config_copy.
    yield from sorted(inductor_config.get_config_copy().items())
    yield from sorted(functorch_config.get_config_copy().items())
    for device in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(device)
        yield f"autocast on {device}", (on, torch.get_autocast_dtype(device))
    yield "autocast cache", torch.is_autocast_cache_enabled()
    yield "default dtype", torch.get_default_dtype()
    yield "matmul precision", torch.get_float32_matmul_precision()
    yield "deterministic", torch.are_deterministic_algorithms_enabled()
    yield "anomaly", torch.is_anomaly_enabled()
    yield "threads", torch.get_num_threads()

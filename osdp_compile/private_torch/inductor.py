"""Inductor: settings, entry points, the pass after fusion, choices, compiled C++."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

# 2.11.0 to 2.15.0: AOTAutograd's settings, patched around one compilation.
from torch._functorch import config as functorch_config

# 2.11.0 to 2.15.0: Inductor's entry point, with a hook for the compiler of each partition.
from torch._inductor import compile_fx as inductor

# 2.11.0 to 2.15.0: Inductor's settings, and those of each mode of torch.compile.
from torch._inductor import config as inductor_config

# 2.11.0 to 2.14.1: base classes of Inductor's custom passes.
from torch._inductor import custom_graph_pass, list_mode_options

# 2.11.0 to 2.15.0: Inductor's fusion hooks (``InductorChoices.can_fuse_vertical``); the hooks read
# ``name_to_node``, ``ancestors``, ``min_order``, ``is_extern``, ``users``.
from torch._inductor.choices import InductorChoices

# 2.13.0: compiles C++ as Inductor compiles its own, into Inductor's cache, and loads it.
from torch._inductor.codecache import CppCodeCache

# 2.13.0, 2.15.0: ``should_prefer_unfused_addmm`` decides whether a product and a sum become
# one ``addmm``.
from torch._inductor.fx_passes import post_grad

# 2.11.0 to 2.15.0: the nodes of fusion.
from torch._inductor.scheduler import BaseSchedulerNode

# 2.11.0 to 2.15.0: holds Inductor's InductorChoices object.
from torch._inductor.virtualized import V

from osdp_compile.log_lines import is_rank_zero

#: Torch's own names; others use them as they are.
__all__ = ["BaseSchedulerNode", "InductorChoices", "V"]

#: Inductor settings that move, join or replace nodes of the given graph, or add tensors -> the
#: values that turn this off. Each version has a different subset.
_KEEPS_ORDER: dict[str, Any] = {
    # Move nodes, in the graph and in the scheduler. From 2.14 on a pass after fusion, on by
    # default, moves native collectives and their waits.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_locality_in_training": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    # Join or replace collectives.
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "_micro_pipeline_tp": False,
    # Refuse fusions by Inductor's own memory timeline.
    "fusion_memory_timeline_peak_allowed_increase_mb": None,
    "fusion_memory_timeline_peak_memory_increase_gb": None,
    "fusion_memory_timeline_peak_memory_pct_threshold": None,
    # Keep memory for later buffers.
    "allow_buffer_reuse": False,
    # Copies every convolution's weight, gathered or not, to channels-last in the forward and saves
    # the copy for the backward.
    "layout_optimization": False,
}

#: The settings that this torch knows; it refuses others. 2.11.0 to 2.15.0: get_config_copy.
KEEP_ORDER: dict[str, Any] = {
    name: value for name, value in _KEEPS_ORDER.items() if name in inductor_config.get_config_copy()
}


def inductor_settings() -> dict[str, Any]:
    """Inductor's settings, each with its present value."""
    found: dict[str, Any] = inductor_config.get_config_copy()
    return found


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of torch.compile, each with its settings of Inductor."""
    return list_mode_options()


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context with these settings of Inductor."""
    context: AbstractContextManager[None] = inductor_config.patch(dict(settings))
    return context


def without_autograd_cache() -> Any:
    """A context without AOTAutograd's cache of Dynamo graphs: its key lacks the plan, on which the
    result depends."""
    return functorch_config.patch(enable_autograd_cache=False)


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings of Inductor about its own code.

    On rank 0 these are warnings that no user can act on. On the other ranks they are all of them:
    rank 0 compiles the same graphs.
    """
    # 2.13.0: max_autotune on a CPU; 2.15.0 no longer warns.
    message = "TypedStorage is deprecated" if is_rank_zero() else ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message, module=r"torch\._inductor\b")
        yield


def compile_fx(gm: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """AOTAutograd and Inductor, as ``torch.compile`` calls them."""
    with _quiet():
        return inductor.compile_fx(gm, inputs, **options)


def compile_fx_inner(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor, for one graph after AOTAutograd."""
    with _quiet():
        return inductor.compile_fx_inner(gm, inputs, **options)


#: Takes and returns Inductor's kernels in their order.
KernelPass = Callable[[list[BaseSchedulerNode]], list[BaseSchedulerNode]]

#: 2.13.0, 2.14.1: Inductor's cache refuses other passes after fusion. 2.11.0 and 2.12.0 lack it and
#: take any function.
_CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


class _AfterFusion(_CustomSchedulerPass):  # type: ignore[misc]
    """A plain function as Inductor's pass over its kernels after fusion.

    ``name``: stands for the function in the keys of Inductor's cache.
    """

    def __init__(self, function: KernelPass, name: str) -> None:
        self.function, self.name = function, name

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return self.function(nodes)

    def uuid(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # enough for the cache's key


def after_fusion(function: KernelPass, name: str) -> AbstractContextManager[None]:
    """A context in which a function rewrites the list of Inductor's kernels after fusion.

    ``name``: changes with the function; stands for it in the keys of Inductor's cache.
    """
    # 2.11.0 to 2.14.1: the hook; it takes and returns the kernels in their order.
    context: AbstractContextManager[None] = inductor_config.patch(
        _post_fusion_custom_pass=_AfterFusion(function, name)
    )
    return context


def with_choices(choices: InductorChoices) -> AbstractContextManager[None]:
    """A context in which Inductor uses these choices, on this thread."""
    context: AbstractContextManager[None] = V.set_choices_handler(choices)
    return context


@contextlib.contextmanager
def with_products_apart(apart: Callable[[fx.Node, fx.Node], bool]) -> Iterator[None]:
    """A context in which Inductor adds to a product in an operator of its own if ``apart`` says so.

    ``apart``: of a product and of the sum that reads it, which come in the order of the graph.
    """
    prefers: Any = post_grad.should_prefer_unfused_addmm

    def prefers_apart(match: Any) -> Any:
        total = match.output_node()
        products = [one for one in match.nodes if one is not total]
        return any(apart(product, total) for product in products) or prefers(match)

    post_grad.should_prefer_unfused_addmm = prefers_apart
    try:
        yield
    finally:
        post_grad.should_prefer_unfused_addmm = prefers


def compiled_library(source: str) -> ctypes.CDLL:
    """A loaded library from C++ source, compiled once per cache."""
    library: ctypes.CDLL = CppCodeCache.load(source)
    return library

"""Inductor: its entry points, its settings, its decompositions and its compiled C++."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

# 2.11.0 to 2.15.0: Inductor's entry point, with a hook for the compiler of each partition.
from torch._inductor import compile_fx as entry

# 2.11.0 to 2.15.0: Inductor's settings, and those of each mode of torch.compile.
from torch._inductor import config, list_mode_options

# 2.13.0: compiles C++ as Inductor compiles its own, into Inductor's cache, and loads it.
from torch._inductor.codecache import CppCodeCache

# 2.13.0, 2.15.0: tests, once in a process, which vector instructions the processor has.
from torch._inductor.cpu_vec_isa import valid_vec_isa_list as vector_instructions

# 2.11.0 to 2.15.0: a graph input that stands for an object, such as a DeviceMesh.
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from osdp_compile._torch.operators import OpOverload
from osdp_compile._torch.replaced import replaced
from osdp_compile.log_lines import is_rank_zero

__all__ = [
    "KEEP_ORDER",
    "compile_fx",
    "compile_fx_inner",
    "compiled_library",
    "during_joint_passes",
    "modes",
    "plain_decomposition",
    "real_meshes",
    "settings",
    "vector_instructions",
    "with_decompositions",
    "with_settings",
]

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
    name: value for name, value in _KEEPS_ORDER.items() if name in config.get_config_copy()
}


def settings() -> dict[str, Any]:
    """Inductor's settings, each with its present value."""
    found: dict[str, Any] = config.get_config_copy()
    return found


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
        return entry.compile_fx(gm, inputs, **options)


def compile_fx_inner(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor, for one graph after AOTAutograd."""
    with _quiet():
        return entry.compile_fx_inner(gm, inputs, **options)


def modes() -> dict[str, dict[str, Any]]:
    """The modes of torch.compile, each with its settings of Inductor."""
    return list_mode_options()


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context with these settings of Inductor."""
    context: AbstractContextManager[None] = config.patch(dict(settings))
    return context


def compiled_library(source: str) -> ctypes.CDLL:
    """A loaded library from C++ source, compiled once per cache."""
    library: ctypes.CDLL = CppCodeCache.load(source)
    return library


def real_meshes(inputs: Sequence[Any]) -> list[Any]:
    """A graph's inputs with real meshes in place of fake ones.

    Inductor's cache key numbers real meshes. It pickles a fake mesh in a mode in which the key of
    equal graphs differs between processes (2.13.0 to 2.15.0).
    """
    return [_real_mesh(one) for one in inputs]


def _real_mesh(value: Any) -> Any:
    real = value.real_obj if isinstance(value, FakeScriptObject) else None
    return real if isinstance(real, DeviceMesh) else value


def with_decompositions(
    changed: Mapping[OpOverload, Callable[..., Any]],
) -> AbstractContextManager[None]:
    """A context in which AOTAutograd, called by Inductor, decomposes some operators otherwise."""
    # 2.11.0 to 2.15.0: compile_fx asks this function for its table.
    return replaced(entry, "select_decomp_table", lambda table: lambda: {**table(), **changed})


def plain_decomposition(operator: OpOverload) -> Callable[..., Any]:
    """Inductor's decomposition of an operator."""
    table: Callable[[], Mapping[Any, Callable[..., Any]]] = vars(entry)["select_decomp_table"]
    return table()[operator]


@contextlib.contextmanager
def during_joint_passes() -> Iterator[Callable[[], bool]]:
    """Context: yields whether Inductor's passes on the joint graph are running."""
    running = 0

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal running
            running += 1
            try:
                return plain(*args, **kwargs)
            finally:
                running -= 1

        return counted

    with replaced(entry, "_recursive_joint_graph_passes", counting):  # 2.11.0 to 2.15.0
        yield lambda: running > 0

"""All private names of torch that the package uses, each with the checked versions.

No other file in ``osdp_compile/`` imports from ``torch._*``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn

# 2.11.0 to 2.15.0: makes wait_tensor(tensor) wait for a Work; a tensor can have several.
from torch._C._distributed_c10d import _register_work as register_work

# 2.13.0, 2.15.0: the process group of a name.
from torch._C._distributed_c10d import _resolve_process_group as process_group

# 2.11.0 to 2.15.0: files of compiled functions and of Dynamo's compiler.
from torch._dynamo import convert_frame, eval_frame

# skip_code, 2.13.0: Dynamo does not compile the function by itself, but traces it inline.
# _TorchDynamoContext, 2.11.0, 2.13.0, 2.15.0: its __call__ holds torch.compile's function wrapper.
from torch._dynamo.eval_frame import _TorchDynamoContext, skip_code

# 2.11.0 to 2.15.0: Dynamo lets a backend raise these. The restart makes it trace the frame again.
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis

# 2.11.0 to 2.15.0: the frame being traced; the floats that Dynamo makes constants when it
# traces a frame again.
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState

# 2.11.0 to 2.15.0: see :func:`recompile_reason`.
from torch._dynamo.utils import get_metrics_context

# 2.11.0 to 2.15.0: AOTAutograd's settings, patched around one compilation.
from torch._functorch import config as functorch_config

# 2.11.0 to 2.15.0: origins of AOTAutograd's inputs and outputs (node.meta["desc"]).
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# CompileContext, CompileId, 2.11.0, 2.13.0, 2.15.0: the frame that Dynamo compiles.
# TracingContext, 2.13.0: the fake tensor mode of the graph being compiled.
from torch._guards import CompileContext, CompileId, TracingContext

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

# 2.13.0, 2.15.0: tests, once in a process, which vector instructions the processor has.
from torch._inductor.cpu_vec_isa import valid_vec_isa_list as vector_instructions

# 2.11.0 to 2.15.0: the hook for the partitioner.
from torch._inductor.custom_graph_pass import CustomPartitionerFn

# 2.13.0, 2.15.0: ``should_prefer_unfused_addmm`` decides whether a product and a sum become one
# ``addmm``.
from torch._inductor.fx_passes import post_grad

# 2.11.0 to 2.15.0: the nodes of fusion.
from torch._inductor.scheduler import BaseSchedulerNode

# 2.11.0 to 2.15.0: holds Inductor's InductorChoices object.
from torch._inductor.virtualized import V

# 2.11.0 to 2.15.0: a graph input that stands for an object, such as a DeviceMesh.
from torch._library.fake_class_registry import FakeScriptObject

# 2.11.0, 2.13.0, 2.15.0: an entry of TORCH_TRACE's log, which tlparse reads; the levels of
# TORCH_LOGS, and that log.
from torch._logging import _internal as torch_logs

# 2.11.0 to 2.15.0: an operator for given types of arguments.
from torch._ops import OpOverload

# 2.11.0 to 2.15.0: tensors with a shape and a device, without memory.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# 2.11.0 to 2.15.0: the node of an autograd.Function in the backward.
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

# 2.13.0, 2.15.0: the placement of FSDP2 after tensor parallelism.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention import SDPBackend
from torch.nn.utils import clip_grad

# 2.13.0: Adafactor's functional step of a group, on lists.
# 2.13.0, 2.15.0: Muon's, its orthogonalization, and its learning rate for a shape.
from torch.optim import _adafactor, _muon

# 2.11.0 to 2.15.0: a mode that sees the operators that compiled code calls; the innermost one of
# a thread.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _push_mode,
)

# 2.11.0 to 2.15.0: leaves of nested containers and dataclasses such as model outputs.
from torch.utils._pytree import tree_leaves, tree_map_only

from osdp_compile.live_objects import closed_over
from osdp_compile.log_lines import is_rank_zero

__all__ = [
    "COMPILED_CALLS",
    "CUSTOM_BACKWARDS",
    "MODULE_CALLS",
    "BaseSchedulerNode",
    "CompileId",
    "FakeTensor",
    "FakeTensorMode",
    "InductorChoices",
    "OpOverload",
    "Partitioner",
    "RestartTracing",
    "TorchDispatchMode",
    "V",
    "after_fusion",
    "aot_input_index",
    "attention_order",
    "autocast_operators",
    "code_being_compiled",
    "compile_fx",
    "compile_fx_inner",
    "compile_id",
    "compiled_library",
    "constant_floats",
    "copy_source",
    "current_frame",
    "during_joint_passes",
    "evaluate_prefixes",
    "fake_store",
    "flattened",
    "forget_compiled",
    "forget_placements",
    "gradient_input_index",
    "handle_adafactor",
    "handle_dtensor_operator",
    "handle_muon",
    "hooks_saved_tensors",
    "inductor_modes",
    "inductor_settings",
    "is_marked_by_fsdp",
    "is_process_group",
    "is_traced",
    "leave_mode",
    "plain_decomposition",
    "process_group",
    "raise_to_user",
    "real_meshes",
    "recompile_reason",
    "reduced_by_ddp",
    "register_work",
    "restart_tracing",
    "restart_with_constants",
    "root_mesh",
    "settings",
    "shown_by_torch",
    "skip_code",
    "split_factor",
    "strided_shard",
    "tensor_inside",
    "trace_artifact",
    "traced_as",
    "tree_leaves",
    "tree_map_only",
    "vector_instructions",
    "whole_stand_in",
    "with_choices",
    "with_cpu_autocast",
    "with_decompositions",
    "with_entered_autocast",
    "with_settings",
    "without_autograd_cache",
    "without_dtensor_handler",
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
    name: value for name, value in _KEEPS_ORDER.items() if name in inductor_config.get_config_copy()
}


def inductor_settings() -> dict[str, Any]:
    """Inductor's settings, each with its present value."""
    found: dict[str, Any] = inductor_config.get_config_copy()
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
        return inductor.compile_fx(gm, inputs, **options)


def compile_fx_inner(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor, for one graph after AOTAutograd."""
    with _quiet():
        return inductor.compile_fx_inner(gm, inputs, **options)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The modes of torch.compile, each with its settings of Inductor."""
    return list_mode_options()


def with_settings(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context with these settings of Inductor."""
    context: AbstractContextManager[None] = inductor_config.patch(dict(settings))
    return context


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_within(constant)


#: Code objects on the stack during the call of a module.
# 2.11.0 to 2.15.0
MODULE_CALLS: tuple[CodeType, ...] = (
    nn.Module._wrapped_call_impl.__code__,
    nn.Module._call_impl.__code__,
)
#: Code objects on the stack during the call of a torch.compile result for a function.
COMPILED_CALLS: tuple[CodeType, ...] = tuple(_codes_within(_TorchDynamoContext.__call__.__code__))
#: Code objects on the stack during the backward of an autograd.Function.
# 2.11.0 to 2.15.0; in 2.15 autograd calls ``apply_boxed`` for boxed gradients.
CUSTOM_BACKWARDS: tuple[CodeType, ...] = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
)

E = TypeVar("E", bound=Exception)
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
#: Takes and returns Inductor's kernels in their order.
KernelPass = Callable[[list[BaseSchedulerNode]], list[BaseSchedulerNode]]


def restart_tracing() -> NoReturn:
    """From within a backend: make Dynamo trace the frame again from its start.

    Dynamo keeps a log of its speculations and refuses a trace that differs from it. This function
    clears the log, because the model has changed on purpose.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: the model was sharded")


#: AOTAutograd raises this to make Dynamo trace the frame again with floats as constants.
RestartTracing = TensorifyScalarRestartAnalysis


def constant_floats() -> list[str]:
    """The symbols of floats that become constants when Dynamo traces this frame again."""
    return sorted(TensorifyState.force_specializations)


def restart_with_constants(symbols: Sequence[str]) -> NoReturn:
    """From within a backend: make Dynamo trace the frame again with these floats as constants."""
    for symbol in symbols:
        TensorifyState.specialize(symbol)
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: rank 0 traces the frame again")


def raise_to_user(error: Exception, mixin: type | None = None) -> NoReturn:
    """Raise an error from a backend so that the user gets its own type.

    Dynamo wraps errors of a backend into BackendCompilerFailed, except its own ShortenTraceback.
    So the raised error is of a subclass of both. Its traceback begins at the backend, not in Dynamo
    (the whole traceback with TORCHDYNAMO_VERBOSE=1).

    ``mixin``: another base of the subclass, for errors that a user can act on. These have no
    traceback and no cause.
    """
    kind = type(error)
    if isinstance(error, ShortenTraceback):
        raise error
    said, reduced = str(error), error.__reduce__()
    own = {
        "__module__": kind.__module__,
        "__str__": lambda self: said,  # Dynamo adds advice about its traceback to ``args``
        "__reduce__": lambda self: reduced,
    }
    bases = (kind, ShortenTraceback) if mixin is None else (mixin, kind, ShortenTraceback)
    both: Any = type(kind.__name__, bases, own)
    raised = both.__new__(both)
    # Sets the attributes that Dynamo reads when it suppresses errors; newer versions have more.
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe(1))
    raised.__dict__.update(error.__dict__)
    if mixin is not None:
        raise raised from None
    raise raised.with_traceback(error.__traceback__) from error.__cause__


def reduced_by_ddp() -> list[nn.Parameter]:
    """The parameters of the DistributedDataParallel module being called, if any."""
    # 2.11.0 to 2.15.0: Dynamo itself calls this to split graphs at DDP's buckets.
    active = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return [] if active is None else list(active._module_parameters)


# 2.11.0 to 2.15.0: the code that calls a module; the file of torch.compile's wrapper
# function, which calls ``fn(*args, **kwargs)``; the file in which Dynamo compiles a frame.
_CALLS_MODULE = nn.Module._call_impl.__code__
_COMPILED_CALLABLES = eval_frame.__file__
_COMPILER = convert_frame.__file__
_CALLS = (torch.nn.modules.module.__file__, _COMPILED_CALLABLES)


def called_module(frame: FrameType) -> nn.Module | None:
    """The module that a frame calls; None: not torch's frame for a module call."""
    return frame.f_locals.get("self") if frame.f_code is _CALLS_MODULE else None


def called_function(frame: FrameType) -> Callable[..., Any] | None:
    """The function given to ``torch.compile``, if the frame is of its wrapper; else None."""
    if frame.f_code.co_filename != _COMPILED_CALLABLES:
        return None
    found = frame.f_locals
    return found["fn"] if {"fn", "args", "kwargs"} <= found.keys() else None


def backend_of_compiled(compiled: Any) -> Any:
    """The backend of a compiled module or function; None: not compiled."""
    # 2.11.0 to 2.15.0: attributes of OptimizedModule and of a compiled function.
    context = vars(compiled).get("dynamo_ctx") if isinstance(compiled, nn.Module) else None
    if context is None and "_torchdynamo_orig_callable" in getattr(compiled, "__dict__", {}):
        held = closed_over(compiled).values()
        context = next((one for one in held if isinstance(one, eval_frame.OptimizeContext)), None)
    if not isinstance(context, eval_frame.OptimizeContext):
        return None
    found: Any = eval_frame.innermost_backend(context.callback)  # type: ignore[arg-type]
    return getattr(found, "compiler_fn", found)


def original_function(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``torch.compile`` compiled."""
    original: Callable[..., Any] = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return original


def is_dynamos_compiler(frame: FrameType) -> bool:
    """Whether a frame belongs to Dynamo's frame compiler."""
    return frame.f_code.co_filename == _COMPILER


def is_users_code(frame: FrameType) -> bool:
    """Whether a frame of a running call is not part of torch's call machinery."""
    return frame.f_code.co_filename not in _CALLS


def pipeline_part(frame: FrameType) -> Any:
    """The pipeline stage or schedule whose method the frame runs; None: of neither."""
    # 2.13.0, 2.15.0: the files and the base classes of stages and of schedules.
    for file, base in (("stage", "_PipelineStageBase"), ("schedules", "_PipelineSchedule")):
        module = sys.modules.get(f"torch.distributed.pipelining.{file}")
        if module is not None and frame.f_code.co_filename == module.__file__:
            own = frame.f_locals.get("self")
            return own if isinstance(own, getattr(module, base)) else None
    return None


def microbatches_of(schedule: Any) -> int:
    """The microbatches of a pipeline schedule's step."""
    found: int = schedule._n_microbatches  # 2.13.0, 2.15.0
    return found


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """Whether this graph ends at a graph break."""
    # 2.11.0 to 2.15.0: the reason for the end of a graph.
    return bool(gm.compile_subgraph_reason.graph_break)  # type: ignore[union-attr]


def leave_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode. After an error in a backward, autograd has taken it from the stack."""
    if _get_current_dispatch_mode() is not mode:
        _push_mode(mode)
    mode.__exit__(None, None, None)


def is_marked_by_fsdp(module: nn.Module) -> bool:
    """Whether a module is inside one that FSDP1 or FSDP2 shards."""
    # 2.11.0 to 2.15.0: both mark modules for Dynamo with this attribute.
    return bool(module.__dict__.get("_is_fsdp_managed_module", False))


def current_frame() -> int | None:
    """The id of the frame being compiled; the same for a recompilation; None outside Dynamo."""
    compiling = CompileContext.current_compile_id()
    return compiling.frame_id if compiling is not None else None


def compile_id() -> CompileId | None:
    """The compilation under way, as torch's logs name it; None outside Dynamo."""
    return CompileContext.current_compile_id()


def shown_by_torch(loggers: Sequence[str]) -> list[str]:
    """Those of these loggers to which TORCH_LOGS or ``torch._logging.set_logs`` gave a level."""
    return [name for name in loggers if name in torch_logs.log_state.log_qname_to_level]


def is_traced() -> bool:
    """Whether torch's structured log (TORCH_TRACE) is written.

    Without TORCH_TRACE torch's own handler has no folder, and leaves at the first entry. pytest
    adds the handlers of the root logger; they write no structured log.
    """
    return any(
        not isinstance(handler, torch_logs.LazyTraceHandler) or handler.root_dir is not None
        for handler in torch_logs.trace_log.handlers
        if handler not in logging.root.handlers
    )


def trace_artifact(
    name: str, encoding: str, payload: Callable[[], str], compiled: CompileId | None
) -> None:
    """Write an artifact to torch's structured log. tlparse shows it as a file of this name.

    Args:
        name: without an ending; tlparse adds a number and the ending.
        encoding: ``"string"`` or ``"json"``.
        payload: called only if the log is written.
        compiled: the compilation that it belongs to, if Dynamo compiles no frame now.
    """
    torch_logs.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        compile_id=compiled,
    )


def recompile_reason() -> str | None:
    """The reason for the recompilation of this frame; None: first compilation."""
    # 2.11.0 to 2.15.0: Dynamo's record of the current compilation.
    reason = get_metrics_context()._metrics.get("recompile_reason")
    return None if reason is None else str(reason)


def source_chain(placeholder: fx.Node) -> list[str]:
    """The expressions of a graph input's source, outermost first: ``L['m']``, ``L['m']._mod…``."""
    source = getattr(placeholder, "_dynamo_source", None)
    names: list[str] = []
    while source is not None:
        name = source.name() if callable(source.name) else source.name
        names.append(name)
        source = getattr(source, "base", None)
    return names[::-1]


def code_being_compiled() -> CodeType:
    """From within a backend: the code of the frame that Dynamo compiles."""
    # 2.11.0 to 2.15.0
    code: CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code


def forget_compiled(code: CodeType) -> None:
    """Make Dynamo compile a code again at its next call. It must not run or be compiled now."""
    eval_frame.remove_from_cache(code)


def copy_source(placeholder: fx.Node, copied: fx.Node) -> None:
    """Give a copy of a graph input the input's Dynamo source."""
    copied._dynamo_source = placeholder._dynamo_source  # type: ignore[attr-defined]


def evaluate_prefixes(placeholder: fx.Node) -> list[tuple[str, Any]]:
    """(expression, object) along a graph input's source in the traced frame, outermost first."""
    output = InstructionTranslator.current_tx().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    found = []
    for name in source_chain(placeholder):
        try:
            found.append((name, eval(name, dict(output.global_scope), scope)))
        except Exception:  # uses Dynamo's own helpers; a longer prefix may evaluate
            continue
    return found


def aot_input_index(node: fx.Node) -> int | None:
    """Index of the Dynamo graph's input behind an AOTAutograd placeholder; None: no such input."""
    return _plain_index(node.meta.get("desc"))


def gradient_input_index(description: Any) -> int | None:
    """Index of the input whose gradient is a joint graph output; None: no gradient."""
    while description is not None and not isinstance(description, GradAOTOutput):
        description = getattr(description, "base", None)
    return _plain_index(description.grad_of) if description is not None else None


def is_saved(tensor: Tensor) -> bool:
    """Whether autograd holds the tensor: it saved it, or will accumulate its gradient."""
    # 2.11.0 to 2.15.0: C++ references; all Python references count as one.
    counted: Any = tensor
    return bool(counted._use_count() > 1)


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


def allocations_of(run: Callable[[], object]) -> list[int]:
    """This thread's CPU allocations in a function, in bytes; frees are negative.

    What the function returns is not freed.

    Raises:
        RuntimeError: a profiler records this thread.
    """
    # 2.11.0 to 2.15.0: the profiler before Kineto, which writes no lines of its own to stderr.
    state, config = torch._C._profiler.ProfilerState.CPU, torch._C._profiler._ExperimentalConfig()
    torch._C._autograd._enable_profiler_legacy(
        torch._C._profiler.ProfilerConfig(state, False, True, False, False, False, config)
    )
    try:
        result = run()  # noqa: F841  (alive until the record ends)
    finally:
        threads = torch._C._autograd._disable_profiler_legacy()
    events: list[Any] = [event for thread in threads for event in thread]
    return [one.cpu_memory_usage() for one in events if one.kind() == "memory_alloc"]


def free_cublas_workspaces() -> None:
    """Free the memory that cuBLAS holds for this process's threads; it takes it again."""
    # 2.11.0 to 2.15.0: the only way; CUDA graph trees use it.
    torch._C._cuda_clearCublasWorkspaces()


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


def fake_store() -> Any:
    """A store for the "fake" process group backend, whose collectives do nothing."""
    # 2.11.0 to 2.15.0: imported here, because the import registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh over a named mesh's ranks, made once. Collective."""
    # 2.13.0: DeviceMesh._flatten; ``mesh["host_gpu"]`` finds it afterwards.
    return mesh._flatten()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which this one is some dimensions; itself if it is no part."""
    # 2.13.0, 2.15.0: DeviceMesh._get_root_mesh
    return mesh._get_root_mesh()


def forget_placements() -> None:
    """Empty DTensor's caches of placements by operator.

    The output of a distributed embedding is a partial sum, whose placement holds a mask until the
    sum is complete. In a graph that ends before, this is a mask of the trace, and the next trace of
    such an embedding fails: it finds the placement in the cache.
    """
    _clear_sharding_prop_cache()  # 2.13.0, 2.15.0


def tensor_inside(tensor: DTensor) -> Tensor:
    """The local tensor that a DTensor holds; ``to_local()`` of a parameter is a view of it."""
    # 2.13.0, 2.15.0: DTensor._local_tensor
    local: Tensor = tensor._local_tensor
    return local


def strided_shard(dim: int, parts: int) -> Placement:
    """FSDP2's placement of rows that other mesh dimensions cut into ``parts`` before."""
    return _StridedShard(dim, split_factor=parts)


def split_factor(placement: Placement) -> int | None:
    """The parts before, of a placement of :func:`strided_shard`; None: it is another placement."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def is_process_group(name: Any) -> bool:
    """Whether functional collectives know a group of this name."""
    try:
        process_group(name)
    except RuntimeError:
        return False
    return True


def without_autograd_cache() -> Any:
    """A context without AOTAutograd's cache of Dynamo graphs: its key lacks the plan, on which the
    result depends."""
    return functorch_config.patch(enable_autograd_cache=False)


def is_profiled() -> bool:
    """Whether a profiler records this thread."""
    # 2.11.0 to 2.15.0
    enabled: bool = torch._C._autograd._profiler_enabled()
    return enabled


def hooks_saved_tensors() -> bool:
    """Whether hooks pack the tensors that autograd saves now."""
    # 2.11.0 to 2.15.0: AOTAutograd asks this too; True: also while tracing.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None


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


# 2.13.0: DTensor's operator -> custom handler(operator, args, kwargs).
_dtensor_handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers


def handle_dtensor_operator(operator: Any, handler: Callable[..., Any] | None) -> None:
    """Set ``handler(operator, args, kwargs)`` for an operator on DTensors; None: torch's own."""
    if handler is None:
        _dtensor_handlers.pop(operator, None)
    else:
        _dtensor_handlers[operator] = handler


def take_gradient(tensor: Tensor) -> Tensor | None:
    """The ``grad`` of a tensor itself, past its class's ``__torch_function__``; it loses it."""
    with torch._C.DisableTorchFunctionSubclass():  # 2.13.0
        gradient, tensor.grad = tensor.grad, None
    return gradient


def handle_total_norm(whole: Callable[[Tensor], Tensor]) -> None:
    """Make ``clip_grad_norm_`` and ``get_total_norm`` take ``whole(norm)`` for the total norm."""
    # 2.13.0: clip_grad_norm_ calls this; torch.nn.utils.get_total_norm is another name of it.
    plain: Callable[..., Tensor] = clip_grad._get_total_norm

    @functools.wraps(plain)
    def total_norm(*args: Any, **kwargs: Any) -> Tensor:
        return whole(plain(*args, **kwargs))

    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm


def handle_dtensor_data(assign: Callable[[DTensor, Any], None]) -> None:
    """Make ``dtensor.data = value`` call ``assign(dtensor, value)``."""
    # 2.13.0: torch sets the wrapper's data. The local tensor stays the same.
    plain: Any = Tensor.data
    setattr(DTensor, "data", property(plain.__get__, assign))  # noqa: B010


def handle_adafactor(on_rows: Callable[..., None]) -> None:
    """Make Adafactor step each DTensor parameter with ``on_rows(parameter, ...)``."""
    # 2.13.0: Adafactor.step calls this for a group: lists of tensors, then options.
    plain: Callable[..., None] = _adafactor.adafactor

    @functools.wraps(plain)
    def adafactor(params: list[Tensor], *lists: Any, **options: Any) -> None:
        state, rest = lists[:5], lists[5:]
        of_params = list(zip(params, *state, strict=True))
        whole = [one for one in of_params if not isinstance(one[0], DTensor)]
        if whole:
            plain(*map(list, zip(*whole, strict=True)), *rest, **options)
        for one in of_params:
            if isinstance(one[0], DTensor):
                on_rows(*one, **options)

    _adafactor.adafactor = adafactor


def handle_muon(is_ours: Callable[[Tensor], bool], step: Callable[..., None]) -> None:
    """Make Muon step the matrices that ``is_ours`` says with ``step``.

    ``step``: :func:`osdp_compile.optim.muon.step_by_owners`.
    """
    # 2.13.0, 2.15.0: Muon.step calls this for a group: lists of tensors, then options.
    plain: Callable[..., None] = _muon.muon

    @functools.wraps(plain)
    def muon(
        params: list[Tensor], grads: list[Tensor], momentums: list[Tensor], **options: Any
    ) -> None:
        ours: list[tuple[Tensor, Tensor, Tensor]] = []
        theirs: list[tuple[Tensor, Tensor, Tensor]] = []
        for one in zip(params, grads, momentums, strict=True):
            (ours if is_ours(one[0]) else theirs).append(one)
        if theirs or options.get("foreach"):  # which torch refuses
            plain(*([one[i] for one in theirs] for i in range(3)), **options)
        if not ours:
            return
        lr = float(options["lr"])
        adjusted = functools.partial(_muon._adjust_lr, lr, options["adjust_lr_fn"])
        newton = (options[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        step(
            [(*one, adjusted(one[0].shape)) for one in ours],
            orthogonalized=functools.partial(_orthogonalized, *newton),
            decay=1 - lr * options["weight_decay"],
            momentum=options["momentum"],
            nesterov=options["nesterov"],
        )

    # A compiled ``optimizer.step`` breaks its graph here: Dynamo traces no exchange.
    _muon.muon = torch.compiler.disable(muon)


def _orthogonalized(
    coefficients: tuple[float, float, float], steps: int, eps: float, update: Tensor
) -> Tensor:
    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, eps)


def without_dtensor_handler(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on DTensors without our handler."""
    handler = _dtensor_handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        _dtensor_handlers[operator] = handler


def whole_stand_in(parameter: nn.Parameter, shape: Sequence[int]) -> nn.Parameter:
    """A whole fake parameter in place of a DTensor parameter of the graph being compiled."""
    mode = TracingContext.get().fake_mode
    assert mode is not None  # a backend is called with one
    with mode:
        empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def attention_order() -> list[SDPBackend]:
    """The kernels of ``scaled_dot_product_attention``, the preferred one first."""
    # 2.11.0 to 2.15.0
    named: Mapping[str, Any] = SDPBackend.__members__
    members = {int(one): one for one in named.values()}
    return [members[one] for one in torch._C._get_sdp_priority_order()]


@contextlib.contextmanager
def traced_as(operator: OpOverload, function: Callable[..., Any]) -> Iterator[None]:
    """Context: a trace calls a function in place of a composite operator; eager code does not."""
    # 2.11.0 to 2.15.0: py_kernels holds the functions that a trace calls, by dispatch key.
    # _dispatch_cache holds the functions of earlier calls, by dispatch key.
    own = dict(operator.py_kernels)
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    try:
        operator.py_kernels.update(dict.fromkeys(keys, function))
        operator._dispatch_cache.clear()
        yield
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(own)
        operator._dispatch_cache.clear()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Context: a name of a module is what a function makes of it."""
    plain = getattr(owner, name)
    try:
        setattr(owner, name, make(plain))
        yield
    finally:
        setattr(owner, name, plain)


def with_decompositions(
    changed: Mapping[OpOverload, Callable[..., Any]],
) -> AbstractContextManager[None]:
    """A context in which AOTAutograd, called by Inductor, decomposes some operators otherwise."""
    # 2.11.0 to 2.15.0: compile_fx asks this function for its table.
    return _replaced(inductor, "select_decomp_table", lambda table: lambda: {**table(), **changed})


def plain_decomposition(operator: OpOverload) -> Callable[..., Any]:
    """Inductor's decomposition of an operator."""
    table: Callable[[], Mapping[Any, Callable[..., Any]]] = vars(inductor)["select_decomp_table"]
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

    with _replaced(inductor, "_recursive_joint_graph_passes", counting):  # 2.11.0 to 2.15.0
        yield lambda: running > 0


def autocast_operators(device: str) -> set[str]:
    """Operators that autocast changes on a device, ``CPU`` or ``CUDA``, as ``softmax.int``."""
    # 2.11.0 to 2.15.0
    found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
    return {name.removeprefix("aten::") for name in found if name.startswith("aten::")}


@contextlib.contextmanager
def with_cpu_autocast(kernels: Mapping[str, Callable[..., Any] | None]) -> Iterator[None]:
    """Context: the CPU's autocast runs these functions for these operators; None: it ignores them.

    Inside a function autocast is off.
    """
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def below(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(key):  # 2.11.0 to 2.15.0
                return function(*args, **kwargs)

        return call

    # 2.11.0 to 2.15.0: a library whose kernels go with its end.
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, function in kernels.items():
                kernel = torch.library.fallthrough_kernel if function is None else below(function)
                library.impl(name, kernel, "AutocastCPU")
        yield


def with_entered_autocast(changed: Callable[..., tuple[Any, ...]]) -> AbstractContextManager[None]:
    """A context in which a compiled ``torch.autocast(...)`` enters one of other arguments."""

    def entering(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: plain(*changed(*given))

    # 2.11.0 to 2.15.0: Dynamo calls it, and writes the call into the graph.
    return _replaced(torch.amp, "_enter_autocast", entering)

"""Everything private to torch that the package relies on, each name with the versions checked.

Nothing else in ``osdp_compile/`` imports from ``torch._*``.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn

# 2.11.0, 2.13.0: makes wait_tensor(tensor) wait for a piece of work; several add up.
from torch._C._distributed_c10d import _register_work as register_work

# 2.11.0, 2.13.0, 2.15.0: where calls of compiled functions and of Dynamo's compiler stand.
from torch._dynamo import convert_frame, eval_frame

# 2.13.0: a function that Dynamo does not compile by itself, and traces where a frame calls it.
# 2.11.0, 2.13.0, 2.15.0: what torch.compile wraps functions in, by a function within __call__.
from torch._dynamo.eval_frame import _TorchDynamoContext, skip_code

# 2.11.0, 2.13.0: passed through by Dynamo from a backend's compile call; the frame is traced again.
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis

# 2.11.0, 2.13.0, 2.15.0: the frame that is being traced; the floats that Dynamo makes constants of
# when it traces a frame again.
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState

# 2.11.0, 2.13.0, 2.15.0: see :func:`recompile_reason`.
from torch._dynamo.utils import get_metrics_context

# 2.11.0, 2.13.0: settings of AOTAutograd and Dynamo, patched around one compilation.
from torch._functorch import config as functorch_config

# 2.11.0, 2.13.0: origins of AOTAutograd's inputs and outputs (node.meta["desc"]).
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

# 2.11.0, 2.13.0: which frame Dynamo is compiling.
# 2.13.0: the fake tensors' mode of the graph that is being compiled.
from torch._guards import CompileContext, TracingContext

# 2.11.0 to 2.15.0: Inductor's settings.
from torch._inductor import config as inductor_config

# 2.11.0, 2.13.0: what Inductor fuses, with hooks (``InductorChoices.can_fuse_vertical``); what
# the hooks look at: ``name_to_node``, ``ancestors``, ``min_order``, ``is_extern``, ``users``.
from torch._inductor.choices import InductorChoices

# 2.13.0: compiles C++ as Inductor compiles its own, into its cache, and loads it.
from torch._inductor.codecache import CppCodeCache

# 2.11.0, 2.13.0: Inductor's front door, with a hook for the compiler of each partition.
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

# 2.11.0, 2.13.0: the hook for the partitioner.
from torch._inductor.custom_graph_pass import CustomPartitionerFn

# 2.11.0, 2.13.0: what is fused.
from torch._inductor.scheduler import BaseSchedulerNode

# 2.11.0, 2.13.0: where Inductor finds its choices.
from torch._inductor.virtualized import V

# 2.11.0, 2.13.0: tensors that have a shape and a device but no memory.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# 2.11.0, 2.13.0, 2.15.0: the node of an autograd.Function in the backward.
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# 2.13.0: Adafactor's step of a group, as a function of lists.
from torch.optim import _adafactor

# 2.11.0, 2.13.0: tensors inside nested containers and dataclasses such as model outputs.
from torch.utils._pytree import tree_leaves, tree_map_only

from osdp_compile.live_objects import closed_over

__all__ = [
    "COMPILED_CALLS",
    "CUSTOM_BACKWARDS",
    "MODULE_CALLS",
    "BaseSchedulerNode",
    "FakeTensor",
    "FakeTensorMode",
    "InductorChoices",
    "Partitioner",
    "RestartTracing",
    "aot_input_index",
    "code_being_compiled",
    "compile_fx",
    "compile_fx_inner",
    "compiled_library",
    "constant_floats",
    "copy_source",
    "current_frame",
    "evaluate_prefixes",
    "fake_store",
    "flattened",
    "forget_compiled",
    "gradient_input_index",
    "handle_adafactor",
    "handle_dtensor_operator",
    "is_marked_by_fsdp",
    "raise_to_user",
    "recompile_reason",
    "reduced_by_ddp",
    "register_work",
    "restart_tracing",
    "restart_with_constants",
    "skip_code",
    "tree_leaves",
    "tree_map_only",
    "whole_stand_in",
    "with_choices",
    "without_autograd_cache",
    "without_dtensor_handler",
]

#: Every setting of Inductor that moves, joins or replaces nodes of the graph it is given, or adds
#: tensors, with the value under which it does not. Versions have different ones of them.
_KEEPS_ORDER: dict[str, Any] = {
    # It moves nodes, in the graph and in the scheduler. 2.14 and later: a pass after fusion that
    # moves native collectives and their waits, on by default.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_locality_in_training": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    # It joins collectives, or replaces them.
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "aten_distributed_optimizations.allow_comms_decompositions": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "_micro_pipeline_tp": False,
    # It refuses fusions by a memory timeline of its own.
    "fusion_memory_timeline_peak_allowed_increase_mb": None,
    "fusion_memory_timeline_peak_memory_increase_gb": None,
    "fusion_memory_timeline_peak_memory_pct_threshold": None,
    # It keeps memory for later buffers.
    "allow_buffer_reuse": False,
    # It copies every convolution's weight to channels-last in the forward and saves the copy for
    # the backward, gathered weights too.
    "layout_optimization": False,
}

#: Those of them that this torch has; it refuses others. 2.11.0 to 2.15.0: get_config_copy.
KEEP_ORDER: dict[str, Any] = {
    name: value for name, value in _KEEPS_ORDER.items() if name in inductor_config.get_config_copy()
}


def _codes_within(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_within(constant)


#: The code that runs while a module is called.
# 2.11.0, 2.13.0, 2.15.0
MODULE_CALLS: tuple[CodeType, ...] = (
    nn.Module._wrapped_call_impl.__code__,
    nn.Module._call_impl.__code__,
)
#: The code that runs while what torch.compile returned for a function is called.
COMPILED_CALLS: tuple[CodeType, ...] = tuple(_codes_within(_TorchDynamoContext.__call__.__code__))
#: The code that runs while the backward of an autograd.Function is called.
# 2.11.0, 2.13.0, 2.15.0; what ``apply`` calls in 2.15 takes boxed gradients.
CUSTOM_BACKWARDS: tuple[CodeType, ...] = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")
    if hasattr(BackwardCFunction, name)
)

E = TypeVar("E", bound=Exception)
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def restart_tracing() -> NoReturn:
    """From within a backend: have Dynamo trace the frame again from its start.

    Dynamo remembers how far it speculated and would refuse a trace that differs; the
    log is cleared because the model has changed in between on purpose.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: the model was sharded")


#: What AOTAutograd raises to have Dynamo trace the frame again with floats as constants.
RestartTracing = TensorifyScalarRestartAnalysis


def constant_floats() -> list[str]:
    """The symbols of the floats that Dynamo makes constants of when it traces this frame again."""
    return sorted(TensorifyState.force_specializations)


def restart_with_constants(symbols: Sequence[str]) -> NoReturn:
    """From within a backend: have Dynamo trace the frame again with these floats as constants."""
    for symbol in symbols:
        TensorifyState.specialize(symbol)
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: rank 0 traces the frame again")


def raise_to_user(error: Exception, mixin: type | None = None) -> NoReturn:
    """Raise an error from a backend so that it reaches the user as its own type.

    Dynamo wraps what a backend raises into BackendCompilerFailed, save for its own
    ShortenTraceback: the error gets a subclass that is both. The traceback the user sees
    begins at the backend, not in Dynamo (all of it with TORCHDYNAMO_VERBOSE=1).

    ``mixin``: another base of that subclass, for an error that a user can act on: its traceback
    and its cause are left out.
    """
    kind = type(error)
    if isinstance(error, ShortenTraceback):
        raise error
    said, reduced = str(error), error.__reduce__()
    own = {
        "__module__": kind.__module__,
        "__str__": lambda self: said,  # Dynamo adds advice on its own traceback to ``args``
        "__reduce__": lambda self: reduced,
    }
    bases = (kind, ShortenTraceback) if mixin is None else (mixin, kind, ShortenTraceback)
    both: Any = type(kind.__name__, bases, own)
    raised = both.__new__(both)
    # What Dynamo reads where errors are suppressed is set there, in newer versions more.
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe(1))
    raised.__dict__.update(error.__dict__)
    if mixin is not None:
        raise raised from None
    raise raised.with_traceback(error.__traceback__) from error.__cause__


def reduced_by_ddp() -> list[nn.Parameter]:
    """The parameters of the DistributedDataParallel module that is being called, if one is."""
    # 2.11.0, 2.13.0: what Dynamo itself asks to split graphs at DDP's buckets.
    active = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return [] if active is None else list(active._module_parameters)


# 2.11.0, 2.13.0, 2.15.0: the code that calls a module, the file of what torch.compile returns
# (a function that calls ``fn(*args, **kwargs)``), and the one from which Dynamo compiles a frame.
_CALLS_MODULE = nn.Module._call_impl.__code__
_COMPILED_CALLABLES = eval_frame.__file__
_COMPILER = convert_frame.__file__
_CALLS = (torch.nn.modules.module.__file__, _COMPILED_CALLABLES)


def called_module(frame: FrameType) -> nn.Module | None:
    """The module that a frame calls, if it is torch's frame that calls one."""
    return frame.f_locals.get("self") if frame.f_code is _CALLS_MODULE else None


def called_function(frame: FrameType) -> Callable[..., Any] | None:
    """What ``torch.compile`` was given, if a frame is of what it returned."""
    if frame.f_code.co_filename != _COMPILED_CALLABLES:
        return None
    found = frame.f_locals
    return found["fn"] if {"fn", "args", "kwargs"} <= found.keys() else None


def backend_of_compiled(compiled: Any) -> Any:
    """The backend that a module or a function was compiled with; None: it is not compiled."""
    # 2.11.0, 2.13.0, 2.15.0: what OptimizedModule and a compiled function keep of it.
    context = vars(compiled).get("dynamo_ctx") if isinstance(compiled, nn.Module) else None
    if context is None and "_torchdynamo_orig_callable" in getattr(compiled, "__dict__", {}):
        held = closed_over(compiled).values()
        context = next((one for one in held if isinstance(one, eval_frame.OptimizeContext)), None)
    if not isinstance(context, eval_frame.OptimizeContext):
        return None
    found: Any = eval_frame.innermost_backend(context.callback)  # type: ignore[arg-type]
    return getattr(found, "compiler_fn", found)


def original_function(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile`` made a function of."""
    original: Callable[..., Any] = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return original


def is_dynamos_compiler(frame: FrameType) -> bool:
    """Whether a frame is where Dynamo begins to compile another one."""
    return frame.f_code.co_filename == _COMPILER


def is_users_code(frame: FrameType) -> bool:
    """Whether a frame of a call under way is not torch's way of making calls."""
    return frame.f_code.co_filename not in _CALLS


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo stopped in the middle of a frame to have made this graph."""
    # 2.11.0, 2.13.0, 2.15.0: why a graph ends where it does.
    return bool(gm.compile_subgraph_reason.graph_break)  # type: ignore[union-attr]


def is_marked_by_fsdp(module: nn.Module) -> bool:
    """Whether a module is inside one that FSDP shards, of either kind."""
    # 2.11.0, 2.13.0, 2.15.0: what both mark modules with for Dynamo.
    return bool(module.__dict__.get("_is_fsdp_managed_module", False))


def current_frame() -> int | None:
    """The number of the frame being compiled, the same when it is compiled again; None outside."""
    compiling = CompileContext.current_compile_id()
    return compiling.frame_id if compiling is not None else None


def recompile_reason() -> str | None:
    """Why the frame that is being compiled was compiled before and is now again; None if not."""
    # 2.11.0, 2.13.0, 2.15.0: what Dynamo records of the compilation under way.
    reason: str | None = get_metrics_context()._metrics.get("recompile_reason")
    return reason


def source_chain(placeholder: fx.Node) -> list[str]:
    """The expressions that lead to a graph input, outermost first: ``L['m']``, ``L['m']._mod…``."""
    source = getattr(placeholder, "_dynamo_source", None)
    names: list[str] = []
    while source is not None:
        name = source.name() if callable(source.name) else source.name
        names.append(name)
        source = getattr(source, "base", None)
    return names[::-1]


def code_being_compiled() -> CodeType:
    """The code of the frame that Dynamo compiles, from within a backend."""
    # 2.11.0, 2.13.0, 2.15.0
    code: CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code


def forget_compiled(code: CodeType) -> None:
    """Have Dynamo compile a code again at its next call. It must not be running or compiled now."""
    eval_frame.remove_from_cache(code)


def copy_source(placeholder: fx.Node, copied: fx.Node) -> None:
    """Say of a copy of a graph input where the input lives."""
    copied._dynamo_source = placeholder._dynamo_source  # type: ignore[attr-defined]


def evaluate_prefixes(placeholder: fx.Node) -> list[tuple[str, Any]]:
    """The objects on the way to a graph input in the frame being traced, outermost first."""
    output = InstructionTranslator.current_tx().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    found = []
    for name in source_chain(placeholder):
        try:
            found.append((name, eval(name, dict(output.global_scope), scope)))
        except Exception:  # an expression of Dynamo's own helpers: a longer prefix may do
            continue
    return found


def aot_input_index(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph an AOTAutograd placeholder comes from; None if none."""
    return _plain_index(node.meta.get("desc"))


def gradient_input_index(description: Any) -> int | None:
    """Which input's gradient an output of the joint graph is; None if it is no gradient."""
    while description is not None and not isinstance(description, GradAOTOutput):
        description = getattr(description, "base", None)
    return _plain_index(description.grad_of) if description is not None else None


def is_saved(tensor: Tensor) -> bool:
    """Whether more than Python holds a tensor: autograd saved it, or will add to its gradient."""
    # 2.11.0, 2.13.0, 2.15.0: references to a tensor, all of Python's counted as one.
    return tensor._use_count() > 1  # type: ignore[attr-defined]


def result_index(description: Any) -> int | None:
    """Which of the Dynamo graph's results an output of a forward is; None if none."""
    while description is not None and not isinstance(description, PlainAOTOutput):
        description = getattr(description, "base", None)
    return description.idx if description is not None else None


def tangent_result_index(description: Any) -> int | None:
    """The gradient of which of the Dynamo graph's results a backward is given; None if none."""
    return result_index(description.output) if isinstance(description, TangentAOTInput) else None


def _plain_index(description: Any) -> int | None:
    while description is not None and not isinstance(description, PlainAOTInput):
        description = getattr(description, "base", None)
    return description.idx if description is not None else None


class Partitioner(CustomPartitionerFn):
    """A partitioner for Inductor's settings, from a plain function."""

    def __init__(self, function: Partition) -> None:
        self.function = function

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.function(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        # Inductor's cache looks up the graphs after our passes, so only what is fused in another
        # way (``osdp_compile/engine/inductor_fusion.py``) need be in its key.
        return "osdp_compile, kernels in place"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # all that the cache's key needs of it


def compiled_library(source: str) -> ctypes.CDLL:
    """A library of C++ source, compiled once a cache."""
    library: ctypes.CDLL = CppCodeCache.load(source)
    return library


def with_choices(choices: InductorChoices) -> AbstractContextManager[None]:
    """A context in which Inductor's choices are these, on this thread."""
    context: AbstractContextManager[None] = V.set_choices_handler(choices)
    return context


def fake_store() -> Any:
    """A store for the "fake" process group backend, whose collectives do nothing."""
    # 2.11.0, 2.13.0: imported here, for it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """The one-dimensional mesh over the ranks of a mesh with names, made once. Collective."""
    # 2.13.0: DeviceMesh._flatten; ``mesh["host_gpu"]`` finds it afterwards.
    return mesh._flatten()


def without_autograd_cache() -> Any:
    """A context in which AOTAutograd does not cache whole Dynamo graphs: what becomes of one
    depends on the plan, which its key does not hold."""
    return functorch_config.patch(enable_autograd_cache=False)


# 2.13.0: operators that DTensor carries out by a function of ours: (operator, args, kwargs).
_dtensor_handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers


def handle_dtensor_operator(operator: Any, handler: Callable[..., Any] | None) -> None:
    """From now on ``handler(operator, args, kwargs)`` carries it out on DTensors; None: torch."""
    if handler is None:
        _dtensor_handlers.pop(operator, None)
    else:
        _dtensor_handlers[operator] = handler


def handle_adafactor(on_rows: Callable[..., None]) -> None:
    """From now on Adafactor's step of one DTensor parameter is ``on_rows(parameter, ...)``."""
    # 2.13.0: what Adafactor.step calls for a group, a list for each argument, then options.
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


def without_dtensor_handler(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator as torch itself carries it out on DTensors."""
    handler = _dtensor_handlers.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        _dtensor_handlers[operator] = handler


def whole_stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """For a DTensor parameter of the graph that is being compiled: whole, and without memory."""
    mode = TracingContext.get().fake_mode
    assert mode is not None  # a backend is called with one
    with mode:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)

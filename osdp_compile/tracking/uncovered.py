"""Uncovered parameters: refuse an optimizer step on parameters that no compiled graph reads.

The backend learns of a model when Dynamo passes it a graph. Dynamo may pass none. It skips frames
(of an ``nn.LSTM``, say). ``torch._dynamo.disable`` excludes functions. Errors may be suppressed.
``torch.compiler.set_stance("force_eager")`` and the recompile limit end compilation. Parameters
that only such code reads are in no plan, and nothing averages their gradients: every rank would
train its own model. So before an optimizer's first step every gradient must be accounted for.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.live_objects import living
from osdp_compile.model.wrapped import check_not_in_fsdp
from osdp_compile.optim.step_hooks import before_steps
from osdp_compile.runtime.current_call import referred_to
from osdp_compile.tracking.other_data import check_same_data
from osdp_compile.tracking.session import find
from osdp_compile.tracking.unaveraged import check_averaged

#: Checked optimizers, with the number of parameters that had gradients.
_looked_at: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
#: Parameters whose mesh has one rank: no other rank trains them.
_alone: Any = WeakTensorKeyDictionary()
_watching: list[Any] = []


def watch_optimizers(backend: Callable[..., Any]) -> None:
    """Check optimizers before their steps, for models that are compiled with a backend."""
    if not _watching:
        _watching.append(
            before_steps(lambda optimizer, args, kwargs: check_covered(optimizer, backend))
        )


def leave_alone(inputs: Sequence[Any]) -> None:
    """Exempt the parameters of a graph on one rank: their gradients need no average."""
    for value in inputs:
        if isinstance(value, nn.Parameter):
            _alone[value] = True


def check_covered(optimizer: torch.optim.Optimizer, backend: Callable[..., Any]) -> None:
    """Refuse a step with gradients that nothing averaged.

    Raises:
        OsdpError: naming a parameter of a model that is compiled with the backend, or one that
            shares an optimizer with parameters of such a model.
    """
    stepping = [
        one for group in optimizer.param_groups for one in group["params"] if one.grad is not None
    ]
    if _looked_at.get(optimizer) == len(stepping):
        return
    # A step with learning rate zero: torch.distributed.checkpoint creates optimizer state so.
    if all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups):
        return
    if _ranks() > 1:
        unknown = [one for one in stepping if not _accounted_for(one)]
        if unknown:  # FSDP parameters, if Dynamo compiled nothing between its hooks
            check_not_in_fsdp(_of_compiled_models(unknown, backend))
        apart = [one for one in unknown if not isinstance(one, DTensor)]
        if apart:
            _check_apart(apart, stepping, backend)
        if optimizer not in _looked_at:
            check_averaged(stepping)
            check_same_data(stepping)
    _looked_at[optimizer] = len(stepping)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _accounted_for(parameter: nn.Parameter) -> bool:
    return find(parameter) is not None or parameter in _alone


def _of_compiled_models(
    parameters: Sequence[nn.Parameter], backend: Callable[..., Any]
) -> list[nn.Module]:
    """The models compiled with a backend that hold some of the parameters."""
    wanted = {id(one) for one in parameters}
    return [
        model
        for model in compiled_models(backend)
        if any(id(one) in wanted for one in model.parameters())
    ]


def _check_apart(
    apart: Sequence[nn.Parameter], stepping: Sequence[nn.Parameter], backend: Callable[..., Any]
) -> None:
    gc.collect()  # a model without a compiled form is not checked
    wrapped = living(nn.parallel.DistributedDataParallel)
    reduced = {id(parameter) for one in wrapped for parameter in one.parameters()}
    apart = [one for one in apart if id(one) not in reduced]
    names = {
        id(parameter): name
        for model in compiled_models(backend)
        for name, parameter in model.named_parameters()
    }
    own = [one for one in apart if id(one) in names]
    if not own and any(find(one) is not None for one in stepping):
        own = list(apart)  # they share the optimizer with a planned model
        for model in living(nn.Module):
            found = {id(one): name for name, one in model.__dict__.get("_parameters", {}).items()}
            names.update({key: name for key, name in found.items() if key not in names})
    if not own:
        return
    name = names.get(id(own[0]), f"of shape {tuple(own[0].shape)}")
    more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
    raise OsdpError(
        f"parameter {name!r}{more} is trained, and no graph that was compiled with backend='osdp' "
        "reads it: nothing averages its gradient, and every rank would step by its own. "
        'TORCH_LOGS="graph_breaks,recompiles" tells why Dynamo left out the code that reads it: '
        "nn.LSTM, GRU and RNN need torch._dynamo.config.allow_rnn = True; torch._dynamo.disable, "
        'suppress_errors, set_stance("force_eager") and the recompile limit leave code out, too. '
        "Have it compiled, call the module that holds it inside a compiled one, or average its "
        "gradients yourself and give it an optimizer of its own"
    )


def compiled_models(backend: Callable[..., Any]) -> Iterator[nn.Module]:
    """The live modules that are compiled with a backend, or that such a function refers to."""
    for module in list(living(nn.Module)):
        inner = module.__dict__.get("_compiled_call_impl")
        if inner is not None and _torch.dynamo.backend_of_compiled(inner) is backend:
            yield module
        elif _torch.dynamo.backend_of_compiled(module) is backend:
            yield getattr(module, "_orig_mod", module)
    for function in list(living(types.FunctionType)):
        if _torch.dynamo.backend_of_compiled(function) is backend:
            for _, module in referred_to(_torch.dynamo.original_function(function)):
                yield module

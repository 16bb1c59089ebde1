"""Refuse models in DistributedDataParallel or FSDP, before planning.

Both wrappers communicate themselves. Gradients would be averaged twice, or sharded parameters
sharded again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from osdp_compile import _torch
from osdp_compile.errors import OsdpError
from osdp_compile.model.find_modules import placeholders
from osdp_compile.runtime.current_call import modules_being_called


def check_not_wrapped(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Refuse a graph of a model in DistributedDataParallel or FSDP.

    Raises:
        OsdpError: naming the wrapper to leave out.
    """
    ways = [_torch.dynamo.evaluate_prefixes(node) for node in placeholders(gm)]
    read = [value for way in ways for _, value in way[-1:]]  # DDP's graph splits have fake inputs
    reduced = {id(parameter) for parameter in _torch.distributed.reduced_by_ddp()}
    if any(id(value) in reduced for value in (*inputs, *read)):
        raise OsdpError(
            "the model is wrapped in DistributedDataParallel, which reduces gradients itself: "
            "compile the wrapped module, torch.compile(model.module, backend='osdp'), and call the "
            "result. accelerate and transformers.Trainer wrap the models that they prepare: use "
            "osdp_compile.integrations.hf_trainer.OsdpTrainer; with accelerate, "
            "prepare_model(model, evaluation_mode=True), which brings autocast only, and then "
            "torch.compile"
        )
    owners = [value for way in ways for _, value in way if isinstance(value, nn.Module)]
    # Hooks break graphs, so the first graph may hold no parameter of the wrapped module.
    check_not_in_fsdp(dict.fromkeys([*owners, *modules_being_called()]))


def check_not_in_fsdp(models: Iterable[nn.Module]) -> None:
    """Refuse models that are in FSDP or contain an FSDP module.

    Raises:
        OsdpError: naming the calls to leave out.
    """
    if any(_is_in_fsdp(module) for model in models for module in model.modules()):
        raise OsdpError(
            "the model is in FSDP, which shards it itself: delete the calls of fully_shard, or "
            "FullyShardedDataParallel around it; backend='osdp' shards the model by its plan. "
            "options={'mesh': ..., 'param_dtype': ..., 'reduce_dtype': ...} replace their arguments"
        )


def _is_in_fsdp(module: nn.Module) -> bool:
    wrapped = isinstance(module, FSDPModule | FullyShardedDataParallel)
    return wrapped or _torch.distributed.is_marked_by_fsdp(module)

"""Trace for a GPU on the CPU: inside the context, torch traces CPU tensors with a GPU's operators.

Fake CUDA tensors would be the direct way. A build of torch without CUDA cannot make them, and the
builds with CUDA cannot run their backward without a GPU. So the tensors stay the CPU's, and what
torch decides by the device is decided here for the GPU:

- the kernel of an attention (``attention_choice.py``);
- which data types autocast computes in (``autocast.py``);
- the data type of a layer norm's statistics: that of its computation, not of its input;
- attention that a model writes out in float32 is one operator only where TF32 is allowed.

Outside the context nothing changes. Inside it, eager code of other threads runs as before. Only the
CPU's autocast is the process's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from osdp_compile import _torch
from osdp_compile.gpu_operators.attention import attend
from osdp_compile.gpu_operators.autocast import as_autocast_of_gpus
from osdp_compile.gpu_operators.gpu import Gpu

_aten = torch.ops.aten


@contextmanager
def as_on(gpu: Gpu | None) -> Iterator[None]:
    """Context: AOTAutograd and Inductor's joint-graph passes trace as on a GPU; None: as ever."""
    if gpu is None:
        yield
        return
    attention, norm = _aten.scaled_dot_product_attention.default, _aten.native_layer_norm.default
    with ExitStack() as stack:
        is_fused = stack.enter_context(_torch.inductor.during_joint_passes())
        attends = functools.partial(attend, gpu, is_fused)
        stack.enter_context(_torch.operators.traced_as(attention, attends))
        norms = functools.partial(_layer_norm, _torch.inductor.plain_decomposition(norm))
        stack.enter_context(_torch.inductor.with_decompositions({norm: norms}))
        stack.enter_context(as_autocast_of_gpus())
        yield


def _layer_norm(
    plain: Callable[..., tuple[Tensor, Tensor, Tensor]], x: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm whose mean and deviation have the data type of the computation."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return plain(x, *rest)
    out, mean, deviation = plain(x.float(), *rest)
    return out.to(x.dtype), mean, deviation


def attentions(graph: fx.Graph) -> list[str]:
    """The attention operators of a graph, in the order of their first call."""
    targets = [
        node.target for node in graph.nodes if isinstance(node.target, _torch.operators.OpOverload)
    ]
    names = dict.fromkeys(one.overloadpacket.__name__ for one in targets)
    return [name for name in names if name.startswith("_scaled_dot_product")]

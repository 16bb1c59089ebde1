"""Stand-ins: tensors that have a shape and a device but no memory, for tracing a model.

A model of any size, on the meta device or not, is traced as on the device it will train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from osdp_compile import _torch


@contextmanager
def stand_ins(models: Sequence[nn.Module], inputs: Any, device: torch.device) -> Iterator[Any]:
    """Put stand-ins in the place of some models' parameters and buffers, for a while.

    ``inputs``: anything that holds tensors; yields the same with stand-ins. Tied parameters
    stay tied. Afterwards the models are as they were.
    """
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                empty.__dict__.update(tensor.__dict__)  # people hang attributes on parameters
            made[id(tensor)] = empty
        return made[id(tensor)]

    places = [
        (held, name, tensor)
        for module in dict.fromkeys(one for model in models for one in model.modules())
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    try:
        for held, name, tensor in places:
            held[name] = stand_in(tensor)  # type: ignore[assignment]
        yield _torch.tree_map_only(Tensor, stand_in, inputs)
    finally:
        for held, name, tensor in places:
            held[name] = tensor  # type: ignore[assignment]

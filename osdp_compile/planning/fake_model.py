"""Fake model: parameters and buffers without memory, to trace a model.

Traces a model of any size, on the meta device or not, as on its training device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from osdp_compile import _torch


@contextmanager
def fake_models(models: Sequence[nn.Module], inputs: Any, device: torch.device) -> Iterator[Any]:
    """Context: replace the parameters and buffers of some models by fake tensors.

    ``inputs``: any container of tensors; yields the same with fake tensors. Tied parameters stay
    tied. On exit the models get their tensors back.
    """
    mode = _torch.tensors.FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                empty = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                empty.__dict__.update(tensor.__dict__)  # user attributes
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
        yield _torch.tensors.tree_map_only(Tensor, stand_in, inputs)
    finally:
        for held, name, tensor in places:
            held[name] = tensor  # type: ignore[assignment]

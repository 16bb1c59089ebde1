"""State dicts of sharded modules: load whole tensors into DTensor parameters.

``state_dict()`` gives the DTensor parameters, so ``torch.distributed.checkpoint`` saves every
rank's rows and loads them under any other plan and number of ranks. Torch does not load a plain
whole tensor into a DTensor; this file does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Module attribute: parameter attribute -> function from a whole parameter to its part.
_PARTS = "_osdp_parts"


def members(
    cls: type[nn.Module], parts: Mapping[str, Callable[[Tensor], DTensor]]
) -> dict[str, Any]:
    """Members of a subclass for modules with DTensor parameters.

    ``cls``: the base class. ``parts``: attribute -> function from the whole parameter to this
    rank's part, without communication.
    """

    def _load_from_state_dict(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        # With assign=True the tensor replaces the parameter; the next call refuses that.
        assigned = metadata.get("assign_to_params_buffers", False)
        for name, part in () if assigned else parts.items():
            key, parameter = prefix + name, module._parameters[name]
            if key in state_dict and _is_whole(state_dict[key], parameter):
                state_dict[key] = part(state_dict[key].detach())
        cls._load_from_state_dict(module, state_dict, prefix, metadata, *rest)

    return {
        _PARTS: parts,
        "_load_from_state_dict": _load_from_state_dict,
    }


def part_of(module: nn.Module, attribute: str, whole: Tensor) -> DTensor:
    """This rank's part of a whole parameter of a sharded module."""
    part: DTensor = getattr(module, _PARTS)[attribute](whole)
    return part


def _is_whole(given: Any, parameter: nn.Parameter | None) -> bool:
    """Whether ``given`` is a plain tensor for a DTensor parameter of the same shape."""
    plain = isinstance(given, Tensor) and not isinstance(given, DTensor)
    return plain and isinstance(parameter, DTensor) and given.shape == parameter.shape

"""State dicts: what torch's own saving and loading needs of modules that were laid out.

``state_dict()`` gives the parameters as they lie, so ``torch.distributed.checkpoint`` saves every
rank's rows and loads them under any other plan and number of ranks. One thing it does not do by
itself: a tensor that is whole does not fit into a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: The attribute under which a module has what makes parts of whole parameters.
_PARTS = "_osdp_parts"


def members(
    cls: type[nn.Module], parts: Mapping[str, Callable[[Tensor], DTensor]]
) -> dict[str, Any]:
    """What a subclass needs whose instances have parts of some of their parameters.

    ``cls``: what it is a subclass of. ``parts``: by attribute, what makes this rank's part of the
    whole parameter, without communication.
    """

    def _load_from_state_dict(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any
    ) -> None:
        # What is assigned replaces the parameter, which is refused at the next call.
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
    """Of a whole parameter of a module that was laid out, this rank's part."""
    part: DTensor = getattr(module, _PARTS)[attribute](whole)
    return part


def _is_whole(given: Any, parameter: nn.Parameter | None) -> bool:
    """Whether this is a plain tensor for a DTensor of its shape."""
    plain = isinstance(given, Tensor) and not isinstance(given, DTensor)
    return plain and isinstance(parameter, DTensor) and given.shape == parameter.shape

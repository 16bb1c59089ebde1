"""State dicts: what torch's own saving and loading needs of modules that were laid out.

``state_dict()`` gives the parameters as they lie, so ``torch.distributed.checkpoint`` saves every
rank's rows and loads them under any other plan and number of ranks. Two things it does not do by
itself: it finds names by reading ``module.weight``, which would gather every parameter for nothing;
and a tensor that is whole does not fit into a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: The attributes under which a module has its parameters as they lie, and what makes them of whole
#: ones.
_AS_THEY_LIE, _PARTS = "_osdp_parameters", "_osdp_parts"


def members(
    cls: type[nn.Module], parts: Mapping[str, Callable[[Tensor], DTensor]]
) -> dict[str, Any]:
    """What a subclass needs whose instances read some of their parameters in a way of its own.

    ``cls``: what it is a subclass of. ``parts``: by attribute, what makes this rank's part of the
    whole parameter, without communication.
    """

    def as_they_lie(module: nn.Module) -> SimpleNamespace:
        return SimpleNamespace(**{name: module._parameters[name] for name in parts})

    def _fqn_modifiers(module: Any) -> dict[str, str]:
        # torch.distributed.checkpoint.state_dict goes by it where a name of a state dict is not
        # the way to what it is of.
        own: Mapping[str, str] = {}
        if hasattr(cls, "_fqn_modifiers"):
            own = cls._fqn_modifiers(module)
        return {**dict.fromkeys(parts, _AS_THEY_LIE), **own}

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
        _AS_THEY_LIE: property(as_they_lie),
        _PARTS: parts,
        "_fqn_modifiers": _fqn_modifiers,
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

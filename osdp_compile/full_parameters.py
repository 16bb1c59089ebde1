"""Full parameters: a context with a model's weights as whole tensors, for evaluation or export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.model.model_parameters import ModelParameter, model_parameters
from osdp_compile.model.other_dims import other_dims_of
from osdp_compile.sharding.parameter_reads import Reading
from osdp_compile.sharding.state_dict import part_of
from osdp_compile.tracking.pending_model import waiting
from osdp_compile.tracking.session import session_for


@contextmanager
def full_parameters(model: nn.Module, *, write_back: bool = False) -> Iterator[None]:
    """Make the model's parameters whole plain tensors on every rank, inside. Collective.

    Example:

        with osdp_compile.full_parameters(model), torch.no_grad():
            model.eval()(tokens)                  # no gathers here
            save_file(model.state_dict(), path)

    Every rank needs memory for the whole model, in addition to its shards. The whole tensors have
    ``requires_grad=False``. Inside, call the model itself, not the result of ``torch.compile``.
    On exit the model gets its own parameters back.

    Args:
        model: the trained model, the result of ``torch.compile`` for it, or a submodule. A model
            that is not sharded does not change.
        write_back: copy the whole tensors (equal on all ranks) back into the shards on exit
            without an error; otherwise all writes are lost.

    Raises:
        OsdpError: on entry, inside another ``full_parameters`` of the same model; on exit with
            ``write_back``, if a parameter was replaced.
    """
    root: nn.Module = getattr(model, "_orig_mod", model)
    reading = _reading_of(root)
    if reading is None:
        yield
        return
    if reading.in_place:
        raise OsdpError("the model's parameters are full already: leave full_parameters first")
    beside = any(other_dims_of(parameter) is not None for parameter in root.parameters())
    if beside or any(one.others for _, one in waiting(root.parameters())):
        raise OsdpError(
            "full_parameters: the model is distributed over other mesh dimensions too "
            "(parallelize_module), and its code reads DTensors: evaluate the model as it is, and "
            "export parameter by parameter with parameter.full_tensor()"
        )
    entries = [e for e in model_parameters([("", root)]) if isinstance(e.parameter, DTensor)]
    full = [nn.Parameter(_whole(entry.parameter), requires_grad=False) for entry in entries]
    for entry, whole in zip(entries, full, strict=True):
        _put(entry, whole)
    reading.in_place = True
    try:
        yield
        if write_back:
            for entry, whole in zip(entries, full, strict=True):
                _write_back(entry, whole)
    finally:
        reading.in_place = False
        for entry in entries:
            _put(entry, entry.parameter)


def _reading_of(root: nn.Module) -> Reading | None:
    """The model's ``Reading``; None: the model is not sharded."""
    session = session_for(root)
    if session is not None:
        return session.reading
    return next((laid_out.reading for _, laid_out in waiting(root.parameters())), None)


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    """A DTensor's full value as a plain tensor that shares no memory with it."""
    placed = cast(DTensor, parameter.detach())
    full = placed.full_tensor()
    own = full.untyped_storage().data_ptr() == placed.to_local().untyped_storage().data_ptr()
    return full.clone() if own else full


def _put(entry: ModelParameter, parameter: nn.Parameter) -> None:
    for module, attribute in entry.places:
        module._parameters[attribute] = parameter


def _write_back(entry: ModelParameter, whole: nn.Parameter) -> None:
    """Copy the whole value into this rank's part, as for a loaded state dict."""
    for module, attribute in entry.places:
        if module._parameters[attribute] is not whole:
            raise OsdpError(
                f"parameter {entry.name!r} was replaced inside full_parameters: write into it "
                "instead (copy_, load_state_dict without assign=True)"
            )
    module, attribute = entry.places[0]
    with torch.no_grad():
        entry.parameter.copy_(part_of(module, attribute, whole.detach()))

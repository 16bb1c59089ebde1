"""Checkpoint files of trainers: whole ones for plain trainers, and optimizer state in shards.

A whole file has the format of plain torch. Rank 0 writes it, and every rank reads it. A sharded
checkpoint is a folder of ``torch.distributed.checkpoint``: each rank writes its rows, and any
number of ranks reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.model.agreement import from_rank_zero, on_every_rank
from osdp_compile.model.model_parameters import model_parameters
from osdp_compile.optim.rebind import stays_whole
from osdp_compile.sharding.state_dict import part_of

#: The last file of a sharded checkpoint that is written; with it the checkpoint is complete.
_LAST_FILE = ".metadata"


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """A model's whole state dict on the CPU, on rank 0; empty on other ranks. Collective.

    Tied parameters share memory here too: ``save_pretrained`` recognises them by it.
    """
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same = first.setdefault(id(parameter), name)
        if same in whole and name in whole:
            whole[name] = whole[same]
    return whole


def whole_optimizer_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """An optimizer's state dict of whole tensors on the CPU, if ``keep``; else empty. Collective.

    It has the format of plain torch. Ranks that do not keep it hold one whole tensor at a time.
    """
    state = optimizer.state_dict()
    whole: dict[Any, dict[str, Any]] = {}
    for key, entry in state["state"].items():
        own = {}
        for name, value in entry.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if keep:
                own[name] = full.cpu() if isinstance(full, Tensor) else full
        if keep:
            whole[key] = own
    return {**state, "state": whole} if keep else {}


def with_own_rows(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict of whole tensors, with this rank's shards for sharded parameters."""
    places = {id(one.parameter): one.places[0] for one in model_parameters([("", model)])}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in given["param_groups"] for key in group["params"]]
    state = dict(given["state"])
    for parameter, key in zip(held, keys, strict=False):  # torch refuses a mismatch
        if not isinstance(parameter, DTensor) or key not in state:
            continue
        module, attribute = places[id(parameter)]
        state[key] = {
            name: part_of(module, attribute, value) if _is_whole(name, value, parameter) else value
            for name, value in state[key].items()
        }
    return {**given, "state": state}


def begin_sharded_checkpoint(folder: Path) -> None:
    """Make the folder on rank 0; it is incomplete until it is saved to its end. Collective.

    Raises:
        OsdpError: on every rank, if rank 0 cannot make it.
    """

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LAST_FILE).unlink(missing_ok=True)

    from_rank_zero(make, dist.group.WORLD)


def check_sharded_checkpoint(folder: Path) -> None:
    """Check that a folder has a complete sharded checkpoint. Collective.

    Raises:
        OsdpError: on every rank, if a rank does not see one.
    """

    def check() -> None:
        if not (folder / _LAST_FILE).is_file():
            raise OsdpError(
                f"the folder {str(folder)!r} has no complete checkpoint: the run that wrote it was "
                "stopped meanwhile, or this host does not see its files. Give an earlier one, in a "
                "folder that all hosts share"
            )

    on_every_rank(check, dist.group.WORLD)


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state dict under the names of its parameters, to save in shards.

    It has the format of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, and
    holds the tensors themselves.

    Raises:
        OsdpError: if the optimizer holds a parameter that the model does not have.
    """
    names = _names_of(model, optimizer)
    given = optimizer.state_dict()
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in given["param_groups"]
    ]
    return {
        "state": {names[key]: entry for key, entry in given["state"].items()},
        "param_groups": groups,
    }


class OptimizerFiles:
    """Optimizer state in a sharded checkpoint: the groups' options at once, the tensors later.

    Before the first compiled call every parameter is whole, and so would be its state. So the
    tensors are loaded when the model is sharded. Each rank then reads its own rows.

    Args:
        model: the module whose parameters the optimizer holds.
        optimizer: an optimizer of torch.
        folder: of the checkpoint; the same on every rank.
        key: the name of :func:`named_optimizer_state` in the saved state dict.

    Raises:
        OsdpError: if the folder has no state of this name, or state for other parameters.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, key: str
    ) -> None:
        self._model, self._optimizer, self._folder, self._key = model, optimizer, folder, key
        self._metadata: Metadata = FileSystemReader(folder).read_metadata()
        #: Flat key in the files -> its path in the state dict, without ``key``.
        self._paths: dict[str, tuple[Any, ...]] = {
            flat: tuple(path[1:])
            for flat, path in (self._metadata.planner_data or {}).items()
            if path[0] == key
        }

    def load_groups(self) -> None:
        """Load the options of the optimizer's groups, and drop its state. Collective."""
        flat: dict[str, Any] = {
            flat: None for flat, path in self._paths.items() if path[0] == "param_groups"
        }
        if not flat:
            raise OsdpError(
                f"the checkpoint {str(self._folder)!r} has no optimizer state {self._key!r}: it "
                "has weights only, or another program wrote it"
            )
        load(flat, checkpoint_id=self._folder)
        groups: dict[int, dict[str, Any]] = {}
        for key, value in flat.items():
            _, index, option = self._paths[key]
            groups.setdefault(index, {})[option] = value
        own = self._optimizer.state_dict()["param_groups"]
        self._check_same_parameters([groups[index] for index in sorted(groups)], own)
        loaded = [{**groups[index], "params": own[index]["params"]} for index in sorted(groups)]
        self._optimizer.load_state_dict({"state": {}, "param_groups": loaded})

    def load_state(self) -> None:
        """Load the optimizer's tensors for the parameters as they are now. Collective."""
        names = _names_of(self._model, self._optimizer)
        held = [one for group in self._optimizer.param_groups for one in group["params"]]
        parameters = {names[key]: (key, parameter) for key, parameter in enumerate(held)}
        flat: dict[str, Any] = {}
        for key, path in self._paths.items():
            if path[0] == "state":
                _, name, *rest = path
                flat[key] = self._place_for(key, parameters[name][1], str(rest[0]))
        load(flat, checkpoint_id=self._folder)
        state: dict[int, dict[str, Any]] = {}
        for key, value in flat.items():
            _, name, *rest = self._paths[key]
            into = state.setdefault(parameters[name][0], {})
            for part in rest[:-1]:
                into = into.setdefault(part, {})
            into[rest[-1]] = value
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _place_for(self, key: str, parameter: nn.Parameter, name: str) -> Tensor | None:
        """An empty tensor for state of a parameter, laid out like it; None: no tensor."""
        stored = self._metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        dtype = stored.properties.dtype
        if stored.size == parameter.shape and not stays_whole(name):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        return torch.empty(stored.size, dtype=dtype, device=parameter.device)

    def _check_same_parameters(
        self, stored: list[dict[str, Any]], own: list[dict[str, Any]]
    ) -> None:
        names = _names_of(self._model, self._optimizer)
        there = [set(group["params"]) for group in stored]
        here = [{names[key] for key in group["params"]} for group in own]
        if there == here:
            return
        differ = set().union(*there) ^ set().union(*here)
        first = f"parameter {min(differ)!r} is in one of them only" if differ else "other groups"
        raise OsdpError(
            f"the checkpoint {str(self._folder)!r} has the state of another optimizer than this "
            f"model's: {first}. Build the optimizer as before, or load the weights only"
        )


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order of its groups."""
    names: dict[int, str] = {}
    for name, parameter in getattr(model, "_orig_mod", model).named_parameters():
        names[id(parameter)] = name.replace("_orig_mod.", "")
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(held):
        if id(parameter) not in names:
            raise OsdpError(
                f"parameter {index} of {type(optimizer).__name__}, of shape "
                f"{tuple(parameter.shape)}, is not in the model: a sharded checkpoint has the "
                "parameters' names"
            )
    return [names[id(parameter)] for parameter in held]


def _is_whole(name: str, value: Any, parameter: DTensor) -> bool:
    """Whether a value of an optimizer's state is whole, and is to be sharded as its parameter."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and value.shape == parameter.shape and not stays_whole(name)

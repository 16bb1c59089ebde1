"""transformers.Trainer with osdp: compile the model, save and load whole checkpoints.

    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    args = TrainingArguments("out", torch_compile_backend="osdp", ...)
    OsdpTrainer(model, args, osdp_options={"memory_limit": "8GiB"}, ...).train()

A plain Trainer passes the backend's name to accelerate, which accepts only the names in its own
list. It wraps the model in DistributedDataParallel, and saves only the shards of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.integrations.step_logger import step_figures
from osdp_compile.model.shard_in_place import model_parameters
from osdp_compile.model.state_dict import part_of
from osdp_compile.optim.rebind import stays_whole

try:
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "osdp_compile.integrations.hf_trainer needs transformers and accelerate: "
        "pip install 'osdp-compile[hf]'"
    ) from error


class OsdpTrainerMixin:
    """Mixin: a ``transformers.Trainer``, or a subclass of it, trains with osdp.

    Example:

        class MyTrainer(OsdpTrainerMixin, Seq2SeqTrainer): ...

    The model is compiled for training. Evaluation calls the model without compilation, and its
    modules gather each weight when they read it. Checkpoints have the format of a Trainer: weights
    for ``from_pretrained``, and ``optimizer.pt`` with whole tensors. Rank 0 writes them. Training
    can continue under another plan, on another number of ranks, or in a plain Trainer.

    The logs of training have the step's measured and predicted figures
    (:func:`osdp_compile.integrations.step_logger.step_figures`), in TensorBoard or wherever
    ``report_to`` sends them.

    Args:
        osdp_options: the options of ``torch.compile(..., backend="osdp", options=...)``.

    Raises:
        OsdpError: for arguments that ask for another backend, a mode of torch.compile, FSDP,
            DeepSpeed, DataParallel or files on every host; or for a model that is compiled already.
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, *args: Any, osdp_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._osdp_options = dict(osdp_options or {})
        super().__init__(*args, **kwargs)
        if hasattr(self.model, "_orig_mod"):
            raise OsdpError(
                "the model is compiled already: give the Trainer the model itself, and the "
                "options of torch.compile as osdp_options={...}"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as a Trainer does; training's logs with the figures of the step."""
        if "loss" in logs:
            logs = {**logs, **step_figures(self.model)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self) -> None:
        _check(self.args)
        backend = self.args.torch_compile_backend
        # accelerate would compile, and refuse the name: it is not in its list.
        self.args.torch_compile_backend = "no"
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            self.args.torch_compile_backend = backend

    def _wrap_model(
        self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        wrapped = super()._wrap_model(model, training, *args, **kwargs)  # type: ignore[misc]
        if not training or hasattr(wrapped, "_orig_mod"):
            return wrapped
        # Autocast, if the arguments ask for it. In evaluation mode accelerate adds no DDP.
        wrapped = self.accelerator.prepare_model(wrapped, evaluation_mode=True)
        options = self._osdp_options
        if self.args.gradient_accumulation_steps > 1:
            options = {"accumulate": "reduced", **options}
        return torch.compile(wrapped, backend="osdp", options=options)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = _whole_weights(self.model)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.optimizer.state_dict()
        state["state"] = _whole_state(state["state"], keep=self.args.should_save)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # not accelerate's wrapper
        hook = optimizer.register_load_state_dict_pre_hook(self._cut)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        finally:
            hook.remove()

    def _cut(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """A state dict of whole tensors, with this rank's shards for sharded parameters."""
        places = {id(one.parameter): one.places[0] for one in model_parameters([("", self.model)])}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keys = [key for group in given["param_groups"] for key in group["params"]]
        state = dict(given["state"])
        for parameter, key in zip(held, keys, strict=False):  # torch refuses a mismatch
            if not isinstance(parameter, DTensor) or key not in state:
                continue
            module, attribute = places[id(parameter)]
            state[key] = {
                name: part_of(module, attribute, value)
                if _is_like(name, value, parameter)
                else value
                for name, value in state[key].items()
            }
        return {**given, "state": state}


class OsdpTrainer(OsdpTrainerMixin, Trainer):
    """``transformers.Trainer`` with osdp: see ``OsdpTrainerMixin``."""


def _check(args: Any) -> None:
    """Refuse arguments of a Trainer that osdp does not support."""
    if args.torch_compile and args.torch_compile_backend not in (None, "osdp"):
        raise OsdpError(
            f"torch_compile_backend={args.torch_compile_backend!r} beside OsdpTrainer: give "
            "torch_compile_backend='osdp', which compiles with Inductor in the end, or no backend"
        )
    if args.torch_compile_mode is not None:
        raise OsdpError(
            f"torch_compile_mode={args.torch_compile_mode!r}: backend 'osdp' has options in place "
            "of modes, OsdpTrainer(..., osdp_options={...})"
        )
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise OsdpError(f"{name} beside OsdpTrainer: osdp shards the model, leave it out")
    if args.save_on_each_node:
        raise OsdpError(
            "save_on_each_node=True beside OsdpTrainer: whole weights are gathered on rank 0 only, "
            "so leave it out, and give all hosts one shared folder"
        )
    if args.n_gpu > 1:
        raise OsdpError(
            f"one process with {args.n_gpu} GPUs: Trainer would use DataParallel. Start a process "
            "for each with torchrun --nproc-per-node"
        )


def _whole_weights(model: nn.Module) -> dict[str, Any]:
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


def _whole_state(state: Mapping[Any, Mapping[str, Any]], keep: bool) -> dict[Any, dict[str, Any]]:
    """An optimizer's state with whole tensors on the CPU, if ``keep``. Collective.

    Ranks that do not keep it hold one whole tensor at a time.
    """
    whole: dict[Any, dict[str, Any]] = {}
    for key, entry in state.items():
        own = {}
        for name, value in entry.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if keep:
                own[name] = full.cpu() if isinstance(full, Tensor) else full
        if keep:
            whole[key] = own
    return whole


def _is_like(name: str, value: Any, parameter: DTensor) -> bool:
    """Whether a value of an optimizer's state is whole, and is to be sharded as its parameter."""
    plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    return plain and value.shape == parameter.shape and not stays_whole(name)

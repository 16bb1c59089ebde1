"""transformers.Trainer with osdp: compile the model, save and load its checkpoints.

    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    args = TrainingArguments("out", torch_compile_backend="osdp", ...)
    OsdpTrainer(model, args, osdp_options={"memory_limit": "8GiB"}, ...).train()

A plain Trainer passes the backend's name to accelerate, which accepts only the names in its own
list. It wraps the model in DistributedDataParallel, and saves only the shards of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from osdp_compile.errors import OsdpError
from osdp_compile.integrations.checkpoint_files import (
    OptimizerFiles,
    begin_sharded_checkpoint,
    check_sharded_checkpoint,
    named_optimizer_state,
    whole_optimizer_state,
    whole_weights,
    with_own_rows,
)
from osdp_compile.integrations.step_logger import step_figures
from osdp_compile.tracking.session import plan_of

try:
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "osdp_compile.integrations.hf_trainer needs transformers and accelerate: "
        "pip install 'osdp-compile[hf]'"
    ) from error


#: The folder of a checkpoint with the optimizer's shards. A plain Trainer takes a folder of such a
#: name for its own, and fails: it does not begin with new optimizer state in silence.
_OPTIMIZER_FOLDER = "osdp_optimizer"
#: The name of the optimizer's state in it.
_OPTIMIZER = "optimizer"


class OsdpTrainerMixin:
    """Mixin: a ``transformers.Trainer``, or a subclass of it, trains with osdp.

    Example:

        class MyTrainer(OsdpTrainerMixin, Seq2SeqTrainer): ...

    The model is compiled for training and for evaluation. ``generate`` calls it without
    compilation, and its modules gather each weight when they read it.

    Checkpoints have weights for ``from_pretrained``, which rank 0 writes. Each rank writes its rows
    of the optimizer's state to the folder ``osdp_optimizer``. Training can continue under another
    plan and on another number of ranks. Checkpoints of a plain Trainer are loaded too.

    The logs of training have the step's measured and predicted figures
    (:func:`osdp_compile.integrations.step_logger.step_figures`), in TensorBoard or wherever
    ``report_to`` sends them.

    Args:
        osdp_options: the options of ``torch.compile(..., backend="osdp", options=...)``.
        osdp_whole_optimizer: write the optimizer's state to ``optimizer.pt`` as whole tensors,
            which a plain Trainer loads. Rank 0 gathers them tensor by tensor.

    Raises:
        OsdpError: for arguments that ask for another backend, a mode of torch.compile, FSDP,
            DeepSpeed, DataParallel, files on every host or evaluation of a cast model; or for a
            model that is compiled already.
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        osdp_options: Mapping[str, Any] | None = None,
        osdp_whole_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        self._osdp_options = dict(osdp_options or {})
        self._osdp_whole_optimizer = osdp_whole_optimizer
        self._osdp_compiled: Any = None
        self._osdp_waiting: OptimizerFiles | None = None
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
        if hasattr(wrapped, "_orig_mod"):
            return wrapped
        if getattr(self._osdp_compiled, "_orig_mod", None) is not wrapped:
            # Autocast, if the arguments ask for it. In evaluation mode accelerate adds no DDP.
            prepared = self.accelerator.prepare_model(wrapped, evaluation_mode=True)
            options = self._osdp_options
            if self.args.gradient_accumulation_steps > 1:
                options = {"accumulate": "reduced", **options}
            self._osdp_compiled = torch.compile(prepared, backend="osdp", options=options)
        return self._osdp_compiled

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = whole_weights(self.model)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._load_waiting()
        optimizer = _of_torch(self.optimizer)
        if self._osdp_whole_optimizer:
            state = whole_optimizer_state(optimizer, keep=self.args.should_save)
            if self.args.should_save:
                torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
        else:
            folder = Path(output_dir, _OPTIMIZER_FOLDER)
            begin_sharded_checkpoint(folder)
            save({_OPTIMIZER: named_optimizer_state(self.model, optimizer)}, checkpoint_id=folder)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._osdp_waiting = None
        if checkpoint is not None and os.path.isdir(os.path.join(checkpoint, _OPTIMIZER_FOLDER)):
            self._load_shards(Path(checkpoint))
            return
        optimizer = _of_torch(self.optimizer)
        hook = optimizer.register_load_state_dict_pre_hook(
            lambda _, given: with_own_rows(self.model, optimizer, given)
        )
        try:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        finally:
            hook.remove()

    def _load_shards(self, checkpoint: Path) -> None:
        """Load the optimizer's options now, and its rows once the model is sharded."""
        folder, optimizer = checkpoint / _OPTIMIZER_FOLDER, _of_torch(self.optimizer)
        check_sharded_checkpoint(folder)
        self._osdp_waiting = OptimizerFiles(self.model, optimizer, folder, _OPTIMIZER)
        self._osdp_waiting.load_groups()
        if plan_of(self.model) is not None:
            self._load_waiting()
        else:
            hook: Any = None

            def load(*_: Any) -> None:
                hook.remove()
                self._load_waiting()

            hook = optimizer.register_step_pre_hook(load)
        schedule = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_waiting(self) -> None:
        """Load the rows that wait for the model to be sharded, if there are any. Collective."""
        waiting, self._osdp_waiting = self._osdp_waiting, None
        if waiting is not None:
            waiting.load_state()


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
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            raise OsdpError(
                f"{name}=True beside OsdpTrainer: it casts the sharded weights themselves. Leave "
                "it out: bf16=True evaluates with autocast"
            )
    if args.n_gpu > 1:
        raise OsdpError(
            f"one process with {args.n_gpu} GPUs: Trainer would use DataParallel. Start a process "
            "for each with torchrun --nproc-per-node"
        )


def _of_torch(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner

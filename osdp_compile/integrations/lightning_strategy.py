"""Lightning with osdp: a Strategy that compiles the steps of a LightningModule.

    from osdp_compile.integrations.lightning_strategy import OsdpStrategy

    trainer = Trainer(strategy=OsdpStrategy(memory_limit="8GiB"), devices=8, accelerator="gpu")
    trainer.fit(module)

It is a ``DDPStrategy`` in how processes start and talk. It wraps nothing: the backend shards the
module in place and reduces its gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from osdp_compile.engine.no_sync import no_sync
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
from osdp_compile.integrations.deferred_logs import DeferredLogs
from osdp_compile.options import CheckedOptions
from osdp_compile.tracking.session import plan_of

try:
    # Their classes are not each other's: a Trainer takes a Strategy of its own package.
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning.callbacks import GradientAccumulationScheduler
        from pytorch_lightning.plugins.precision import (
            DoublePrecision,
            HalfPrecision,
            MixedPrecision,
            Precision,
        )
        from pytorch_lightning.strategies import DDPStrategy
    else:
        from lightning.pytorch.callbacks import GradientAccumulationScheduler
        from lightning.pytorch.plugins.precision import (
            DoublePrecision,
            HalfPrecision,
            MixedPrecision,
            Precision,
        )
        from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        "osdp_compile.integrations.lightning_strategy needs Lightning: "
        "pip install 'osdp-compile[lightning]'"
    ) from error

#: Precision plugins that train as with DDP.
_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
#: In the folder of a sharded checkpoint: all but weights and optimizer state. Lightning's name.
_REST = "meta.pt"
#: In that folder, before an optimizer's number. Lightning's name.
_OPTIMIZER = "optimizer_"
#: In a loaded checkpoint: the folder that has its weights and optimizer state.
_FOLDER = "osdp_folder"


class OsdpStrategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """A Lightning Strategy: ``training_step`` is compiled with osdp, and so are the other steps.

    Example:

        strategy = OsdpStrategy(memory_limit="8GiB")
        Trainer(strategy=strategy, devices=2, accelerator="cpu").fit(module, loader)

    The whole of ``training_step`` is one graph, the loss too. ``self.log`` and ``self.log_dict``
    inside it are called when the graph has run. ``validation_step``, ``test_step`` and
    ``predict_step`` are compiled for inference.

    With ``accumulate_grad_batches`` every backward reduces. With ``accumulate=True`` each rank
    keeps whole gradients, and reduces once before the optimizer's step.

    Args:
        save_distributed_checkpoint: write a checkpoint as a folder, to which each rank writes its
            rows. Default: one file of whole tensors, which a Trainer of any strategy loads.
            Both are loaded.
        compile_arguments: further arguments of ``torch.compile``, such as ``dynamic``.
        options: the options of ``torch.compile(..., backend="osdp", options=...)``.

    The other arguments are those of ``DDPStrategy``.

    Raises:
        ValueError: for an unknown or malformed option.
        OsdpError: when the Trainer starts, for a module with manual optimization, a precision
            plugin that replaces layers, ``sync_batchnorm``, or a module that is compiled already.
    """

    def __init__(
        self,
        *,
        save_distributed_checkpoint: bool = False,
        compile_arguments: Mapping[str, Any] | None = None,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: str = "popen",
        **options: Any,
    ) -> None:
        CheckedOptions.parse(options)  # its errors, before any process starts
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
            **({} if timeout is None else {"timeout": timeout}),
        )
        self._options = dict(options)
        self._compile_arguments = dict(compile_arguments or {})
        self._in_shards = save_distributed_checkpoint
        self._module: Any = None
        self._steps: dict[str, tuple[Callable[..., Any], DeferredLogs]] = {}
        self._waiting: list[OptimizerFiles] = []
        self._no_sync: AbstractContextManager[None] | None = None
        self._blocked = False  # the next backward reduces nothing, or others follow it
        self._stepped = False

    # Setup

    def setup_environment(self) -> None:
        """Start the process group, after a check of the plugins and the module."""
        self._check()
        super().setup_environment()

    def _check(self) -> None:
        """Refuse what the backend does not support."""
        plugin, module = self.precision_plugin, self.lightning_module
        if type(plugin) not in _PRECISIONS:
            raise OsdpError(
                f"{type(plugin).__name__} beside OsdpStrategy: give precision='32-true', "
                "'16-mixed', 'bf16-mixed', '16-true', 'bf16-true' or '64-true', or the option "
                "param_dtype"
            )
        if self._layer_sync is not None:
            raise OsdpError(
                "sync_batchnorm=True beside OsdpStrategy: its batch norms communicate in the "
                "middle of the compiled step. Leave it out: each rank keeps its own statistics"
            )
        if not module.automatic_optimization:
            raise OsdpError(
                "automatic_optimization=False beside OsdpStrategy: the backward and the "
                "optimizers' steps would be inside the compiled training_step. Use automatic "
                "optimization"
            )
        if module._compiler_ctx is not None:
            raise OsdpError(
                "the LightningModule is compiled already: give the Trainer the module itself, and "
                "the options of torch.compile to OsdpStrategy(...)"
            )

    def configure_ddp(self) -> None:
        """Nothing is wrapped: the steps are compiled when they are called."""
        trainer = self.lightning_module.trainer
        several = trainer.accumulate_grad_batches != 1 or any(
            isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks
        )
        if several and "accumulate" not in self._options:
            self._options["accumulate"] = "reduced"

    def setup(self, trainer: Any) -> None:
        """Set up as ``DDPStrategy`` does. Does not change a sharded module."""
        if plan_of(self.lightning_module) is None:
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if trainer.state.fn == "fit":
            self.configure_ddp()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def connect(self, model: Any) -> None:
        """Take a module, and drop the compiled steps of another one."""
        if model is not self._module:
            self._steps, self._module = {}, model
        super().connect(model)

    def teardown(self) -> None:
        """As ``DDPStrategy``; a sharded module stays on its device, where its mesh is."""
        # Other ranks may be gone after an error, so gradients of an unfinished step are dropped.
        unfinished = RuntimeError()
        self._end_no_sync(RuntimeError, unfinished, None)
        if plan_of(self.lightning_module) is None:
            super().teardown()
            return
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled ``training_step``.

        Gradients of a finished step are freed before it. Lightning frees them after it.
        """
        if not self._blocked:
            self._end_no_sync()  # the last backward before a step reduces by itself
        if self._stepped:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._stepped = False
        with self.precision_plugin.train_step_context():
            output = self._step("training_step", *args, **kwargs)
        self._load_waiting()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled ``validation_step``."""
        self._end_no_sync()
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled ``test_step``."""
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled ``predict_step``."""
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As ``DDPStrategy``. The closure, and the compiled step with it, run inside."""
        output = super().optimizer_step(*args, **kwargs)
        self._stepped = True
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A backward that others follow before the step; with ``accumulate=True`` in ``no_sync``.

        ``no_sync`` reduces where it ends. So it stays open until the last backward's forward.
        """
        if self._options.get("accumulate") is True and self._no_sync is None:
            self._no_sync = no_sync(self.lightning_module)
            self._no_sync.__enter__()
        self._blocked = True
        try:
            yield
        except BaseException:
            self._end_no_sync(*sys.exc_info())
            raise
        finally:
            self._blocked = False

    def _end_no_sync(self, *error: Any) -> None:
        """End ``no_sync``, if it is open; after an error without communication."""
        held, self._no_sync = self._no_sync, None
        if held is None:
            return
        try:
            held.__exit__(*(error or (None, None, None)))
        except BaseException as raised:
            if not error or raised is not error[1]:
                raise

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step of the module, compiled at its first call."""
        module = self.lightning_module
        if name not in self._steps:
            step: Callable[..., Any] = getattr(module, name)
            compiled = torch.compile(
                step,
                backend="osdp",
                options=self._options,
                **self._compile_arguments,
            )
            self._steps[name] = (compiled, DeferredLogs(module))
        compiled, logs = self._steps[name]
        with logs.deferred():
            return compiled(*args, **kwargs)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: whole tensors on rank 0, or the ranks' own shards."""
        if self._in_shards:
            return get_model_state_dict(self.lightning_module)
        return whole_weights(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state dict: whole tensors on rank 0, or the ranks' own shards."""
        self._load_waiting()  # a checkpoint before the first step after a checkpoint
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self._in_shards:
            return named_optimizer_state(self.lightning_module, optimizer)
        return whole_optimizer_state(optimizer, keep=self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a file on rank 0, or a folder to which every rank writes. Collective.

        A folder has the names that Lightning's own strategies give: ``state_dict``,
        ``optimizer_0``, and the rest in ``meta.pt``.

        Raises:
            OsdpError: for ``storage_options`` with a folder.
        """
        if not self._in_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise OsdpError(
                "storage_options with save_distributed_checkpoint=True: every rank writes its "
                "file to the folder with torch.distributed.checkpoint. Leave them out"
            )
        path = Path(self.broadcast(filepath))
        rest = dict(checkpoint)
        state = {"state_dict": rest.pop("state_dict")}
        for index, one in enumerate(rest.pop("optimizer_states", ())):
            state[f"{_OPTIMIZER}{index}"] = one
        begin_sharded_checkpoint(path)
        if self.is_global_zero:
            torch.save(rest, path / _REST)
        save(state, checkpoint_id=path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a file, or of a folder all but weights and optimizer state."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        check_sharded_checkpoint(path)
        rest = torch.load(path / _REST, map_location="cpu", weights_only=bool(weights_only))
        return {**rest, _FOLDER: path, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights. Collective."""
        if _FOLDER not in checkpoint:
            super().load_model_state_dict(checkpoint, strict)
            return
        state = get_model_state_dict(self.lightning_module)
        planner = DefaultLoadPlanner(allow_partial_load=not strict)
        load({"state_dict": state}, checkpoint_id=checkpoint[_FOLDER], planner=planner)
        set_model_state_dict(self.lightning_module, state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state; in shards as soon as the module is sharded. Collective."""
        module = self.lightning_module
        if _FOLDER not in checkpoint:
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            ):
                optimizer.load_state_dict(with_own_rows(module, optimizer, state))
            return
        self._waiting = [
            OptimizerFiles(module, optimizer, checkpoint[_FOLDER], f"{_OPTIMIZER}{index}")
            for index, optimizer in enumerate(self.optimizers)
        ]
        for files in self._waiting:
            files.load_groups()
        if plan_of(module) is not None:
            self._load_waiting()

    def _load_waiting(self) -> None:
        """Load what waits for the module to be sharded. Collective."""
        waiting, self._waiting = self._waiting, []
        for files in waiting:
            files.load_state()

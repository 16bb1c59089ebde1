"""A Lightning Trainer with osdp, beside itself with DDP on the same ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import osdp_compile
import osdp_compile.engine.no_sync as no_sync
from osdp_compile import Decision, Plan
from osdp_compile.engine import backend
from tests.osdp_compile.integrations.test_hf_trainer import as_torchrun
from tests.project.test_examples import environment
from tests.ranks import Ranks
from tests.training import SLOW

pl = pytest.importorskip("lightning.pytorch")

from osdp_compile.integrations.lightning_strategy import OsdpStrategy  # noqa: E402

WIDTH, ROWS, BATCH = 8, 32, 4
DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


class Regression(pl.LightningModule):
    """Two linears and a loss, which is logged before it is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, rows):
        return self.down(torch.nn.functional.gelu(self.up(rows)))

    def error(self, rows):
        return (self(rows) - rows.flip(1)).float().square().mean()

    def training_step(self, rows, index):
        error = self.error(rows)
        self.log("error", error, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * error, "constant": 3.0})
        return error + 1e-3 * self.up.weight.square().mean()

    def validation_step(self, rows, index):
        self.log("held_out", self.error(rows), sync_dist=True)

    def predict_step(self, rows, index):
        return self(rows)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Losses(pl.Callback):
    """The loss of each batch, and the norm of the gradients before each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients_held: list[bool] = []

    def on_before_zero_grad(self, trainer, module, optimizer):
        self.gradients_held.append(any(one.grad is not None for one in module.parameters()))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.losses.append(outputs["loss"].item())

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [one.grad for one in module.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def rows() -> list[torch.Tensor]:
    return list(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7)))


def loader(batch: int = BATCH) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows(), batch_size=batch)


def trainer_of(strategy: Any, folder: Path, world_size: int = 2, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "max_epochs": 2,
        "devices": world_size,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    given = {**given, **changed}
    callbacks = [Losses(), *given.pop("more_callbacks", ())]
    return pl.Trainer(strategy=strategy, callbacks=callbacks, **given)


def planned(module: nn.Module, kind: Decision, world_size: int = 2, **options: Any) -> OsdpStrategy:
    plan = Plan.uniform(module.named_parameters(), kind, world_size=world_size)
    return OsdpStrategy(plan=plan, hardware=SLOW, **options)


@contextlib.contextmanager
def as_lightning(rank: int, world_size: int):
    """The environment of torchrun, in which Lightning starts no processes."""
    own = mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="test")
    with as_torchrun(rank, world_size), own:
        yield


def fitted(trainer: Any, module: Regression, **how: Any) -> SimpleNamespace:
    """Trains; the losses, what was logged, and the whole weights."""
    trainer.fit(module, loader(), loader(), **how)
    seen = next(one for one in trainer.callbacks if isinstance(one, Losses))
    whole = {
        name: one.full_tensor() if isinstance(one, DTensor) else one.detach()
        for name, one in module.state_dict().items()
    }
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    found = SimpleNamespace(losses=seen.losses, norms=seen.norms, logged=logged, whole=whole)
    found.gradients_held = seen.gradients_held
    return found


def assert_same(one: SimpleNamespace, other: SimpleNamespace, tolerance: float = 1e-5) -> None:
    for name in ("losses", "norms", "logged", "whole"):
        torch.testing.assert_close(
            getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance
        )


def by_ddp(folder: Path, ckpt_path: Any = None, **changed: Any) -> SimpleNamespace:
    trainer = trainer_of(pl.strategies.DDPStrategy(), folder, **changed)
    module = Regression()
    found = fitted(trainer, module, ckpt_path=ckpt_path)
    found.trainer, found.module = trainer, module
    return found


def by_osdp(
    folder: Path,
    kind: Decision = Decision.SHARD_REGATHER,
    ckpt_path: Any = None,
    options: Any = (),
    **changed: Any,
) -> SimpleNamespace:
    module, ranks = Regression(), dist.get_world_size()
    of_dtype = copy.deepcopy(module).to(DTYPES.get(changed.get("precision"), torch.float32))
    strategy = planned(of_dtype, kind, ranks, **dict(options))
    trainer = trainer_of(strategy, folder, ranks, **changed)
    found = fitted(trainer, module, ckpt_path=ckpt_path)
    sharded = kind.sharded and ranks > 1
    assert all(isinstance(one, DTensor) for one in module.parameters()) == sharded
    found.trainer, found.module = trainer, module
    return found


def trains_as_with_ddp(rank: int, world_size: int, folder: Path, changed: Any, options: Any):
    """Losses, norms, logs, weights, and evaluation of the trained module; counts the graphs."""
    tolerance = 2e-2 if "bf16" in changed.get("precision", "") else 1e-5
    with as_lightning(rank, world_size):
        expected = by_ddp(folder / "ddp", **changed)
        with mock.patch.object(backend, "lower", wraps=backend.lower) as lower:
            found = by_osdp(folder / "osdp", options=options, **changed)
        assert {"error_epoch", "twice", "constant", "held_out"} < set(found.logged)
        assert_same(found, expected, tolerance)
        assert max(expected.norms) > changed.get("gradient_clip_val", 0)  # something is clipped
        assert any(expected.gradients_held) and not any(found.gradients_held)
        ours, theirs = (
            [
                *one.trainer.validate(one.module, loader(), verbose=False)[0].values(),
                *one.trainer.predict(one.module, loader()),
            ]
            for one in (found, expected)
        )
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        return lower.call_count


def test_a_trainer_trains_and_evaluates_as_with_ddp(two_ranks, tmp_path):
    """Logs break no graph: one is for training, one for validation."""
    for graphs in two_ranks.run(trains_as_with_ddp, tmp_path, {}, {}):
        assert graphs == 2


ACCUMULATING = {"accumulate_grad_batches": 3}  # the last step of an epoch has fewer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"gradient_clip_val": 0.02}, {}),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
        (ACCUMULATING, {}),
        (ACCUMULATING, {"accumulate": True}),
        ({**ACCUMULATING, "val_check_interval": 2}, {"accumulate": True}),
        ({"precision": "bf16-mixed"}, {}),
        ({"precision": "bf16-true"}, {}),
        ({"precision": "64-true"}, {}),
    ],
    ids=["norm", "value", "reduced", "no_sync", "no_sync_validated", "mixed", "bf16", "double"],
)
def test_a_trainer_with(two_ranks, tmp_path, changed, options):
    two_ranks.run(trains_as_with_ddp, tmp_path, changed, options)


class FailsAtTheSecond(pl.Callback):
    """An error between two backwards of one step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 1:
            raise ZeroDivisionError


def ends_in_the_middle_of_a_step(rank: int, world_size: int, folder: Path) -> int:
    asked = {"options": {"accumulate": True}, "more_callbacks": [FailsAtTheSecond()]}
    with (
        as_lightning(rank, world_size),
        mock.patch.object(no_sync, "_reduce") as reduce,
        pytest.raises(ZeroDivisionError),
    ):
        by_osdp(folder, **asked, **ACCUMULATING)
    return reduce.call_count


@pytest.mark.thorough
def test_after_an_error_nothing_is_reduced_any_more(two_ranks, tmp_path):
    """Other ranks may not be there."""
    assert two_ranks.run(ends_in_the_middle_of_a_step, tmp_path) == [0, 0]


IN_SHARDS = {"save_distributed_checkpoint": True}


def goes_on_from_shards(rank: int, world_size: int, folder: Path) -> SimpleNamespace:
    """Two epochs; and one, saved by a callback that removes an earlier folder, and another one."""
    with as_lightning(rank, world_size):
        expected = by_osdp(folder / "whole")
        kept = pl.callbacks.ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_top_k=1)
        saving = {"enable_checkpointing": True, "more_callbacks": [kept], "max_epochs": 1}
        begun = by_osdp(folder / "half", options=IN_SHARDS, **saving)
        (last,) = (folder / "kept").iterdir()
        assert str(last) == kept.best_model_path and last.is_dir()
        assert len(list(last.glob("*.distcp"))) == world_size
        found = by_osdp(folder / "rest", Decision.REPLICATE, last)
        assert found.losses == pytest.approx(expected.losses[len(begun.losses) :], rel=1e-5)
        torch.testing.assert_close(found.whole, expected.whole, rtol=1e-5, atol=1e-5)
        return SimpleNamespace(losses=found.losses, whole=found.whole)


def goes_on_alone(rank: int, world_size: int, last: Path) -> SimpleNamespace:
    """The same global batches on one rank."""
    with as_lightning(rank, world_size):
        module = Regression()
        trainer = trainer_of(OsdpStrategy(), last.parent, world_size)
        trainer.fit(module, loader(2 * BATCH), loader(2 * BATCH), ckpt_path=last)
        seen = next(one for one in trainer.callbacks if isinstance(one, Losses))
        return SimpleNamespace(losses=seen.losses, whole=module.state_dict())


def test_shards_go_on_under_another_plan_and_on_one_rank(two_ranks, inductor_cache, tmp_path):
    both = two_ranks.run(goes_on_from_shards, tmp_path)
    (last,) = (tmp_path / "kept").iterdir()
    with Ranks(1, inductor_cache) as one_rank:
        (alone,) = one_rank.run(goes_on_alone, last)
    mean = [sum(pair) / 2 for pair in zip(both[0].losses, both[1].losses, strict=True)]
    assert alone.losses == pytest.approx(mean, rel=1e-5)
    torch.testing.assert_close(alone.whole, both[0].whole, rtol=1e-5, atol=1e-5)


def goes_on_from_files(rank: int, world_size: int, folder: Path) -> None:
    """A whole file goes on under another plan and with DDP, and DDP's goes on with osdp."""
    with as_lightning(rank, world_size):
        expected = by_ddp(folder / "ddp")
        theirs = by_ddp(folder / "ddp half", max_epochs=1)
        theirs.trainer.save_checkpoint(folder / "theirs.ckpt")
        ours = by_osdp(folder / "half", max_epochs=1)
        ours.trainer.save_checkpoint(folder / "ours.ckpt")
        sizes = [(folder / name).stat().st_size for name in ("ours.ckpt", "theirs.ckpt")]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
        again = by_osdp(folder / "0")
        held_out = again.trainer.validate(
            again.module, loader(), ckpt_path=folder / "ours.ckpt", verbose=False
        )
        assert held_out[0]["held_out"] == pytest.approx(ours.logged["held_out"], rel=1e-5)
        for found in (
            by_osdp(folder / "1", Decision.REPLICATE, folder / "ours.ckpt"),
            by_osdp(folder / "2", ckpt_path=folder / "theirs.ckpt"),
            by_ddp(folder / "3", folder / "ours.ckpt"),
        ):
            assert found.losses == pytest.approx(expected.losses[len(ours.losses) :], rel=1e-5)
            torch.testing.assert_close(found.whole, expected.whole, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_files_go_on_under_another_plan_and_with_ddp(two_ranks, tmp_path):
    two_ranks.run(goes_on_from_files, tmp_path)


def from_incomplete_folders(rank: int, world_size: int, folder: Path) -> None:
    with as_lightning(rank, world_size):
        begun = by_osdp(folder / "begun", options=IN_SHARDS, max_epochs=1)
        with pytest.raises(osdp_compile.OsdpError, match="storage_options"):
            begun.trainer.save_checkpoint(folder / "1.ckpt", storage_options={})
        begun.trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        with pytest.raises(osdp_compile.OsdpError, match="has no optimizer state 'optimizer_0'"):
            by_osdp(folder / "2", ckpt_path=folder / "weights.ckpt")
        dist.barrier()
        (folder / "weights.ckpt" / ".metadata").unlink(missing_ok=True)
        dist.barrier()
        with pytest.raises(osdp_compile.OsdpError, match="no complete checkpoint"):
            by_osdp(folder / "3", ckpt_path=folder / "weights.ckpt")


@pytest.mark.thorough
def test_incomplete_checkpoints_are_refused_on_every_rank(two_ranks, tmp_path):
    two_ranks.run(from_incomplete_folders, tmp_path)


def test_an_optimizer_that_lightning_wraps_is_counted_once():
    from lightning.pytorch.core.optimizer import LightningOptimizer

    from osdp_compile.optim.rebind import OptimizerIndex

    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([parameter])
    wrapper = LightningOptimizer(optimizer)
    assert isinstance(wrapper, torch.optim.Optimizer)
    assert OptimizerIndex([parameter]).holding(parameter) == [optimizer]


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "changed", "said"),
    [
        (Manual, {}, "automatic_optimization"),
        (lambda: torch.compile(Regression()), {}, "compiled already"),
        (Regression, {"sync_batchnorm": True}, "sync_batchnorm"),
        (Regression, {"plugins": pl.plugins.FSDPPrecision("32-true")}, "FSDPPrecision"),
    ],
)
def test_what_is_refused_says_what_to_give(tmp_path, module, changed, said):
    with as_lightning(0, 1), pytest.raises(osdp_compile.OsdpError, match=said):
        trainer_of(OsdpStrategy(), tmp_path, 1, **changed).fit(module(), loader())


def test_an_unknown_option_is_an_error_before_anything_starts():
    with pytest.raises(ValueError, match="memory_limit"):
        OsdpStrategy(memory_limits="8GiB")


SCRIPT = """
import lightning.pytorch as pl
import osdp_compile
from osdp_compile.integrations.lightning_strategy import OsdpStrategy
from tests.osdp_compile.integrations.test_lightning_strategy import Regression, loader
from tests.training import SLOW

strategy = OsdpStrategy(memory_limit="1GiB", hardware=SLOW)
trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1)
module = Regression()
trainer.fit(module, loader(), loader())
plan = osdp_compile.plan_of(module)
print(f"rank {trainer.global_rank} of {plan.world_size}, limit {plan.memory_limit_bytes}")
"""


@pytest.mark.thorough
def test_lightning_starts_the_processes(tmp_path, inductor_cache):
    """``Trainer(devices=2)`` runs the script once more for the second rank."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(tmp_path, inductor_cache),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        assert f"rank {rank} of 2, limit {1 << 30}" in done.stdout
    (saved,) = (tmp_path / "lightning_logs").rglob("*.ckpt")
    assert torch.load(saved)["state_dict"]["up.weight"].shape == (32, WIDTH)

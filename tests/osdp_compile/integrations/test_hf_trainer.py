"""transformers.Trainer and accelerate with osdp, beside themselves with DDP on the same ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import osdp_compile
from osdp_compile import Decision, Plan
from osdp_compile.engine import backend
from osdp_compile.integrations.checkpoint_files import OptimizerFiles
from tests.chosen import more
from tests.end_to_end.test_hugging_face import LENGTH, WORDS, made
from tests.ranks import Ranks
from tests.training import SLOW

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS, STEPS = 32, 4
#: Rows of an evaluation: the last batch of each rank is smaller than the others.
EVALUATED = 30


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **changed: Any):
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-5,  # see tests.training.adamw
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(str(folder), **{**given, **changed})


def as_torchrun(rank: int, world_size: int):
    """The environment that torchrun gives a rank; the ranks of tests have a process group."""
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    of_rank |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in of_rank.items()})


def plan_of(model, kind: Decision) -> Plan:
    return Plan.uniform(model.named_parameters(), kind, world_size=2)


def trained(trainer, begun: str | None = None, evaluates: bool = True) -> SimpleNamespace:
    """Trains to the end and saves.

    What was logged of each step, the weights, and the predictions of an evaluation.
    """
    trainer.train(resume_from_checkpoint=begun)
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    saved = Path(trainer.args.output_dir, "saved")
    trainer.save_model(str(saved))
    torch.distributed.barrier()
    whole = transformers.AutoModelForCausalLM.from_pretrained(saved)
    with graphs_lowered() as lowered:
        eval_loss = trainer.evaluate()["eval_loss"] if evaluates else None
        predictions = trainer.predict(rows()[:EVALUATED]).predictions if evaluates else None
    return SimpleNamespace(
        losses=[entry["loss"] for entry in logged],
        norms=[entry["grad_norm"] for entry in logged],
        eval_loss=eval_loss,
        predictions=predictions,
        lowered_to_evaluate=lowered.call_count,
        weights={name: one.detach() for name, one in whole.named_parameters()},
        bytes_saved=(saved / "model.safetensors").stat().st_size,
    )


def by_ddp(folder: Path, begun: str | None = None, **changed: Any) -> SimpleNamespace:
    args = arguments(folder, **changed)
    assert args.parallel_mode is transformers.training_args.ParallelMode.DISTRIBUTED
    data = rows()
    trainer = transformers.Trainer(made("GPT-2"), args, train_dataset=data, eval_dataset=data)
    return trained(trainer, begun)


def by_osdp(
    folder: Path,
    kind: Decision = Decision.SHARD_REGATHER,
    begun: str | None = None,
    whole_optimizer: bool = False,
    **changed: Any,
) -> SimpleNamespace:
    """Also has the trainer. Without ``begun`` it is evaluated, before training too."""
    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    model, data = made("GPT-2"), rows()
    trainer = OsdpTrainer(
        model,
        arguments(folder, torch_compile_backend="osdp", **changed),
        train_dataset=data,
        eval_dataset=data,
        osdp_options={"plan": plan_of(model, kind), "hardware": SLOW},
        osdp_whole_optimizer=whole_optimizer,
    )
    if begun is None:
        with graphs_lowered() as lowered:
            assert_evaluates_as_a_plain_one(trainer, **changed)
        assert lowered.call_count == 0
    result = trained(trainer, begun, evaluates=begun is None)
    figures = [one.get("osdp/predicted_step_seconds") for one in trainer.state.log_history[-4:]]
    assert any(figures), "the log has no figures of the step"
    assert trainer.args.torch_compile_backend == "osdp"
    assert all(isinstance(one, DTensor) for one in model.parameters()) == kind.sharded
    assert osdp_compile.plan_of(model) is not None
    result.trainer = trainer
    return result


def graphs_lowered() -> Any:
    """A context with a mock that is called for each graph that is lowered."""
    return mock.patch.object(backend, "lower", wraps=backend.lower)


def assert_evaluates_as_a_plain_one(trainer: Any, **changed: Any) -> None:
    """Before training. A plain trainer of its own, for one that evaluated trains wrongly."""
    data, args = rows()[:EVALUATED], arguments(Path(trainer.args.output_dir), **changed)
    plain = transformers.Trainer(made("GPT-2"), args)
    found, wanted = (one.predict(data) for one in (trainer, plain))
    assert found.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=1e-5)
    tolerance = 2e-2 if args.bf16 else 1e-4
    np.testing.assert_allclose(found.predictions, wanted.predictions, tolerance, tolerance)


def assert_same(one: SimpleNamespace, other: SimpleNamespace, tolerance: float = 1e-5) -> None:
    """What was logged before a checkpoint is in it, so both are of all steps."""
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(one.losses, other.losses, **close)
    torch.testing.assert_close(one.norms, other.norms, **close)
    if one.eval_loss is not None:
        torch.testing.assert_close(one.eval_loss, other.eval_loss, **close)
        assert one.predictions.shape == (EVALUATED, LENGTH, WORDS)
        np.testing.assert_allclose(one.predictions, other.predictions, tolerance, 10 * tolerance)
    torch.testing.assert_close(one.weights, other.weights, **close)
    assert one.bytes_saved == other.bytes_saved


def trains_as_with_ddp(rank: int, world_size: int, folder: Path) -> list[float]:
    """The losses. Checkpoints have the optimizer's shards, and load under another plan."""
    with as_torchrun(rank, world_size):
        expected = by_ddp(folder / "ddp", save_steps=1)
        assert len(set(expected.losses)) == STEPS
        assert max(expected.norms) > 0.5  # something is clipped
        first = by_osdp(folder / "osdp")
        assert_same(first, expected)
        assert first.lowered_to_evaluate > 0, "a sharded model is not evaluated compiled"

        half = folder / "osdp" / f"checkpoint-{STEPS // 2}"
        assert not (half / "optimizer.pt").exists()
        assert len(list((half / "osdp_optimizer").glob("*.distcp"))) == world_size
        # Into parameters that are cut already.
        assert_same(trained(first.trainer, str(half)), expected)
        with watched_states() as at_load:
            again = by_osdp(folder / "again", Decision.SHARD_KEEP, str(half))
        assert_same(again, expected)
        assert at_load == ["sharded"]  # no rank held whole state
        for kind in more(Decision.REPLICATE):
            assert_same(by_osdp(folder / "replicated", kind, str(half)), expected)
        refuses_incomplete_checkpoints(rank, folder, half)
        goes_on_between_whole_checkpoints(folder, expected)
        return expected.losses


def refuses_incomplete_checkpoints(rank: int, folder: Path, half: Path) -> None:
    """Without metadata, and a plain trainer, which does not read shards."""
    if rank == 0:
        (half / "osdp_optimizer" / ".metadata").rename(folder / "metadata")
    torch.distributed.barrier()
    with pytest.raises(osdp_compile.OsdpError, match="no complete checkpoint"):
        by_osdp(folder / "incomplete", begun=str(half))
    torch.distributed.barrier()
    if rank == 0:
        (folder / "metadata").rename(half / "osdp_optimizer" / ".metadata")
    torch.distributed.barrier()
    with pytest.raises(FileNotFoundError, match=r"optimizer\.pt"):  # not new state in silence
        by_ddp(folder / "plain", str(half))


def goes_on_between_whole_checkpoints(folder: Path, expected: SimpleNamespace) -> None:
    """From DDP's to ours, and from ours to DDP's."""
    given = {"whole_optimizer": True, "save_steps": 1}
    begun = str(folder / "ddp" / f"checkpoint-{STEPS // 2}")
    assert_same(by_osdp(folder / "from ddp", begun=begun, **given), expected)
    later = str(folder / "from ddp" / f"checkpoint-{STEPS - 1}")
    assert_same(by_ddp(folder / "to ddp", later), expected)


@contextlib.contextmanager
def watched_states():
    """How the parameters lie when an optimizer's state is loaded from shards."""
    seen: list[str] = []
    load_state = OptimizerFiles.load_state

    def watched(self: OptimizerFiles) -> None:
        load_state(self)
        tensors = [v for state in self._optimizer.state.values() for v in state.values() if v.dim()]
        seen.append("sharded" if all(isinstance(v, DTensor) for v in tensors) else "whole")

    with mock.patch.object(OptimizerFiles, "load_state", watched):
        yield seen


def goes_on_alone(rank: int, world_size: int, folder: Path, half: str) -> list[float]:
    """The same global batches on one rank."""
    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    with as_torchrun(rank, world_size):
        args = arguments(folder, per_device_train_batch_size=4)
        trainer = OsdpTrainer(made("GPT-2"), args, train_dataset=rows())
        trainer.train(resume_from_checkpoint=half)
        return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.thorough
def test_a_trainer_trains_evaluates_saves_and_goes_on_as_with_ddp(
    two_ranks, inductor_cache, tmp_path
):
    """Under another plan too, in the same trainer, on one rank, from and to DDP's checkpoints."""
    losses, _ = two_ranks.run(trains_as_with_ddp, tmp_path)
    half = str(tmp_path / "osdp" / f"checkpoint-{STEPS // 2}")
    with Ranks(1, inductor_cache) as one_rank:
        (alone,) = one_rank.run(goes_on_alone, tmp_path / "alone", half)
    assert alone == pytest.approx(losses, rel=1e-4)


def test_training_and_evaluation_call_one_compiled_model(tmp_path):
    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    trainer = OsdpTrainer(made("GPT-2"), arguments(tmp_path))
    evaluating = trainer._wrap_model(trainer.model, training=False)
    assert evaluating._orig_mod is trainer.model
    assert trainer._wrap_model(trainer.model) is evaluating
    assert trainer._wrap_model(evaluating) is evaluating


def trains_in_bf16(rank: int, world_size: int, folder: Path) -> None:
    with as_torchrun(rank, world_size):
        expected = by_ddp(folder / "ddp", bf16=True, save_strategy="no")
        found = by_osdp(folder / "osdp", bf16=True, save_strategy="no")
        assert_same(found, expected, 2e-2)
        with pytest.raises(AssertionError):
            assert_same(found, by_ddp(folder / "fp32", save_strategy="no"))


@pytest.mark.thorough
def test_a_trainer_with_autocast(two_ranks, tmp_path):
    two_ranks.run(trains_in_bf16, tmp_path)


def accelerate_alone(rank: int, world_size: int) -> None:
    import accelerate

    def losses(with_osdp: bool) -> list[float]:
        model = made("GPT-2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        loader = torch.utils.data.DataLoader(rows(), batch_size=2)
        accelerator = accelerate.Accelerator(cpu=True)
        if with_osdp:
            optimizer, loader = accelerator.prepare(optimizer, loader)
            model = accelerator.prepare_model(model, evaluation_mode=True)
            options = {"plan": plan_of(model, Decision.SHARD_REGATHER), "hardware": SLOW}
            model = torch.compile(model, backend="osdp", options=options)
        else:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()).mean().item())
        return found

    with as_torchrun(rank, world_size):
        expected = losses(with_osdp=False)
        assert len(expected) == ROWS // 2 // world_size
        torch.testing.assert_close(losses(with_osdp=True), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_accelerate_without_a_trainer(two_ranks):
    two_ranks.run(accelerate_alone)


def test_an_optimizer_that_accelerate_wraps_is_counted_once():
    import accelerate

    from osdp_compile.optim.rebind import OptimizerIndex

    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([parameter])
    wrapper = accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert wrapper is not optimizer and isinstance(wrapper, torch.optim.Optimizer)
    assert OptimizerIndex([parameter]).holding(parameter) == [optimizer]


def a_plain_trainer(rank: int, world_size: int, folder: Path) -> str:
    with as_torchrun(rank, world_size):
        model = made("GPT-2")
        model.compile(backend="osdp")
        trainer = transformers.Trainer(model, arguments(folder), train_dataset=rows())
        with pytest.raises(Exception, match="DistributedDataParallel") as refused:
            trainer.train()
        return str(refused.value)


@pytest.mark.thorough
def test_a_plain_trainer_is_told_of_ours(two_ranks, tmp_path):
    for said in two_ranks.run(a_plain_trainer, tmp_path):
        assert "OsdpTrainer" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch_compile_backend": "inductor"}, "torch_compile_backend='inductor'"),
        ({"torch_compile_mode": "max-autotune", "torch_compile_backend": "osdp"}, "osdp_options"),
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
    ],
)
def test_arguments_for_something_else_are_refused(tmp_path, changed, said):
    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    with pytest.raises(osdp_compile.OsdpError, match=said):
        OsdpTrainer(made("GPT-2"), arguments(tmp_path, **changed))


def test_a_model_that_is_compiled_already_is_refused(tmp_path):
    from osdp_compile.integrations.hf_trainer import OsdpTrainer

    with pytest.raises(osdp_compile.OsdpError, match="osdp_options"):
        OsdpTrainer(torch.compile(made("GPT-2"), backend="osdp"), arguments(tmp_path))

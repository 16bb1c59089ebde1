"""The Python of the README and of the pages runs: in order, page by page, in a fake world.

Nothing is sent and Inductor does not run. All else is as in training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh

import osdp_compile
from osdp_compile.engine import backend
from osdp_compile.integrations.budget import check_budget
from osdp_compile.log_lines import NAMES
from osdp_compile.options import CheckedOptions
from osdp_compile.trace import fake_world, trace_graphs
from passes.pipeline import Pass, Stage
from passes.types.plan import Plan
from tests.chosen import core
from tests.project.pages import PAGES, ROOT, python_blocks

RANKS = 16
WIDTH = 16


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """A page may call ``torch._logging.set_logs``: later tests of the process log as before."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one.level, one.handlers[:], one.propagate) for one in loggers]
    yield
    torch._logging.set_logs()
    for one, (level, handlers, propagate) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.handlers, one.propagate = handlers, propagate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """The model of the pages: blocks, and a loss where targets are given."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean() if targets is None else (x.sum(-1) - targets).square().mean()

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def batch_of_tokens() -> torch.Tensor:
    return torch.randint(64, (2, 8))


#: Pages whose code begins after a model's first call.
AFTER_THE_FIRST_CALL = {
    "checkpoints.md",
    "gradient_accumulation.md",
    "large_models.md",
    "reading_a_plan.md",
}


def names(after_the_first_call: bool) -> dict[str, Any]:
    """The names that the pages take as given."""
    model = Model()
    options = {"memory_limit": "8GiB", "accumulate": True}
    compiled = torch.compile(model, backend="osdp", options=options)

    def train_step(batch: torch.Tensor) -> None:
        compiled(batch).backward()
        model.zero_grad()

    if after_the_first_call:
        train_step(batch_of_tokens())
    return {
        "GPT": Model,
        "Model": Model,
        "batches": [batch_of_tokens() for _ in range(4)],
        "config": None,
        "contextlib": contextlib,
        "dist": dist,
        "fx": fx,
        "init_device_mesh": init_device_mesh,
        "loss_of": lambda model, batch: compiled(batch),
        "micro_batches": [batch_of_tokens() for _ in range(2)],
        "model": model,
        "osdp_compile": osdp_compile,
        "Pass": Pass,
        "Stage": Stage,
        "tokens": batch_of_tokens(),
        "torch": torch,
        "train_step": train_step,
    }


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder and a process group for the code of one page; its own would be another."""
    monkeypatch.chdir(tmp_path)
    lower = backend.lower

    def uncompiled(gm: Any, inputs: Any, session: Any, *_: Any) -> Any:
        return lower(gm, inputs, session, lambda gm, *_, **__: make_boxed_func(gm.forward))

    torch.compiler.reset()
    with (
        fake_world(RANKS),
        mock.patch.object(backend, "lower", uncompiled),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        yield
    torch.compiler.reset()


#: Pages whose code another test runs, or that quote this repository.
ELSEWHERE = {
    "add_a_decision.md": "test_docs.py compares it with the files",
    "budgets.md": "test_the_budget_of_the_page",
    "experiments.md": "quotes programs of their time",
    "hugging_face.md": "tests/osdp_compile/integrations/test_hf_trainer.py",
    "lightning.md": "tests/osdp_compile/integrations/test_lightning_strategy.py",
    "snapshots.md": "test_the_snapshot_of_the_page",
}
#: Pages whose code takes seconds.
DEAR = {"checkpoints.md", "gradient_accumulation.md", "large_models.md", "logs.md"}
DEAR |= {"offline_planning.md", "reading_a_plan.md"}
RUN = {page.name for page in PAGES if python_blocks(page)} - set(ELSEWHERE)


def runnable(code: str) -> str:
    """The code on this machine: without a GPU, with the ranks of the fake world."""
    return code.replace('"cuda"', '"cpu"').replace("world_size=8", f"world_size={RANKS}")


@pytest.mark.parametrize("name", core(sorted(RUN), *sorted(RUN - DEAR)))
def test_code_of(name: str, world: None) -> None:
    page = next(page for page in PAGES if page.name == name)
    given = names(name in AFTER_THE_FIRST_CALL)
    if name == "large_models.md":  # the plan of an earlier run
        osdp_compile.plan_of(given["model"]).save("plan.json")
    if name == "write_a_pass.md":
        given["model"] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        given |= {"name": "mine", "function": lambda gm, ctx: gm}
    for code in python_blocks(page):
        exec(compile(runnable(code), name, "exec"), given)
    if "options" in given:
        CheckedOptions.parse(given["options"])
    if name == "write_a_pass.md":
        given["model"](torch.ones(2, WIDTH)).sum().backward()
        assert list(Path("graphs").glob("*backward-half_gradients*"))


def test_the_snapshot_of_the_page() -> None:
    """The page's test with a fixture that traces and looks for the names, and stores nothing."""
    (code,) = python_blocks(ROOT / "docs" / "snapshots.md")
    seen = []

    def osdp_graphs(model: nn.Module, *args: Any, after: list[str], **given: Any) -> None:
        texts = trace_graphs(model, args, **given)
        seen.extend(texts[name] for name in after)

    given = {"MyModel": lambda: nn.Linear(WIDTH, WIDTH), "torch": torch}
    exec(compile(code, "snapshots.md", "exec"), given)
    given["test_my_model"](osdp_graphs)
    assert len(seen) == 2 and all(text.count("\n") > 3 for text in seen)


def test_the_budget_of_the_page() -> None:
    """The page's test with a fixture that writes the figures, to nowhere."""
    (code,) = python_blocks(ROOT / "docs" / "budgets.md")
    stored = mock.Mock(updates=True)
    stored.read.return_value = None

    def osdp_budget(model: nn.Module, *args: Any, **given: Any) -> Plan:
        return check_budget(model, args, stored, **given)

    given = {"MyModel": Model, "torch": torch}
    exec(compile(code, "budgets.md", "exec"), given)
    given["test_it_fits"](osdp_budget)
    (text,) = stored.store.call_args.args
    assert "blocks.{0..1}.up.weight" in text


def test_pages_that_are_not_run_are_there() -> None:
    assert set(ELSEWHERE) <= {page.name for page in PAGES}
    assert len(RUN) >= 10 and set(RUN) >= AFTER_THE_FIRST_CALL

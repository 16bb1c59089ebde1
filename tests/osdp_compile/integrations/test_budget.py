"""Budgets: a model within them passes; one above them, or grown, fails and says what grew."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from osdp_compile.errors import InfeasibleLimit
from osdp_compile.integrations.budget import OverBudget, check_budget
from osdp_compile.planning.offline import OfflineStep, offline_step
from osdp_compile.reports.budget_figures import BudgetFigures
from passes.types.plan import Plan
from tests.training import SLOW

pytestmark = pytest.mark.usefixtures("short_search")


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    def __init__(self, layers: int = 2, inner: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Kept:
    """A stored text in memory, with the flags of pytest."""

    path = "__snapshots__/test_it/test_fits[budget].json"

    def __init__(self, text: str | None = None, updates: bool = False) -> None:
        self.text, self.updates = text, updates
        self.stored: list[str] = []

    def read(self) -> str | None:
        return self.text

    def store(self, text: str) -> bool:
        self.stored.append(text)
        if self.updates:
            self.text = text
        return self.text == text


def check(kept: Kept, model: nn.Module | None = None, rows: int = 16, **given: Any) -> Plan:
    given = {"world_size": 8, "hardware": SLOW, **given}
    return check_budget(model or Deep(), (torch.ones(rows, 64),), kept, **given)


def failure(*args: Any, **given: Any) -> str:
    with pytest.raises(OverBudget) as raised:
        check(*args, **given)
    return str(raised.value)


@pytest.fixture(scope="module")
def text() -> str:
    """The stored figures of two layers."""
    kept = Kept(updates=True)
    check(kept)
    assert kept.text is not None
    return kept.text


def test_equal_figures_pass_without_any_growth(text):
    kept = Kept(text)
    plan = check(kept, grows=0)
    assert plan == offline_step(Deep(), (torch.ones(16, 64),), world_size=8, hardware=SLOW).plan()
    assert kept.stored == [text], "the file does not count as used"


def test_the_flag_writes_the_figures_and_accepts_any_growth(text):
    kept = Kept(text, updates=True)
    check(kept, Deep(3))
    assert kept.text is not None and kept.text != text
    assert "blocks.{0..2}.up.weight" in kept.text
    check(Kept(kept.text), Deep(3), grows=0)


def test_without_stored_figures_it_fails_and_says_what_to_do():
    said = failure(Kept())
    assert said == (
        "no figures are stored in __snapshots__/test_it/test_fits[budget].json: "
        "pytest --snapshot-update writes them"
    )


def test_a_new_layer_is_named(text):
    kept = Kept(text)
    said = failure(kept, Deep(3)).splitlines()
    assert said[0].startswith("the predicted peak grew by ")
    assert said[0].endswith(": more than grows=0.02")
    assert said[1].startswith("the predicted step grew by ")
    at = said.index("parameters, whole: +129.25 KiB")
    assert said[at + 1 : at + 3] == [
        "  blocks.2.down.weight: new, 64x256 float32, +64.00 KiB",
        "  blocks.2.up.weight: new, 256x64 float32, +64.00 KiB",
    ]
    assert said[-1].startswith("if the growth is wanted: pytest --snapshot-update stores it in ")
    assert kept.text == text


def test_wider_layers_are_a_group(text):
    said = failure(Kept(text), Deep(inner=512))
    assert "  blocks.{0..1}.up.weight: 256x64 float32 -> 512x64 float32 each, +128.00 KiB\n" in said


def test_a_larger_batch_names_the_activation_and_no_parameter(text):
    said = failure(Kept(text), rows=64)
    assert "parameters, whole" not in said
    assert re.search(r"\n  activations: \d.* KiB, \+1\d\d\.\d\d KiB\n", said)
    assert "  blocks.1: saved for the backward, activations: 16.00 KiB -> 64.00 KiB, +" in said
    assert "forward: compute" not in said, "the step grew by less than the share"


def test_growth_within_the_share_passes_and_the_stored_figures_stay(text):
    kept = Kept(text)
    check(kept, rows=64, grows=100)
    assert kept.stored == [text]


def test_a_smaller_step_passes_and_the_stored_figures_stay(text):
    kept = Kept(text)
    check(kept, Deep(1))
    assert kept.stored == [text]


def test_above_the_peak(text):
    peak = BudgetFigures.from_text(text).peak_bytes
    check(Kept(text), peak=peak)
    said = failure(Kept(text), peak=peak - 1024)
    assert said.splitlines()[0].endswith(f"1.00 KiB above the budget peak={peak - 1024}")
    assert "largest tensors at the peak:" in said and "forward: compute" not in said
    assert "if the growth is wanted" not in said


def test_above_the_step(text):
    step = BudgetFigures.from_text(text).step_seconds
    check(Kept(text), step=step)
    said = failure(Kept(text), step=step - 1e-4)
    assert re.match(r"the predicted step is \d.* ms, 100 us above the budget step=0\.\d+\n", said)
    assert re.search(r"\n  backward: compute \d.* us, exposed communication \d.* ms", said)
    assert "peak, in the" not in said


def test_the_flag_does_not_lift_the_budget_and_the_failure_still_says_what_grew(text):
    kept = Kept(text, updates=True)
    said = failure(kept, Deep(3), peak="64KiB")
    assert "above the budget peak='64KiB'\n" in said and "grew by" not in said
    assert "blocks.2.up.weight: new" in said
    assert kept.text != text


def test_without_stored_figures_the_budget_holds_too():
    said = failure(Kept(), step="1us").splitlines()
    assert said[0].startswith("the predicted step is ")
    assert said[1].startswith("no figures are stored in ")


def test_an_infeasible_limit_has_its_own_message_and_the_new_parameters(text):
    refused = InfeasibleLimit("no plan fits: the least possible is 200 KiB", 200 << 10)
    with mock.patch.object(OfflineStep, "plan", side_effect=refused):
        kept = Kept(text)
        said = failure(kept, Deep(3), memory_limit="1MiB").splitlines()
        assert said[:4] == [
            str(refused),
            "the stored figures are of other settings:",
            "  memory limit: none -> 1 MiB",
            "parameters, whole: +129.25 KiB",
        ]
        assert kept.stored == [text], "the file does not count as used"
        assert failure(Kept(), Deep(3)) == str(refused)


def test_a_limit_under_which_no_plan_fits_names_the_least_possible():
    assert "least possible" in failure(Kept(), Deep(1), memory_limit="70KiB")


def test_other_settings_are_named(text):
    said = failure(Kept(text), world_size=16, grows=0, step="1us")
    assert "the stored figures are of other settings:\n  ranks: 8 -> 16\n" in said


def test_damaged_figures_are_named_until_they_are_written(text):
    kept = Kept(text[:-10])
    assert failure(kept).startswith(f"no budget figures are in {Kept.path}: ")
    kept.updates = True
    check(kept)
    assert kept.text == text


def test_the_failure_is_the_same_in_every_run(text):
    given = {"rows": 64, "peak": "64KiB", "step": "1us"}
    assert failure(Kept(text), Deep(3), **given) == failure(Kept(text), Deep(3), **given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peak": "70"}, "peak of osdp_budget: '70' is 70 bytes: did you mean '70GiB'"),
        ({"peak": "70ms"}, "peak of osdp_budget: '70ms' is not a size"),
        ({"step": "300"}, "step of osdp_budget: '300' is not a duration"),
        ({"step": 0}, "step of osdp_budget: 0 is not a duration"),
        ({"grows": -0.1}, "grows=-0.1 is not a share"),
        ({"grows": "2%"}, "grows='2%' is not a share"),
    ],
)
def test_malformed_budgets_are_named_and_the_stored_figures_stay(text, wrong, message):
    kept = Kept(text)
    with pytest.raises(ValueError, match=message):
        check(kept, **wrong)
    assert kept.stored == [text]


def test_the_options_are_those_of_plan():
    with pytest.raises(TypeError, match="memory_limits"):
        check(Kept(), memory_limits="8GiB")
    with pytest.raises(ValueError, match="optimizer"):
        check(Kept(), optimizer="adamm")

"""``osdp diff``: prints, and its exit status is that of ``diff``."""

from __future__ import annotations

import pytest
import torch

from osdp_compile.cli.main import main
from passes.types.decision import Decision
from passes.types.plan import Plan

PARAMETERS = [(f"blocks.{i}.up.weight", torch.zeros(8, 8)) for i in range(2)]


@pytest.fixture
def plans(tmp_path):
    """Two files of plans."""
    paths = []
    for name, decision in (("keep", Decision.SHARD_KEEP), ("again", Decision.SHARD_REGATHER)):
        paths.append(tmp_path / f"{name}.json")
        Plan.uniform(PARAMETERS, decision, world_size=2).save(paths[-1])
    return [str(path) for path in paths]


def test_plans_that_differ(plans, capsys):
    assert main(["diff", *plans]) == 1
    said = capsys.readouterr().out
    assert "blocks.{0..1}.up.weight" in said and "keep.json" in said and "again.json" in said


def test_alike_plans(plans, capsys):
    assert main(["diff", plans[0], plans[0]]) == 0
    assert capsys.readouterr().out == "no differences\n"


def test_files_of_one_name_are_told_by_their_folders(plans, tmp_path, capsys):
    (tmp_path / "old").mkdir()
    other = tmp_path / "old" / "keep.json"
    other.write_text((tmp_path / "again.json").read_text())
    assert main(["diff", str(other), plans[0]]) == 1
    assert "old/keep.json" in capsys.readouterr().out


@pytest.mark.parametrize("held", ["no JSON", '{"format": 3}', "[]"])
def test_a_file_without_a_plan_is_named(held, plans, tmp_path, capsys):
    path = tmp_path / "held.json"
    path.write_text(held)
    assert main(["diff", plans[0], str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("osdp diff: ") and str(path) in said.replace("\n", "")


def test_a_file_that_is_not_there_is_named(plans, capsys):
    assert main(["diff", plans[0], "nothing.json"]) == 2
    assert "nothing.json" in capsys.readouterr().err

"""Alike frames: those whose parameters the plan treats alike, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from osdp_compile.model.alike_frames import alike_frames
from passes.types.context import Context, Parameter
from passes.types.plan import Plan
from tests.training import SLOW

NAMES = [f"{block}.{name}" for block in "abc" for name in ("up", "down")]


def run_of(block: str, **other: str) -> dict[str, str]:
    """A block's run of the code of block ``a``."""
    return {f"a.{name}": other.get(name, f"{block}.{name}") for name in ("up", "down")}


def context(trained: Sequence[str] = NAMES, replicated: Sequence[str] = ()) -> Context:
    named = [(name, nn.Parameter(torch.empty(4, 4))) for name in NAMES]
    plans = [Plan.uniform(named, one, world_size=2) for one in ("shard_keep", "replicate")]
    rows = tuple(
        other if own.name in replicated else own
        for own, other in zip(plans[0].parameters, plans[1].parameters, strict=True)
    )
    parameters = tuple(
        Parameter(name, (4, 4), "float32", 16, 4, name in trained, 128) for name in NAMES
    )
    plan = plans[0].replace(parameters=rows)
    return Context(
        plan=plan, hardware=SLOW, parameters=parameters, world_size=2, rank=0, group_name=""
    )


def test_blocks_with_equal_rows_share_the_names_of_the_first():
    found = alike_frames([run_of("a"), run_of("b"), run_of("c")], context())
    assert [found.first_of[name] for name in NAMES] == ["a.up", "a.down"] * 3
    assert found.times_of(["a.down", "a.up"]) == 3


def test_blocks_with_other_decisions_and_frozen_ones_share_with_their_like():
    runs = [run_of("a"), run_of("b"), run_of("c")]
    for ctx in (
        context(replicated=["b.up", "c.up"]),
        context(trained=["a.up", "a.down", "b.down", "c.down"]),
    ):
        found = alike_frames(runs, ctx)
        assert [found.first_of[name] for name in NAMES] == [
            "a.up",
            "a.down",
            *["b.up", "b.down"] * 2,
        ]
        assert found.times_of(["b.up", "b.down"]) == 2 and found.times_of(["a.up", "a.down"]) == 1


def test_a_block_that_shares_a_parameter_is_alike_to_itself_only():
    runs = [run_of("a"), run_of("b", up="a.up"), run_of("c"), run_of("c")]
    found = alike_frames(runs, context())
    assert all(found.first_of[name] == name for name in NAMES if name != "b.up")
    assert found.times_of(["c.up", "c.down"]) == 2  # it runs twice


def test_without_runs_nothing_is_alike():
    found = alike_frames([], context())
    assert not found.first_of and found.times_of(NAMES) == 1

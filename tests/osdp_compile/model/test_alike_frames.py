"""Alike frames: those whose parameters the plan treats alike, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from osdp_compile.model.alike_frames import alike_frames, alike_parts
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


class Pair(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)


def parts_of(*blocks: nn.Module, extra: Sequence[int] = (), replicated: Sequence[str] = ()):
    """The first parameters of blocks, all of which are compiled, with others by their index."""
    root = nn.Sequential(*blocks)
    named = list(root.named_parameters())
    plans = [Plan.uniform(named, one, world_size=2) for one in ("shard_keep", "replicate")]
    rows = tuple(
        other if own.name in replicated else own
        for own, other in zip(plans[0].parameters, plans[1].parameters, strict=True)
    )
    parts = [*blocks, *([root, root[0].up][one] for one in extra)]
    found = alike_parts(root, parts, plans[0].replace(parameters=rows))
    return [found.first_of.get(f"{index}.up.weight") for index in range(len(blocks))], found


def test_parts_with_equal_modules_and_rows_share_the_names_of_the_first():
    names, found = parts_of(Pair(), Pair(), Pair())
    assert names == ["0.up.weight"] * 3
    own = [name for name, first in found.first_of.items() if name == first]
    assert len(own) == 4 and found.times_of(own) == 3


def test_parts_of_other_shapes_classes_decisions_or_frozen_ones_are_not_alike():
    class Other(Pair):
        pass

    assert parts_of(Pair(), Pair(6))[0] == ["0.up.weight", "1.up.weight"]
    assert parts_of(Pair(), Other())[0] == ["0.up.weight", "1.up.weight"]
    assert parts_of(Pair(), Pair(), replicated=["1.down.bias"])[0] == ["0.up.weight", "1.up.weight"]
    assert parts_of(Pair(), Pair().requires_grad_(False))[0] == ["0.up.weight", "1.up.weight"]


def test_a_part_within_another_is_no_frame_and_a_whole_model_shares_nothing():
    assert parts_of(Pair(), Pair(), extra=[1])[0] == ["0.up.weight"] * 2
    assert parts_of(Pair(), Pair(), extra=[0])[0] == [None, None]


def test_parts_that_share_a_parameter_are_not_alike():
    first, second = Pair(), Pair()
    second.up.weight = first.up.weight
    _, found = parts_of(first, second)
    assert found.first_of["1.up.bias"] == "1.up.bias"

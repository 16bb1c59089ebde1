"""The pipeline: contracts of passes, their order, and putting one's own among them."""

from __future__ import annotations

import pytest
from torch import fx

from passes.pipeline import (
    Pass,
    PipelineError,
    Stage,
    default_passes,
    insert_after,
    insert_before,
    run,
    validate,
)
from passes.types.context import Context
from tests.passes.graphs import GraphBuilder, context


def nothing(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    return gm


def mine(**changes: object) -> Pass:
    return Pass("mine", nothing, **changes)  # type: ignore[arg-type]


def names(passes: list[Pass]) -> list[str]:
    return [one.name for one in passes]


def test_the_default_passes_meet_each_others_needs():
    validate(default_passes())


def test_a_pass_goes_right_before_or_right_after_another():
    before = names(default_passes())
    index = before.index("bucket")
    assert names(insert_before(default_passes(), "bucket", mine())) == [
        *before[:index],
        "mine",
        *before[index:],
    ]
    assert names(insert_after(default_passes(), "bucket", mine())) == [
        *before[: index + 1],
        "mine",
        *before[index + 1 :],
    ]


def test_inserting_leaves_the_given_list_alone():
    passes = default_passes()
    insert_before(passes, "dedupe", mine())
    assert names(passes) == names(default_passes())


@pytest.mark.parametrize("insert", [insert_before, insert_after])
def test_an_unknown_name_is_told_with_the_known_ones(insert: object):
    with pytest.raises(PipelineError, match=r"no pass is named 'buket'.*'dedupe'.*'bucket'"):
        insert(default_passes(), "buket", mine())  # type: ignore[operator]


def test_a_need_that_nothing_leaves_names_the_pass_and_the_need():
    with pytest.raises(PipelineError, match=r"pass 'mine' needs \['snow'\] and no pass before it"):
        validate([*default_passes(), mine(needs=("snow",))])


def test_a_need_that_is_left_later_says_after_which_pass_to_go():
    with pytest.raises(PipelineError, match=r"needs \['costs'\].*put it after \['annotate'\]"):
        validate(insert_before(default_passes(), "annotate", mine(needs=("costs",))))
    validate(insert_after(default_passes(), "annotate", mine(needs=("costs",))))


@pytest.mark.parametrize("name", ["dedupe", "shard", "annotate"])
def test_leaving_out_a_pass_that_another_needs_is_refused(name: str):
    with pytest.raises(PipelineError, match="needs"):
        validate([one for one in default_passes() if one.name != name])


@pytest.mark.parametrize("name", ["bucket", "reorder", "tag"])
def test_leaving_out_a_pass_that_no_other_needs_is_allowed(name: str):
    validate([one for one in default_passes() if one.name != name])


def test_two_passes_of_one_name_are_refused():
    with pytest.raises(PipelineError, match="two passes are named 'mine'"):
        validate([*default_passes(), mine(), mine()])


def test_joint_passes_come_before_the_parts_wherever_they_stand_in_the_list():
    maker = Pass("maker", nothing, Stage.JOINT, leaves=("snow",))
    validate([mine(needs=("snow",)), maker])
    with pytest.raises(PipelineError, match="'mine' needs"):
        validate([mine(stage=Stage.JOINT, needs=("snow",)), Pass("m", nothing, leaves=("snow",))])


def test_running_a_stage_runs_its_passes_in_order_each_on_what_the_last_gave():
    seen: list[tuple[str, fx.GraphModule]] = []
    builder = GraphBuilder()
    start = builder.finish(builder.input("x", [1]))

    def named(name: str, stage: Stage) -> Pass:
        def function(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
            seen.append((name, gm))
            return fx.GraphModule(gm, gm.graph)

        return Pass(name, function, stage)

    passes = [named("b", Stage.PARTS), named("joint", Stage.JOINT), named("a", Stage.PARTS)]
    observed: list[tuple[str, fx.GraphModule]] = []
    last = run(
        passes, Stage.PARTS, start, context(), lambda one, gm, _: observed.append((one.name, gm))
    )
    assert [name for name, _ in seen] == ["b", "a"]
    assert [name for name, _ in observed] == ["b", "a"]
    assert seen[0][1] is start
    assert seen[1][1] is observed[0][1]
    assert last is observed[1][1]

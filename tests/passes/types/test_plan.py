"""The plan as data: uniform plans, comparing with a model, saving and loading."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from passes.types.decision import DECISIONS, FLAT_DECISIONS, Decision
from passes.types.plan import OF_INPUT, Collective, ParameterPlan, Plan, Prediction, shardable


def model():
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 1))


def rows(module):
    return [(n, tuple(p.shape), str(p.dtype)[6:]) for n, p in module.named_parameters()]


def a_plan() -> Plan:
    """A plan with every field set."""
    return Plan(
        parameters=(
            ParameterPlan("a", (4, 2), "float32", Decision.SHARD_REGATHER, 64, "memory"),
            ParameterPlan("b", (), "bfloat16", Decision.REPLICATE),
            ParameterPlan("up", (8, 2), "float32", Decision.SHARD_REGATHER, 64, "", 2, 0, None, 1),
            ParameterPlan("down", (2, 8), "float32", Decision.SHARD_REGATHER, 64, "", 2, 1, "up"),
        ),
        world_size=2,
        memory_limit_bytes=1 << 30,
        bucket_bytes=1 << 16,
        in_flight_bytes=1 << 20,
        prediction=Prediction(
            step_seconds=0.25,
            compute_seconds=0.125,
            exposed_seconds=0.0625,
            peak_bytes=100,
            peak={"parameters": 60, "activations": 40},
        ),
        ranks_of_a_host=2,
    )


def test_which_decisions_shard_and_keep_and_stay_within_a_host():
    def those(which):
        return {decision.name for decision in DECISIONS if which(decision)}

    within = {"shard_host_keep", "shard_host_regather"}
    assert those(lambda one: one.sharded) == {"shard_keep", "shard_regather", *within}
    assert those(lambda one: one.keep) == {"shard_keep", "shard_host_keep"}
    assert those(lambda one: one.within_host) == within
    assert {one.name for one in FLAT_DECISIONS} == those(lambda _: True) - within
    assert [one.number for one in DECISIONS] == [*range(len(DECISIONS))]


@pytest.mark.parametrize(
    ("shape", "world_size", "can"),
    [
        ((), 2, False),
        ((0, 4), 2, False),
        ((1,), 2, False),
        ((1, 64), 2, False),
        ((2,), 2, True),
        ((3,), 4, False),
        ((3, 4), 4, True),
        ((2, 2), 8, False),
        ((64, 64), 1024, True),
    ],
)
def test_what_can_be_cut_along_its_first_dimension(shape, world_size, can):
    assert shardable(shape, world_size) is can


@pytest.mark.parametrize("decision", [*DECISIONS, "shard_keep"])
def test_a_uniform_plan_shards_what_can_be_sharded(decision):
    plan = Plan.uniform(model().named_parameters(), decision, world_size=4, ranks_of_a_host=2)
    decisions = {row.name: row.decision for row in plan.parameters}
    cannot = {"2.weight", "2.bias"}  # one row each
    assert list(decisions) == [name for name, _ in model().named_parameters()]
    assert {d for name, d in decisions.items() if name not in cannot} == {Decision.named(decision)}
    assert {decisions[name] for name in cannot} == {Decision.REPLICATE}
    assert plan["0.weight"].shape == (6, 8) and plan["0.weight"].dtype == "float32"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan.uniform("fsdp"),
        lambda: Plan.uniform(model().named_parameters()),
        lambda: Plan.uniform(model().named_parameters(), "fsdp", world_size=8),
        lambda: Decision.named("fsdp"),
    ],
)
def test_a_word_that_is_no_decision_lists_them(make):
    with pytest.raises(ValueError, match="is not a decision") as error:
        make()
    for one in DECISIONS:
        assert repr(one.name) in str(error.value)
    assert "'shard_regather' (FSDP" in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plan.uniform("shard_regather"),
        lambda: Plan.uniform(model(), "shard_regather", world_size=8),
        lambda: Plan.uniform(model().parameters(), "shard_regather", world_size=8),
        lambda: Plan.uniform(3, "shard_regather", world_size=8),
        lambda: Plan.uniform(model().named_parameters(), "shard_regather"),
    ],
)
def test_arguments_of_another_kind_are_shown_the_right_ones(make):
    with pytest.raises(TypeError) as error:
        make()
    assert "Plan.uniform(model.named_parameters(), 'shard_regather', world_size=8)" in str(
        error.value
    )


def test_within_a_host_more_can_be_sharded_than_over_all_ranks():
    named = [("bias", torch.empty(8))]

    def decision(wanted):
        return Plan.uniform(named, wanted, world_size=1024, ranks_of_a_host=8).decision("bias")

    assert decision("shard_regather") == Decision.REPLICATE
    assert decision("shard_host_regather") == Decision.SHARD_HOST_REGATHER
    with pytest.raises(ValueError, match="'shard_host_keep' needs ranks_of_a_host"):
        Plan.uniform(named, "shard_host_keep", world_size=1024)


def test_a_plan_that_shards_within_hosts_fits_hosts_of_as_many_ranks_only():
    plan = Plan.uniform(
        model().named_parameters(), "shard_host_keep", world_size=8, ranks_of_a_host=4
    )
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.mismatch(rows(model()), 8, 4) is None
    said = "the plan shards within hosts of 4 ranks, this run has "
    assert plan.mismatch(rows(model()), 8, 2) == said + "hosts of 2"
    assert plan.mismatch(rows(model()), 8) == (
        said + "no two-dimensional mesh with rates along both"
    )
    flat = Plan.uniform(model().named_parameters(), "shard_keep", world_size=8, ranks_of_a_host=4)
    assert flat.mismatch(rows(model()), 8, 2) is None and flat.mismatch(rows(model()), 8) is None


def test_a_plan_saved_before_there_were_hosts_can_be_read():
    saved = a_plan().to_dict()
    del saved["ranks_of_a_host"]
    assert Plan.from_dict(saved) == a_plan().replace(ranks_of_a_host=None)


def test_what_was_saved_without_later_fields_is_saved_with_them():
    saved = a_plan().to_dict()
    for row in saved["parameters"]:
        del row["kept_slices"]
    again = Plan.from_dict(saved).to_dict()
    assert [row["kept_slices"] for row in again["parameters"]] == [0] * len(saved["parameters"])


def test_a_plan_of_format_2_is_read():
    saved = a_plan().to_dict()
    names = {"a": "shard_again", "b": "replicate", "up": "shard_again", "down": "shard_again"}
    for row in saved["parameters"]:
        row["decision"] = names[row["name"]]
    for collectives in saved["order"].values():
        for one in collectives:
            one["leg"] = one.pop("stage")
    assert Plan.from_dict({**saved, "format": 2}) == a_plan()
    saved["parameters"][0]["decision"] = "shard_sometimes"
    with pytest.raises(ValueError, match="shard_sometimes"):
        Plan.from_dict({**saved, "format": 2})


def test_an_unknown_decision_is_refused():
    with pytest.raises(ValueError, match="shard_sometimes"):
        Plan.uniform(model().named_parameters(), "shard_sometimes", world_size=2)


def test_a_plan_is_asked_by_name():
    plan = a_plan()
    assert plan.decision("a") == Decision.SHARD_REGATHER
    assert plan["b"] is plan.parameters[1]
    assert "a" in plan and "c" not in plan
    with pytest.raises(KeyError):
        plan.decision("c")


def test_a_changed_copy_knows_its_own_names():
    plan = a_plan()
    assert plan.decision("a") == Decision.SHARD_REGATHER  # names are looked up once and kept
    changed = plan.replace(parameters=(ParameterPlan("c", (2,), "float32", Decision.REPLICATE),))
    assert "c" in changed and "a" not in changed
    assert "a" in plan and "c" not in plan


def test_a_plan_fits_the_model_it_was_made_for():
    plan = Plan.uniform(model().named_parameters(), "shard_keep", world_size=2)
    assert plan.mismatch(rows(model()), 2) is None


def test_one_rank_has_nothing_to_shard_over():
    plan = Plan.uniform(model().named_parameters(), "shard_keep", world_size=1)
    assert not plan.shards
    assert plan.mismatch(rows(model()), 1) is None
    several = Plan.uniform(model().named_parameters(), "shard_keep", world_size=2)
    said = "the plan shards parameters, and this run has one rank"
    assert several.replace(world_size=1).mismatch(rows(model()), 1) == said


def test_the_first_difference_to_a_model_is_named():
    plan = Plan.uniform(model().named_parameters(), "shard_keep", world_size=2)
    named = rows(model())
    more = [*named, ("3.weight", (2, 2), "float32")]
    wider = [("0.weight", (6, 9), "float32"), *named[1:]]
    halved = [(name, shape, "bfloat16") for name, shape, _ in named]
    assert plan.mismatch(named, 4) == "the plan is for 2 ranks, this run has 4"
    assert plan.mismatch(more, 2) == "the model's parameter '3.weight' is not in the plan"
    assert plan.mismatch(named[1:], 2) == "the plan's parameter '0.weight' is not in the model"
    assert plan.mismatch(wider, 2) == (
        "parameter '0.weight' has shape (6, 9) here and (6, 8) in the plan"
    )
    assert plan.mismatch(halved, 2) == (
        "parameter '0.weight' has dtype bfloat16 here and float32 in the plan"
    )


def test_a_saved_plan_loads_as_it_was(tmp_path):
    a_plan().save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == a_plan()
    assert Plan.load(str(tmp_path / "plan.json")).prediction == a_plan().prediction
    bare = Plan.uniform([("weight", torch.empty(2, 2))], "replicate", world_size=1)
    bare.save(tmp_path / "bare.json")
    assert Plan.load(tmp_path / "bare.json") == bare


def test_an_order_keeps_its_stages_and_one_that_was_saved_without_any_has_none():
    first, second = Collective(("a", "b"), True), Collective(("a", "b"), True, stage=1)
    plan = a_plan().replace(order={"forward": (first, second)})
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert second.first == first and second.label == "gather a+b, stage 2"
    saved = a_plan().replace(order={"forward": (first,)}).to_dict()
    for one in saved["order"]["forward"]:
        del one["stage"]
    assert Plan.from_dict(saved).order == {"forward": (first,)}


def test_an_order_is_found_whether_the_graph_has_stages_or_not():
    first, second = Collective(("a",), True), Collective(("a",), True, stage=1)
    plan = a_plan().replace(order={"forward": (first, second)})
    for graph in ([first], [first, second]):
        assert plan.order_for("forward", graph) == (first, second)
    assert plan.order_for("forward", [Collective(("b",), True)]) is None


names = st.text(st.characters(codec="utf-8"), min_size=1)
sizes = st.integers(min_value=0, max_value=1 << 40)
plans = st.builds(
    Plan,
    parameters=st.lists(
        st.builds(
            ParameterPlan,
            name=names,
            shape=st.lists(sizes, max_size=3).map(tuple),
            dtype=names,
            decision=st.sampled_from(DECISIONS),
            saved_bytes=st.integers(),
            reason=st.text(st.characters(codec="utf-8")),
        ),
        max_size=4,
    ).map(tuple),
    world_size=sizes,
    memory_limit_bytes=st.none() | sizes,
    bucket_bytes=sizes,
    in_flight_bytes=st.none() | sizes,
    prediction=st.none()
    | st.builds(
        Prediction,
        step_seconds=st.floats(allow_nan=False),
        compute_seconds=st.floats(allow_nan=False),
        exposed_seconds=st.floats(allow_nan=False),
        peak_bytes=sizes,
        peak=st.dictionaries(names, sizes, max_size=3),
    ),
)


@given(plans)
def test_any_plan_survives_json(plan):
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no plan"),
        ("[]", "not a plan of format 3 .found 'list'"),
        ("{}", "not a plan of format 3 .found None"),
        ('{"format": 1}', "not a plan of format 3 .found 1"),
        ('{"format": 2}', "damaged.*parameters"),
        ('{"format": 2, "parameters": [{"name": "a"}]}', "damaged.*shape"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused(tmp_path, text, said):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data["parameters"][0].update(decision="shard_sometimes"),
        lambda data: data.update(parameters=3),
        lambda data: data["prediction"].pop("peak"),
        lambda data: data["prediction"].update(more=1),
        lambda data: data["parameters"][0].pop("decision"),
        lambda data: data["parameters"][0].pop("reason"),
        lambda data: data.pop("bucket_bytes"),
        lambda data: data["parameters"][0]["decision"].update(scope="some"),
        lambda data: data.pop("world_size"),
    ],
)
def test_a_damaged_plan_is_refused(damage):
    data = a_plan().to_dict()
    damage(data)
    with pytest.raises(ValueError):
        Plan.from_dict(data)


def test_a_split_is_what_the_row_says_and_leaves_the_rest_open():
    split = a_plan().split("up", 4, kept_slices=3)
    assert (split["up"].slices, split["up"].along, split["up"].kept_slices) == (4, 0, 3)
    assert split["up"].kept_share == 0.75 and a_plan()["down"].kept_share == 0.0
    assert split.prediction is None and not split.order
    assert split["down"] == a_plan()["down"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 5), r"'a' of shape \(4, 2\) has no 5 slices along 0"),
        (("b", 2), r"'b' of shape \(\) has no 2 slices along 0"),
        (("down", 4, 1, "up"), "'down' cannot be sliced like 'up': that must be in 4 slices"),
        (("down", 2, 1, "a"), "'down' cannot be sliced like 'a'"),
        (("up", 2, 0, None, 3), "'up': 3 of 2 slices cannot be kept"),
        (
            ("up", 2, OF_INPUT, None, 1),
            "'up' is shard_regather and sliced by the rows of its input",
        ),
        (("kept", 2, 0, None, 1), "'kept' is shard_keep: kept_slices needs a regathered parameter"),
    ],
)
def test_a_split_that_cannot_be_is_refused(arguments, message: str):
    kept = ParameterPlan("kept", (4,), "float32", Decision.SHARD_KEEP)
    plan = a_plan().replace(parameters=(*a_plan().parameters, kept))
    with pytest.raises(ValueError, match=message):
        plan.split(*arguments)

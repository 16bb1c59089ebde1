"""Optimizers and what is done around their steps: clipping, accumulating, schedules."""

from __future__ import annotations

import copy
import functools
import gc
import sys
from itertools import product
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from osdp_compile import OsdpError
from tests.chosen import more, others
from tests.training import (
    Recipe,
    adamw,
    each_trains_like_reference,
    finish_step,
    normal_batch,
    placements,
    plan_options,
    sgd,
    trains_like_reference,
    whole,
)


def three_layers():
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )


#: Every decision beside every other, by hand.
MIXED = {
    "0.weight": "shard_regather",
    "0.bias": "replicate",
    "2.weight": "shard_keep",
    "2.bias": "shard_regather",
    "4.weight": "replicate",
    "4.bias": "shard_keep",
}
PLANS = pytest.mark.parametrize(
    "plan",
    ["shard_regather", MIXED, *more("replicate", "shard_keep")],
    ids=lambda p: str(p)[:11],
)


def halved_each_step(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def warmed_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)


@PLANS
def test_clipping_several_backwards_and_schedules(two_ranks, plan):
    recipes = {
        "clipped by the norm of the whole": Recipe(max_norm=0.05, optimizer=adamw),
        "several backwards before a step": Recipe(backwards=3, optimizer=adamw),
        "halved each step": Recipe(schedule=halved_each_step, optimizer=adamw, steps=4),
        "warmed up": Recipe(schedule=warmed_up, optimizer=adamw, steps=4),
    }
    found = each_trains_like_reference(two_ranks, three_layers, plan, recipes)
    clipped = found["clipped by the norm of the whole"]
    assert len(clipped.osdp.norms) == 3
    assert min(clipped.reference.norms) > 0.05, "nothing is clipped"


def accumulate_into_zeros(rank, world_size, plan):
    """Gradients set to zeros and added into, never None; returns the largest difference."""
    model = three_layers()
    reference = copy.deepcopy(model)
    options = plan_options(model, plan, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    for step in range(2):
        batch = normal_batch(step, 0, 0)
        for one, call in ((model, compiled), (reference, reference)):
            one.zero_grad(set_to_none=False)
            call(batch).square().mean().backward()
            call(batch + 1).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(isinstance(grad, DTensor) for grad in grads.values())
    assert all(
        grad.placements == p.placements
        for grad, p in zip(grads.values(), model.parameters(), strict=True)
    )
    return max(
        (whole(grads[name]) - p.grad).abs().max().item() for name, p in reference.named_parameters()
    )


def test_gradients_kept_as_zeros_between_steps(two_ranks):
    assert max(two_ranks.run(accumulate_into_zeros, MIXED)) < 1e-6


def optimizer_of_kind(kind, parameters, **options):
    return getattr(torch.optim, kind)(parameters, **options)


def with_each(make, kinds):
    """By name, a recipe for each optimizer that ``make(kind, parameters, **options)`` makes."""
    return {
        f"{kind} {options}": Recipe(optimizer=functools.partial(make, kind, **options))
        for kind, options in kinds
    }


def test_elementwise_optimizers_work_on_shards_as_they_are(two_ranks):
    kinds = [
        ("SGD", {"lr": 0.1}),
        ("Adam", {"lr": 1e-2, "eps": 1e-5, "amsgrad": True}),
        ("AdamW", {"lr": 1e-2, "eps": 1e-5, "foreach": False}),
        ("AdamW", {"lr": 1e-2, "eps": 1e-5, "foreach": True}),
        ("Adagrad", {"lr": 1e-2}),
        ("RMSprop", {"lr": 1e-2, "eps": 1e-5, "momentum": 0.9}),
        ("AdamW", {"lr": 1e-2, "eps": 1e-5, "fused": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
        ("Adagrad", {"lr": 1e-2, "fused": True}),
        ("Adamax", {"lr": 1e-2, "eps": 1e-5}),
        ("NAdam", {"lr": 1e-2, "eps": 1e-5}),
        ("RAdam", {"lr": 1e-2, "eps": 1e-5}),
    ]
    recipes = with_each(optimizer_of_kind, kinds)
    each_trains_like_reference(two_ranks, three_layers, MIXED, recipes)


def capturable_optimizer(kind, parameters, **options):
    """One whose step could be captured as a CUDA graph: its counts and rates are tensors.

    torch allows that on accelerators only; what it then computes is the same here.
    """
    optimizer = getattr(torch.optim, kind)(parameters, capturable=True, **options)
    module = sys.modules["torch.optim.adam" if kind == "AdamW" else type(optimizer).__module__]
    step = optimizer.step

    def devices(**_):
        return ["cpu"]

    def allowed(*args):
        here = mock.patch.object(module, "_get_capturable_supported_devices", devices)
        with here:
            return step(*args)

    optimizer.step = allowed
    return optimizer


@pytest.mark.parametrize("foreach", [True, *more(False)])
def test_capturable_optimizers(two_ranks, foreach):
    kinds = [
        ("Adam", {"lr": torch.tensor(0.01), "eps": 1e-5}),
        ("AdamW", {"lr": torch.tensor(0.01), "eps": 1e-5}),
        ("NAdam", {"lr": 0.01, "eps": 1e-5}),
        ("RMSprop", {"lr": 0.01, "eps": 1e-5}),
        ("Adadelta", {"lr": 0.5}),
        ("ASGD", {"lr": 0.1}),
    ]
    recipes = with_each(functools.partial(capturable_optimizer, foreach=foreach), kinds)
    each_trains_like_reference(two_ranks, three_layers, MIXED, recipes)


def compiled_optimizer(kind, parameters, **options):
    """One whose step ``torch.compile`` made."""
    optimizer = getattr(torch.optim, kind)(parameters, **options)
    optimizer.step = torch.compile(optimizer.step)
    return optimizer


@pytest.mark.thorough
def test_a_compiled_optimizer(two_ranks):
    kinds = [("AdamW", {"lr": 1e-2, "eps": 1e-5, "foreach": foreach}) for foreach in (False, True)]
    recipes = with_each(compiled_optimizer, kinds)
    each_trains_like_reference(two_ranks, three_layers, MIXED, recipes)


def uneven():
    """Parameters of one to three dimensions, of 1, 3 and 5 rows over two ranks."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.Conv1d(2, 3, 3),
        nn.Flatten(),
        nn.Linear(6, 5),
        nn.Tanh(),
        nn.Linear(5, 1),
    )


_ADAFACTOR = [("shard_regather", False), ({"3": "shard_keep"}, True)]
_PLANS = ("shard_regather", "replicate", {"3": "shard_keep"})
_ADAFACTOR += others(product(_PLANS, (False, True)), _ADAFACTOR)


@pytest.mark.parametrize(("plan", "foreach"), _ADAFACTOR)
def test_adafactor(two_ranks, plan, foreach):
    if isinstance(plan, dict):
        names = [name for name, _ in uneven().named_parameters()]
        plan = {n: "shard_keep" if n.startswith("3") else "replicate" for n in names}
    options = {"lr": 0.05, "weight_decay": 0.1, "foreach": foreach}
    optimizer = functools.partial(optimizer_of_kind, "Adafactor", **options)
    trains_like_reference(two_ranks, uneven, plan, Recipe(optimizer=optimizer, steps=4))


def adafactor_goes_on(rank, world_size):
    """Steps before the first call, after it, and after its state was saved and loaded."""
    model = uneven()
    reference = copy.deepcopy(model)
    options = {"lr": 0.05, "weight_decay": 0.1, "maximize": True}
    ours, theirs = (torch.optim.Adafactor(m.parameters(), **options) for m in (model, reference))
    plan = {name: "shard_regather" for name, _ in model.named_parameters()}
    compiled = model
    for step in range(4):
        if step == 2:
            given = plan_options(model, plan, Recipe(), world_size)
            compiled = torch.compile(model, backend="osdp", options=given)
        for call, optimizer in ((compiled, ours), (reference, theirs)):
            optimizer.zero_grad()
            call(normal_batch(step, 0, 0)).square().mean().backward()
            optimizer.step()
        if step == 2:
            asked = StateDictOptions(full_state_dict=True)
            state = get_optimizer_state_dict(model, ours, options=asked)
            assert not any(
                isinstance(value, DTensor)
                for of in state["state"].values()
                for value in of.values()
            )
            model.zero_grad()  # or torch takes state that is missing for none
            ours = torch.optim.Adafactor(model.parameters(), **options)
            set_optimizer_state_dict(model, ours, state, options=asked)
    return max(
        (whole(one) - other).abs().max().item()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.thorough
def test_adafactors_state_goes_on(two_ranks):
    assert max(two_ranks.run(adafactor_goes_on)) < 1e-6


def grouped(parameters):
    """Two groups: weights decay, biases do not and learn faster."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 0.05},
        ],
        lr=1e-2,
        eps=1e-5,
    )


@pytest.mark.inductor
def test_parameter_groups_keep_their_members_and_options(two_ranks):
    trains_like_reference(two_ranks, three_layers, MIXED, Recipe(optimizer=grouped))


def built_when(rank, world_size, plan, make_optimizer, when, steps_before):
    """Train with an optimizer built ``before`` the first call or ``after`` it.

    ``steps_before``: uncompiled steps taken with it first. All ranks use the same batches,
    so that eager steps on each rank alone are the reference.

    Returns the largest difference of a parameter and of a state tensor, the placements of
    parameters and of state, and how many steps the state counts.
    """
    model = three_layers()
    reference = copy.deepcopy(model)
    recipe = Recipe(optimizer=make_optimizer)
    reference_optimizer = make_optimizer(reference.parameters())
    optimizer = make_optimizer(model.parameters()) if when == "before" else None
    options = plan_options(model, plan, recipe, world_size)

    def step(call, one, used, number):
        call(normal_batch(number, 0, 0)).square().mean().backward()
        if used is not None:
            finish_step(one, used, None, recipe)

    for number in range(steps_before):
        step(model, model, optimizer, number)
        step(reference, reference, reference_optimizer, number)
    compiled = torch.compile(model, backend="osdp", options=options)
    if optimizer is None:
        step(compiled, model, None, 0)  # gradients of the first call are used as well
        optimizer = make_optimizer(model.parameters())
        finish_step(model, optimizer, None, recipe)
        step(reference, reference, reference_optimizer, 0)
    for number in range(3, 6):
        step(compiled, model, optimizer, number)
        step(reference, reference, reference_optimizer, number)

    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    state_difference = 0.0
    for ours, theirs in pairs:
        state, wanted = optimizer.state[ours], reference_optimizer.state[theirs]
        assert list(state) == list(wanted)
        for key, value in wanted.items():
            if isinstance(value, torch.Tensor):
                difference = (whole(state[key]) - value).abs().max().item()
                state_difference = max(state_difference, difference)
                if value.dim() > 0:
                    assert state[key].placements == ours.placements
                    assert state[key].to_local().shape == ours.to_local().shape
    assert set(optimizer.state) == set(model.parameters()), "state of old parameters is left"
    difference = max((whole(p) - q).abs().max().item() for p, q in pairs)
    return difference, state_difference, placements(model)


@pytest.mark.thorough
@pytest.mark.parametrize("make_optimizer", [adamw, *more(sgd)])
@pytest.mark.parametrize(
    ("when", "steps_before"),
    [("before", 0), ("before", 2), ("after", 0)],
    ids=["before the first call", "with state already there", "after the first call"],
)
def test_an_optimizer_built(two_ranks, when, steps_before, make_optimizer):
    results = two_ranks.run(built_when, MIXED, make_optimizer, when, steps_before)
    for difference, state_difference, placed in results:
        assert placed == {
            name: "replicate" if decision == "replicate" else "shard"
            for name, decision in MIXED.items()
        }
        assert difference < 1e-5
        assert state_difference < 1e-5


def gradients_before_compiling(rank, world_size, plan):
    """A backward in eager mode, then one compiled, then a step on the sum of both."""
    model = three_layers()
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = sgd(model.parameters()), sgd(reference.parameters())
    options = plan_options(model, plan, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    batch = normal_batch(0, 0, 0)
    model(batch).square().mean().backward()
    compiled(batch + 1).square().mean().backward()
    optimizer.step()
    reference(batch).square().mean().backward()
    reference(batch + 1).square().mean().backward()
    reference_optimizer.step()
    return max(
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_gradients_that_are_there_before_the_first_call_count(two_ranks):
    assert max(two_ranks.run(gradients_before_compiling, MIXED)) < 1e-6


def refused(rank, world_size, when):
    """What an optimizer says that does not work on rows, or holds parameters as they were."""
    torch.manual_seed(0)
    model = three_layers()
    early = [*model.parameters()]
    compiled = torch.compile(
        model, backend="osdp", options=plan_options(model, MIXED, Recipe(), world_size)
    )
    if when == "before":
        optimizer = torch.optim.Rprop(model.parameters())
        with pytest.raises(OsdpError, match=r"torch\.optim\.Rprop does not work on a rank's rows"):
            compiled(normal_batch(0, 0, rank))
        assert not any(isinstance(one, DTensor) for one in model.parameters())
        del optimizer
        gc.collect()
    compiled(normal_batch(0, 0, rank)).square().mean().backward()
    before = [whole(one) for one in model.parameters()]
    late = torch.optim.Rprop(model.parameters()) if when == "after" else sgd(early)
    said = r"Rprop does not" if when == "after" else r"'0\.weight' of the unsharded model"
    with pytest.raises(OsdpError, match=said):
        late.step()
    good = sgd(model.parameters())
    good.step()
    after = [whole(one) for one in model.parameters()]
    return any(not torch.equal(one, b) for one, b in zip(after, before, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_that_would_fail_or_do_nothing_is_refused(two_ranks, when):
    assert all(two_ranks.run(refused, when))


def moving_average(rank, world_size):
    """The largest difference of an average of a model's weights, made after its first call."""
    torch.manual_seed(0)
    model = three_layers()
    reference = copy.deepcopy(model)
    options = plan_options(model, MIXED, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    batch = normal_batch(0, 0, 0)
    compiled(batch).square().mean().backward()
    model.zero_grad()
    average_of = functools.partial(
        torch.optim.swa_utils.AveragedModel,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5),
    )
    ours, theirs = average_of(model), average_of(reference)
    optimizers = [sgd(one.parameters()) for one in (model, reference)]
    for _ in range(3):
        kinds = ((model, compiled, ours), (reference, reference, theirs))
        for (one, call, average), optimizer in zip(kinds, optimizers, strict=True):
            call(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(one)
    with torch.no_grad():
        off = (ours(batch) - theirs(batch)).abs().max().item()
    averages = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    return max(off, *((whole(a) - b).abs().max().item() for a, b in averages))


def test_a_moving_average_of_the_weights(two_ranks):
    assert max(two_ranks.run(moving_average)) <= 1e-6

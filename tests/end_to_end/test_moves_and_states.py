"""Activations that move, with all that holds state: checkpoints, optimizers, dtypes, no_sync."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import osdp_compile
from osdp_compile import Plan
from tests.end_to_end.moving import Gated, Mlp, batch, distances_by_optimizer, mean_square, plan_for
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    finish_step,
    train_osdp,
    whole,
)


def _states(rank, world_size, folder, hidden):
    """Evaluation, whole parameters, and a checkpoint that plans without these weights go on with.

    Returns distances: of evaluation, of whole parameters, of training after loading.
    """
    torch.manual_seed(0)
    model = Mlp(hidden).double()
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    compiled, optimizer = (
        torch.compile(model, backend="osdp", options=options),
        adamw(model.parameters()),
    )

    def go_on(called, trained, its, steps):
        for step in steps:
            mean_square(called, batch(step, 0, rank)).backward()
            finish_step(trained, its, None, Recipe())

    go_on(compiled, model, optimizer, range(3))
    alone = Mlp(hidden).double()
    with osdp_compile.full_parameters(model):
        alone.load_state_dict(copy.deepcopy(model.state_dict()))
    with torch.no_grad():
        given = batch(7, 0, rank)
        evaluated = (compiled.eval()(given) - alone(given)).abs().max().item()
        eager = (model(given) - alone(given)).abs().max().item()
    compiled.train()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
    go_on(compiled, model, optimizer, range(3, 6))
    wanted = {name: whole(p) for name, p in model.named_parameters()}
    distances = [evaluated, eager]
    for kind in ("moved", "shard_keep", "alone"):
        torch.manual_seed(5)
        other = Mlp(hidden).double()
        plan = plan_for(other, world_size)
        if kind != "moved":
            plan = Plan.uniform(other.named_parameters(), "shard_keep", world_size=world_size)
        called = torch.compile(other, backend="osdp", options={"hardware": SLOW, "plan": plan})
        its = adamw(other.parameters())
        if kind == "alone":
            osdp_compile.shard(other, plan_for(other, world_size))
            called = torch.compile(other, backend="osdp", options={"hardware": SLOW})
        go_on(called, other, its, range(1))
        of_model, of_optimizer = get_state_dict(other, its)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
        go_on(called, other, its, range(3, 6))
        distances += [
            (whole(p) - wanted[name]).abs().max().item() for name, p in other.named_parameters()
        ]
    return distances


#: Of 63 features, two ranks have 32 and 31.
HIDDEN = [64, 63]


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", HIDDEN)
def test_evaluation_whole_parameters_and_checkpoints(two_ranks, tmp_path, hidden):
    for distances in two_ranks.run(_states, str(tmp_path), hidden):
        assert max(distances) < 1e-11


def _meta(rank, world_size, hidden):
    """Distance from one process of a model that is sharded on the meta device."""
    recipe = Recipe(step=mean_square, optimizer=adamw, steps=3, batch=batch)
    with torch.device("meta"):
        model = Mlp(hidden).double()
    osdp_compile.shard(model, plan_for(model, world_size))
    model.to_empty(device="cpu")
    alone = Mlp(hidden).double()
    for one in (model, alone):
        torch.manual_seed(7)
        for layer in one.children():
            layer.reset_parameters()
    reference = Reference(alone, recipe, world_size).train(rank)
    trained = train_osdp(model, {"hardware": SLOW}, recipe, rank)
    return trained.distance(reference)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_from_the_meta_device(two_ranks, hidden):
    for distance in two_ranks.run(_meta, hidden):
        assert distance < 1e-11


def _in_bfloat16(rank, world_size):
    """Distances from float64 training of training in param_dtype: activations, weights moving."""
    found = []
    for moves in (True, False):
        torch.manual_seed(0)
        model = Gated()
        recipe = Recipe(step=mean_square, optimizer=adamw, steps=5, batch=_float_batch)
        exact = dataclasses.replace(recipe, batch=batch)
        reference = Reference(copy.deepcopy(model).double(), exact, world_size).train(rank)
        plan = plan_for(model, world_size)
        if not moves:
            plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
        options = {"hardware": SLOW, "plan": plan, "param_dtype": "bfloat16"}
        options["reduce_dtype"] = "float32"
        ours = train_osdp(model, options, recipe, rank).parameters
        found.append(
            sum(
                (one.double() - reference.parameters[name]).square().sum().item()
                for name, one in ours.items()
            )
        )
    return found


def _float_batch(step, micro, rank):
    return batch(step, micro, rank).float()


@pytest.mark.thorough
def test_param_dtype(two_ranks):
    for moving, without in two_ranks.run(_in_bfloat16):
        assert 0 < moving <= 4 * without  # squares


def _no_sync(rank, world_size):
    torch.manual_seed(0)
    model = Mlp().double()
    alone = copy.deepcopy(model)
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    compiled = torch.compile(model, backend="osdp", options=options)
    for step in range(2):
        with osdp_compile.no_sync(compiled):
            mean_square(compiled, batch(step, 0, rank)).backward()
        mean_square(compiled, batch(step, 1, rank)).backward()
    for step in range(2):
        for micro in range(2):
            for other in range(world_size):
                (mean_square(alone, batch(step, micro, other)) / world_size).backward()
    return max(
        (whole(p.grad) - other.grad).abs().max().item()
        for p, other in zip(model.parameters(), alone.parameters(), strict=True)
    )


@pytest.mark.thorough
def test_no_sync(two_ranks):
    for distance in two_ranks.run(_no_sync):
        assert distance < 1e-11


KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
    "NAdam": {"lr": 1e-3},
}


def _optimizers(rank, world_size, hidden):
    def options_of(model):
        return {"hardware": SLOW, "plan": plan_for(model, world_size)}

    return distances_by_optimizer(KINDS, options_of, rank, world_size, hidden)


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", HIDDEN)
def test_optimizers(two_ranks, hidden):
    for found in two_ranks.run(_optimizers, hidden):
        # Muon computes in bfloat16.
        assert {kind for kind, far in found.items() if far > 1e-9} <= {"Muon"}, found
        assert found["Muon"] < 1e-2

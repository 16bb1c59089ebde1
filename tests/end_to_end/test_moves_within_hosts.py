"""Activations that move within hosts of two ranks, trained: like one process with all batches."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import osdp_compile
from osdp_compile import Plan
from passes.types.hardware import LinkRate
from tests.chosen import more, thorough
from tests.end_to_end.moving import (
    GATED,
    MLP,
    Gated,
    Mlp,
    batch,
    distances_by_optimizer,
    mean_square,
    recipe_of,
)
from tests.end_to_end.test_hosts import two_dimensions
from tests.end_to_end.test_moves import differing
from tests.training import Recipe, Reference, adamw, finish_step, plan_in_force, train_osdp, whole

#: Between hosts as fast as within one.
EVEN = two_dimensions(LinkRate(1e-5, 1e-8))
#: The same, so slow that the bytes count.
SLOW = two_dimensions(LinkRate(1e-5, 1e-6))


def on_hosts(plan=None, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
    given = {} if plan is None else {"plan": plan}
    return {"hardware": EVEN, "mesh": mesh, "debug": True, **given, **options}


def plan_on_hosts(model, rest="shard_host_keep"):
    """The MLP stays within hosts."""
    plan = Plan.uniform(model.named_parameters(), rest, world_size=4, ranks_of_a_host=2)
    return plan.tensor_parallel(GATED if isinstance(model, Gated) else MLP, within_hosts=True)


def _train(rank, world_size, make, rest, recipe):
    """Distances from one process, of parameters and norms; placements; warnings."""
    torch.manual_seed(0)
    model = make().double()
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = on_hosts(plan_on_hosts(model, rest))
    with mock.patch("osdp_compile.lowering.agreeing.log.warning") as warned:
        trained = train_osdp(model, options, recipe, rank)
    wanted = reference.train(rank)
    norms = [a / b - 1 for a, b in zip(trained.norms, wanted.norms, strict=True)]
    placed = {name: str(p.placements) for name, p in model.named_parameters()}
    differ = sum("batches differ" in call.args[0] for call in warned.call_args_list)
    return trained.distance(wanted), max(map(abs, norms)), placed, differ


@pytest.mark.parametrize(
    "make, rest",
    [
        (Mlp, "shard_host_keep"),
        *more((Mlp, "shard_regather"), (Gated, "replicate")),
    ],
)
def test_weights_that_stay_within_hosts_train_like_one_process(four_ranks, make, rest):
    for apart, norm, placed, warnings in four_ranks.run(_train, make, rest, recipe_of(batch)):
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert placed["up.weight"] == "(Replicate(), Shard(dim=0))"
        assert placed["down.weight"] == "(Replicate(), Shard(dim=1))"


@pytest.mark.thorough
def test_ranks_with_other_batches(four_ranks):
    """Ranks of one host differ, and hosts do."""
    recipe = recipe_of(differing, backwards=2)
    for apart, norm, _, warnings in four_ranks.run(_train, Mlp, "shard_regather", recipe):
        assert apart < 1e-11 and norm < 1e-9 and warnings


def _go_on(called, trained, its, steps, rank):
    for step in steps:
        mean_square(called, batch(step, 0, rank)).backward()
        finish_step(trained, its, None, Recipe())


#: Plans that a checkpoint is loaded under, for four ranks.
OTHERS = {
    "on all ranks": lambda model: Plan.uniform(
        model.named_parameters(), "shard_keep", world_size=4
    ).tensor_parallel(MLP),
    "weights within hosts": lambda model: Plan.uniform(
        model.named_parameters(), "shard_host_regather", world_size=4, ranks_of_a_host=2
    ),
}


def _states(rank, world_size, folder, hidden):
    """Distances: of evaluation, of eager calls, and of training from a checkpoint, by plan."""
    torch.manual_seed(0)
    model = Mlp(hidden).double()
    compiled = torch.compile(model, backend="osdp", options=on_hosts(plan_on_hosts(model)))
    optimizer = adamw(model.parameters())
    _go_on(compiled, model, optimizer, range(3), rank)
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
    _go_on(compiled, model, optimizer, range(3, 6), rank)
    wanted = {name: whole(p) for name, p in model.named_parameters()}
    found = {"evaluated": evaluated, "eager": eager}
    for name, make_plan in {**OTHERS, "before memory": plan_on_hosts}.items():
        torch.manual_seed(5)
        other = Mlp(hidden).double()
        options = on_hosts(make_plan(other))
        if name == "before memory":
            osdp_compile.shard(other, options.pop("plan"), mesh=options.pop("mesh"))
        called = torch.compile(other, backend="osdp", options=options)
        its = adamw(other.parameters())
        _go_on(called, other, its, range(1), rank)
        of_model, of_optimizer = get_state_dict(other, its)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
        _go_on(called, other, its, range(3, 6), rank)
        found[name] = max(
            (whole(p) - wanted[key]).abs().max().item() for key, p in other.named_parameters()
        )
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", [64, 63])
def test_evaluation_whole_parameters_and_checkpoints(four_ranks, tmp_path, hidden):
    """Of 63 features, the ranks of a host have 32 and 31."""
    for found in four_ranks.run(_states, str(tmp_path), hidden):
        assert max(found.values()) < 1e-11, found


def _no_sync(rank, world_size):
    torch.manual_seed(0)
    model = Mlp().double()
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend="osdp", options=on_hosts(plan_on_hosts(model)))
    for step in range(2):
        with osdp_compile.no_sync(compiled):
            mean_square(compiled, batch(step, 0, rank)).backward()
        mean_square(compiled, batch(step, 1, rank)).backward()
    for step in range(2):
        for micro in range(2):
            for other in range(world_size):
                (mean_square(alone, batch(step, micro, other)) / world_size).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((whole(p.grad) - other.grad).abs().max().item() for p, other in pairs)


@pytest.mark.thorough
def test_no_sync(four_ranks):
    for distance in four_ranks.run(_no_sync):
        assert distance < 1e-11


KINDS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adafactor": {"lr": 1e-2}, "Muon": {"lr": 1e-2}}


def _optimizers(rank, world_size):
    def options_of(model):
        return on_hosts(plan_on_hosts(model))

    return distances_by_optimizer(KINDS, options_of, rank, world_size)


@pytest.mark.thorough
def test_optimizers(four_ranks):
    for found in four_ranks.run(_optimizers):
        # Muon computes in bfloat16.
        assert found.pop("Muon") < 1e-2
        assert max(found.values()) < 1e-9, found


def _planned(rank, world_size, latency):
    """The ranks that share what the planner lets stay, and the distance from one process."""
    torch.manual_seed(0)
    model = Gated().double()
    recipe = Recipe(step=mean_square, optimizer=adamw, steps=3, batch=batch)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    flat = dict.fromkeys(SLOW.collectives, LinkRate(latency, 2e-7))
    options = on_hosts(tensor_parallel=True)
    options["hardware"] = dataclasses.replace(SLOW, collectives=flat)
    apart = train_osdp(model, options, recipe, rank).distance(reference.train(rank))
    plan = plan_in_force(model)
    return {plan[name].decision.scope.value for name in plan.moved}, apart


@pytest.mark.parametrize(
    "latency, scope",
    [*thorough((1.0, "host")), *more((1e-6, "all"))],
)
def test_the_planner_decides_at_the_first_call(four_ranks, latency, scope):
    for scopes, apart in four_ranks.run(_planned, latency):
        assert apart < 1e-11
        assert scopes == {scope}

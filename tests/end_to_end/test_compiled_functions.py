"""Not only ``torch.compile(model)``: functions, methods and parts of a larger model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.chosen import thorough
from tests.training import Recipe, normal_batch, placements, plan_options, sgd, whole


class TwoLayers(nn.Module):
    # Not nn.Sequential: model.compile() leaves modules of torch itself alone.
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def loss_of(model, batch):
    return model(batch).square().mean()


class Trainer:
    """An object that holds the model, as training frameworks do."""

    def __init__(self, model):
        self.model = model
        self.seen = 0

    def loss(self, batch):
        return loss_of(self.model, batch)


GLOBAL_MODEL = None


def loss_of_global_model(batch):
    return loss_of(GLOBAL_MODEL, batch)


def closure(model, options):
    def step(batch):
        return loss_of(model, batch)

    return torch.compile(step, backend="osdp", options=options)


def closure_with_backward(model, options):
    def step(batch):
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    return torch.compile(step, backend="osdp", options=options)


def bound_method(model, options):
    return torch.compile(Trainer(model).loss, backend="osdp", options=options)


def global_model(model, options):
    global GLOBAL_MODEL
    GLOBAL_MODEL = model
    return torch.compile(loss_of_global_model, backend="osdp", options=options)


def argument(model, options):
    compiled = torch.compile(loss_of, backend="osdp", options=options)
    return lambda batch: compiled(model, batch)


def in_place(model, options):
    model.compile(backend="osdp", options=options)
    return lambda batch: loss_of(model, batch)


def train_compiled(rank, world_size, compile_it, plan):
    """Three steps; the largest difference to eager mode on all ranks' batches, and placements."""
    model = TwoLayers()
    reference = copy.deepcopy(model)
    optimizer, reference_optimizer = sgd(model.parameters()), sgd(reference.parameters())
    call = compile_it(model, plan_options(model, plan, Recipe(), world_size))
    for step in range(3):
        loss = call(normal_batch(step, 0, rank))
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(
            reference, torch.cat([normal_batch(step, 0, r) for r in range(world_size)])
        ).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    difference = max(
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return difference, placements(model)


@pytest.mark.parametrize(
    "compile_it",
    [
        in_place,
        *thorough(closure, closure_with_backward, bound_method, global_model, argument),
    ],
)
def test_a_compiled(two_ranks, compile_it):
    for difference, placed in two_ranks.run(train_compiled, compile_it, "shard_regather"):
        assert difference < 1e-6
        assert set(placed.values()) == {"shard"}


def two_models(rank, world_size):
    """A function over two models that no module contains; planned together."""
    first, second = TwoLayers(), nn.Linear(4, 4)
    references = copy.deepcopy(first), copy.deepcopy(second)

    def step(batch):
        return second(first(batch)).square().mean()

    compiled = torch.compile(step, backend="osdp", options={"memory_limit": "1GiB"})
    compiled(normal_batch(0, 0, 0)).backward()
    references[1](references[0](normal_batch(0, 0, 0))).square().mean().backward()
    difference = max(
        (whole(p.grad) - q.grad).abs().max().item()
        for model, reference in zip((first, second), references, strict=True)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return difference, {**placements(first), **placements(second)}


@pytest.mark.thorough
def test_a_function_over_two_models(two_ranks):
    for difference, placed in two_ranks.run(two_models):
        assert difference < 1e-6
        assert "plain" not in placed.values()


def generator_and_discriminator(rank, world_size):
    """Two models compiled apart, one's output the other's input; the largest difference."""
    models = TwoLayers(), nn.Linear(4, 4)
    references = copy.deepcopy(models)
    compiled = [
        torch.compile(
            model,
            backend="osdp",
            options=plan_options(model, "shard_regather", Recipe(), world_size),
        )
        for model in models
    ]
    for (make, judge), parts in ((compiled, models), (references, references)):
        maker, judges = sgd(parts[0].parameters()), sgd(parts[1].parameters())
        for step in range(3):
            batch = normal_batch(step, 0, 0)
            judge(make(batch).detach()).square().mean().backward()
            judges.step()
            judges.zero_grad()
            (1 - judge(make(batch))).square().mean().backward()
            maker.step()
            maker.zero_grad()
            judges.zero_grad()
    difference = max(
        (whole(p) - q).abs().max().item()
        for model, reference in zip(models, references, strict=True)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return difference, {**placements(models[0]), **placements(models[1])}


@pytest.mark.thorough
def test_two_models_compiled_apart_and_trained_against_each_other(two_ranks):
    for difference, placed in two_ranks.run(generator_and_discriminator):
        assert difference < 1e-6
        assert set(placed.values()) == {"shard"}


def on_half_of_the_ranks(rank, world_size):
    """A mesh of two by two: the model is sharded over one dimension, each pair on its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "data"))["data"]
    model = TwoLayers()
    reference = copy.deepcopy(model)
    options = {**plan_options(model, "shard_regather", Recipe(), 2), "mesh": mesh}
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer, reference_optimizer = sgd(model.parameters()), sgd(reference.parameters())
    for step in range(2):
        loss_of(compiled, normal_batch(step, 0, rank)).backward()
        pair = [normal_batch(step, 0, rank // 2 * 2 + other) for other in range(2)]
        loss_of(reference, torch.cat(pair)).backward()
        for used in (optimizer, reference_optimizer):
            used.step()
            used.zero_grad()
    difference = max(
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    return difference, placements(model)


@pytest.mark.thorough
def test_a_mesh_that_is_not_the_whole_world(four_ranks):
    for difference, placed in four_ranks.run(on_half_of_the_ranks):
        assert difference < 1e-6
        assert set(placed.values()) == {"shard"}


def part_of_a_model(rank, world_size):
    """Only the inner layer is compiled; the outer one stays with the user (and with DDP, say)."""
    inner, outer = TwoLayers(), nn.Linear(4, 4)
    options = plan_options(inner, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(inner, backend="osdp", options=options)
    outer(compiled(normal_batch(0, 0, rank))).square().mean().backward()
    return placements(inner), placements(outer)


def test_only_the_compiled_part_of_a_model_is_sharded(two_ranks):
    for inner, outer in two_ranks.run(part_of_a_model):
        assert set(inner.values()) == {"shard"}
        assert set(outer.values()) == {"plain"}

"""Lines of training scripts around the model: lists made early, norms as numbers, assigned data."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import osdp_compile
from osdp_compile import OsdpError, Plan, RanksDiffer
from tests.chosen import more, thorough
from tests.training import Recipe, normal_batch, plan_options, trains_like_reference, whole


def two_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def compiled_of(model, plan, world_size):
    options = plan_options(model, plan, Recipe(), world_size)
    return torch.compile(model, backend="osdp", options=options)


def loss_of(call, step, rank):
    return (call(normal_batch(step, 0, rank)) * 5).square().mean()


def backward_of_all(model, step, world_size):
    """The gradients of data-parallel training, on a plain model."""
    for rank in range(world_size):
        (loss_of(model, step, rank) / world_size).backward()


def clip_an_early_list(rank, world_size, plan):
    """The largest difference of norms and parameters to a plain model's."""
    model = two_layers()
    plain = copy.deepcopy(model)
    early, theirs = list(model.parameters()), list(plain.parameters())
    optimizers = [torch.optim.SGD(one, lr=0.1) for one in (early, theirs)]
    compiled = compiled_of(model, plan, world_size)
    found = []
    for step in range(3):
        loss_of(compiled, step, rank).backward()
        backward_of_all(plain, step, world_size)
        for held in (early, theirs):
            found.append(whole(torch.nn.utils.clip_grad_norm_(held, 0.1)))
        for optimizer, held in zip(optimizers, (early, theirs), strict=True):
            optimizer.step()
            with torch.no_grad():
                for parameter in held:
                    parameter.mul_(0.99)
                    parameter.grad = None
    found += [whole(one) for one in (*model.parameters(), *theirs)]
    copied = copy.deepcopy(early)
    assert repr(early) == repr(list(model.parameters()))
    assert all(isinstance(one, nn.Parameter) for one in (*early, *copied))
    assert isinstance(copied[0], DTensor) == (plan != "replicate")
    norms, parameters = found[:6], found[6:]
    pairs = [*zip(norms[::2], norms[1::2], strict=True)]
    pairs += zip(parameters[:4], parameters[4:], strict=True)
    return max((ours - plain).abs().max().item() for ours, plain in pairs)


@pytest.mark.parametrize("plan", ["shard_regather", *more("replicate", "shard_keep")])
def test_a_list_that_was_made_before_the_first_call_is_clipped(two_ranks, plan):
    assert max(two_ranks.run(clip_an_early_list, plan)) < 1e-5


class OfAList(nn.Module):
    """Reads its parameter from a plain list, too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.weights = [self.weight]

    def forward(self, x):
        return x @ self.weights[0] + (x @ self.weight).detach()


def read_from_a_list(rank, world_size):
    model = OfAList()
    with pytest.raises(OsdpError) as refused:
        loss_of(compiled_of(model, "shard_regather", world_size), 0, rank)
    return str(refused.value)


def test_a_forward_that_reads_such_a_list_is_refused(two_ranks):
    for said in two_ranks.run(read_from_a_list):
        assert "from a list" in said and "nn.ParameterList" in said


class Momentum(nn.Module):
    """Moves an average of its weights inside its forward; returns a penalty of its weights, too."""

    def __init__(self, penalised):
        super().__init__()
        self.online, self.average = two_layers(), two_layers().requires_grad_(False)
        self.penalised = penalised

    def forward(self, x):
        with torch.no_grad():
            pairs = zip(self.online.parameters(), self.average.parameters(), strict=True)
            for ours, averaged in pairs:
                averaged.data = averaged.data * 0.9 + ours.data * 0.1
        apart = (self.online(x) - self.average(x)).square().mean()
        if not self.penalised:
            return apart
        return apart + 0.01 * sum(one.square().sum() for one in self.online.parameters())


def train_with_an_average(rank, world_size, plan, penalised):
    """The largest difference to a plain model; all ranks have one batch."""
    model = Momentum(penalised)
    plain = copy.deepcopy(model)
    compiled = compiled_of(model, plan, world_size)
    optimizers = [torch.optim.SGD(one.online.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(3):
        for call, optimizer in zip((compiled, plain), optimizers, strict=True):
            call(normal_batch(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max((whole(ours) - theirs).abs().max().item() for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("plan", "penalised"),
    [("replicate", True), *more(("replicate", False)), *thorough(("shard_keep", False))],
)
def test_a_forward_uses_its_parameters_by_their_list(two_ranks, plan, penalised):
    assert max(two_ranks.run(train_with_an_average, plan, penalised)) < 1e-6


def train_one_from_meta(rank, world_size):
    """The first call of a model that was sharded on the meta device."""
    with torch.device("meta"):
        model = two_layers()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    osdp_compile.shard(model, plan).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    loss_of(torch.compile(model, backend="osdp"), 0, rank).backward()


def values_outside_of_graphs(rank, world_size):
    """The differences of norms and of assigned values to a plain model's, and two errors."""
    train_one_from_meta(rank, world_size)  # its first call ends what item() was until then
    model = two_layers()
    plain = copy.deepcopy(model)
    compiled = compiled_of(model, "shard_regather", world_size)
    loss_of(compiled, 0, rank).backward()
    backward_of_all(plain, 0, world_size)
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9).item() for one in (model, plain)]
    before = [one.data.clone() for one in model.parameters()]
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.add_(1.0)
            parameter.data = old
    moved = [
        (whole(ours) - theirs).abs().max().item()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    weight = model[0].weight
    with pytest.raises(OsdpError, match="would give the part of this rank"):
        weight.grad.norm().item()
    with pytest.raises(OsdpError, match="would give the part of this rank"):
        float(weight.abs().max())
    with pytest.raises(OsdpError, match="assign a DTensor of the same shape"):
        weight.data = torch.zeros(16, 8)
    exact = weight.grad.norm().full_tensor().item() - plain[0].weight.grad.norm().item()
    return abs(norms[0] - norms[1]), abs(exact), *moved


def test_values_outside_of_graphs_are_whole_or_errors(two_ranks):
    for differences in two_ranks.run(values_outside_of_graphs):
        assert max(differences) < 1e-5


class Branches(nn.Module):
    """One of two layers of equal shapes, chosen by the caller."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x, is_first):
        return self.head(self.first(x) if is_first else self.second(x))


def run_many(rank, world_size):
    """A model that runs so often that most of its runs are not compared."""
    compiled = compiled_of(two_layers(), "shard_regather", world_size)
    with torch.no_grad():
        for step in range(70):
            compiled(normal_batch(step, 0, rank))


def take_branches(rank, world_size, plan):
    """Ranks take one branch, the other, and then each its own; an error, where there is one."""
    run_many(rank, world_size)
    compiled = compiled_of(Branches(), plan, world_size)
    said = []
    for step, is_first in enumerate((True, False, True, rank == 0)):
        batch = normal_batch(step, 0, rank)
        try:
            compiled(batch, is_first).square().mean().backward()
        except RanksDiffer as error:
            said.append(f"{step}: {error}")
    return said


@pytest.mark.parametrize("plan", ["shard_regather", "replicate"])
def test_ranks_that_take_other_branches_are_refused(two_ranks, plan):
    verb = "reduce" if plan == "replicate" else "gather"
    for said in two_ranks.run(take_branches, plan):
        (error,) = said
        assert error.startswith("3: ranks run different parts of the model")
        assert f"rank 0 is about to {verb} 'first.bias' and rank 1 is not" in error


def branch_after_many(rank, world_size):
    """The step in which ranks are refused; one of them once ran a forward without gradients."""
    compiled = compiled_of(Branches(), "replicate", world_size)
    with mock.patch("osdp_compile.model.same_parameters._EVERY", 4):
        for step in range(12):
            is_first = step % 2 == 0
            with contextlib.nullcontext() if step != 5 or rank else torch.no_grad():
                loss = compiled(normal_batch(step, 0, rank), is_first).square().mean()
            try:
                if loss.requires_grad and step != 5:
                    loss.backward()
            except RanksDiffer as error:
                return step, str(error)
    return None


def test_a_forward_of_one_rank_without_communication_is_allowed(two_ranks):
    assert two_ranks.run(branch_after_many) == [None, None]


class Quantised(nn.Module):
    """A VQ-VAE whose codebook moves to the averages of its codes, with a spectral norm by hooks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.utils.spectral_norm(nn.Linear(8, 6))
        self.decoder = nn.Linear(6, 8)
        self.register_buffer("book", torch.randn(5, 6))

    def forward(self, x):
        encoded = self.encoder(x)
        chosen = torch.nn.functional.one_hot(torch.cdist(encoded, self.book).argmin(1), 5)
        code = self.book[chosen.argmax(1)]
        with torch.no_grad():
            self.book.mul_(0.9).add_(chosen.to(x.dtype).t() @ encoded, alpha=0.1)
        decoded = self.decoder(encoded + (code - encoded).detach())
        square = nn.functional.mse_loss
        return square(decoded, x) + 0.25 * square(encoded, code.detach())


def own_loss(model, batch):
    return model(batch)


def test_buffers_that_the_forward_reads_and_then_writes(two_ranks):
    trains_like_reference(two_ranks, Quantised, "shard_regather", Recipe(step=own_loss))

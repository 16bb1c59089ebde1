"""Checkpoints: torch.distributed.checkpoint under other plans and numbers of ranks, state dicts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import osdp_compile
from osdp_compile import OsdpError
from tests.training import SLOW, adamw, plan_for, whole

ROWS, STEPS = 8, 6  # of all ranks together


class Tied(nn.Module):
    """An embedding that is the head too, of eleven rows: no number of ranks divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 18)
        self.down = nn.Linear(18, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens)
        return self.head(x + self.scale * self.down(torch.relu(self.up(x))))


def made(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def training(kind: str, world_size: int, seed: int = 0):
    """A model to train so, what to call for it, and its optimizer."""
    model = made(seed)
    optimizer = adamw(model.parameters())
    if world_size == 1:
        return model, model, optimizer
    options = {"plan": plan_for(kind, model, world_size), "hardware": SLOW}
    return model, torch.compile(model, backend="osdp", options=options), optimizer


def train(called, optimizer, steps, rank: int, world_size: int) -> None:
    """The ranks together see the same rows in a step, however many they are."""
    for step in steps:
        drawn = torch.randint(0, 11, (ROWS, 6), generator=torch.Generator().manual_seed(step))
        own = drawn[rank::world_size]
        loss = nn.functional.cross_entropy(called(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model, optimizer) -> list[torch.Tensor]:
    """Everything that training goes on from, whole: parameters, and what AdamW has of each."""
    found = [whole(parameter) for parameter in model.parameters()]
    for parameter in model.parameters():
        found += [whole(one) for one in optimizer.state[parameter].values()]
    return found


def far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference."""
    pairs = zip(ours, theirs, strict=True)
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs)


def save(rank, world_size, kind, folder):
    """Train, save in three ways, train on: what there is at last, and gathers for saving."""
    model, called, optimizer = training(kind, world_size)
    train(called, optimizer, range(STEPS // 2), rank, world_size)
    gather = mock.patch(
        "osdp_compile.runtime.eager_markers.all_gather_single",
        side_effect=AssertionError("gathered"),
    )
    with gather:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        sharded = sum(isinstance(one, DTensor) for one in of_model.values())
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=f"{folder}/saved")
        later = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optimizer),
        }
        dcp.async_save(later, checkpoint_id=f"{folder}/later").result()
        to_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_model_state_dict(model, options=to_cpu)
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")
    train(called, optimizer, range(STEPS // 2, STEPS), rank, world_size)
    return values(model, optimizer), sharded, list(of_model), sorted(of_optimizer["state"])


def resume(rank, world_size, kind, folder, name, when):
    """Load a checkpoint into a model of other values, before or after its first call; train on."""
    model, called, optimizer = training(kind, world_size, seed=5)
    if when == "after":
        train(called, optimizer, range(1), rank, world_size)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optim": of_optimizer}
    dcp.load(state, checkpoint_id=f"{folder}/{name}", no_dist=world_size == 1)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    train(called, optimizer, range(STEPS // 2, STEPS), rank, world_size)
    return values(model, optimizer)


@pytest.mark.thorough
def test_training_goes_on_under_any_plan_and_number_of_ranks(four_ranks, two_ranks, tmp_path):
    folder = str(tmp_path)
    saved = four_ranks.run(save, "mixed", folder)
    reference = saved[0][0]
    for found, sharded, names, states in saved:
        assert far(found, reference) == 0.0  # whole, so the same on all ranks
        assert sharded == len(list(made().parameters())) + 1  # a tied one has two names
        assert names == list(made().state_dict())
        assert states == sorted(name for name, _ in made().named_parameters())
    for name, when in (("saved", "before"), ("later", "after")):
        for found in four_ranks.run(resume, "mixed", folder, name, when):
            assert far(found, reference) == 0.0  # bit for bit
    for kind, when in (("sliced", "after"), ("replicate", "before")):
        for found in two_ranks.run(resume, kind, folder, "saved", when):
            assert far(found, reference) <= 1e-6
    alone = resume(0, 1, "", folder, "later", "before")
    assert far(alone, reference) <= 1e-6


@pytest.mark.thorough
def test_a_whole_state_dict_is_the_plain_models(two_ranks, tmp_path):
    folder = str(tmp_path)
    two_ranks.run(save, "sliced", folder)
    full = torch.load(tmp_path / "full.pt")
    plain = made(5)
    plain.load_state_dict(full)
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(full, tmp_path / "full.safetensors")
    again = made(6)
    again.load_state_dict(safetensors.load_file(tmp_path / "full.safetensors"))
    pairs = zip(again.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    for matches in two_ranks.run(load_whole, folder):
        assert all(matches.values()), matches


def load_whole(rank, world_size, folder):
    """A whole state dict into models that are sharded, in the ways there are."""
    full = torch.load(f"{folder}/full.pt")
    matches = {}
    for name in ("load_state_dict", "broadcast", "before the first call"):
        model, called, optimizer = training("mixed", world_size, seed=5)
        if name != "before the first call":
            train(called, optimizer, range(1), rank, world_size)
        before = [*model.parameters()]
        if name == "broadcast":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            given = torch.load(f"{folder}/full.pt") if rank == 0 else {}
            set_model_state_dict(model, given, options=options)
        else:
            given = dict(full)
            model.load_state_dict(given)
            matches["what was given is as it was"] = all(given[key] is full[key] for key in full)
        now = [*model.parameters()]
        kept = all(one is other for one, other in zip(before, now, strict=True))
        loaded = all(torch.equal(whole(p), full[key]) for key, p in model.state_dict().items())
        train(called, optimizer, range(1), rank, world_size)
        matches[name] = kept and loaded
    try:
        model.load_state_dict({**full, "up.weight": torch.zeros(3, 3)})
    except RuntimeError as error:
        matches["another shape is refused"] = "up.weight" in str(error)
    return matches


def with_full_parameters(rank, world_size):
    """What is read and written inside ``full_parameters``, and what is there afterwards."""
    model, called, optimizer = training("mixed", world_size)
    train(called, optimizer, range(2), rank, world_size)
    before, tokens = values(model, optimizer), torch.arange(11)[None]
    objects = [*model.parameters()]
    gather = mock.patch(
        "osdp_compile.runtime.eager_markers.all_gather_single",
        side_effect=AssertionError("gathered"),
    )
    found = {}
    with osdp_compile.full_parameters(model):
        found["plain"] = not any(isinstance(p, DTensor) for p in model.state_dict().values())
        alone = made(5)
        alone.load_state_dict(model.state_dict())
        with gather, torch.no_grad():
            found["evaluates"] = torch.equal(model(tokens), alone(tokens))
            model.up.weight.zero_()
        for refused, match in (
            (lambda: osdp_compile.full_parameters(model).__enter__(), "are full already"),
            (lambda: called(tokens), "call the model itself"),
        ):
            with pytest.raises(OsdpError, match=match):
                refused()
    found["what was written is lost"] = far(values(model, optimizer), before) == 0.0
    with osdp_compile.full_parameters(called, write_back=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    count = len(objects)
    doubled = [2 * one for one in before[:count]] + before[count:]
    found["what was written is kept"] = far(values(model, optimizer), doubled) == 0.0
    with pytest.raises(ZeroDivisionError), osdp_compile.full_parameters(model, write_back=True):
        with torch.no_grad():
            model.scale.zero_()
        1 / 0  # noqa: B018
    with osdp_compile.full_parameters(model.up):
        found["a module in it"] = [isinstance(p, DTensor) for p in objects] == [True] * count and [
            isinstance(p, DTensor) for p in model.parameters()
        ].count(False) == 2
    found["after an error"] = far(values(model, optimizer), doubled) == 0.0
    found["objects"] = all(map(lambda a, b: a is b, model.parameters(), objects))
    train(called, optimizer, range(2, 3), rank, world_size)
    return found, [whole(parameter) for parameter in model.parameters()]


@pytest.mark.thorough
def test_full_parameters_for_a_while(two_ranks):
    (found, ours), (other, theirs) = two_ranks.run(with_full_parameters)
    assert all(found.values()) and all(other.values()), (found, other)
    assert far(ours, theirs) == 0.0


def test_full_parameters_of_a_model_that_is_not_sharded_are_its_own():
    model = made()
    own = [*model.parameters()]
    with osdp_compile.full_parameters(model):
        assert all(map(lambda a, b: a is b, model.parameters(), own))

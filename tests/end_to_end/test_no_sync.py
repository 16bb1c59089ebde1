"""Gradients of several backwards, added up on each rank and reduced once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import osdp_compile
from osdp_compile import OsdpError, PeakMemory
from osdp_compile.sharding.shard_in_place import add_gradient
from tests.chosen import more
from tests.training import SLOW, plan_for, whole

MICROS = 3


class Model(nn.Module):
    """Tied linears of 11 rows, a scalar, a frozen weight, and one that some ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.up = nn.Linear(16, 33)
        self.down = nn.Linear(33, 16)
        self.frozen = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens)
        return self.head(self.frozen(x) + self.scale * self.down(torch.relu(self.up(x))))


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(called, step: int, micro: int, rank: int):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(0, 11, (4, 6), generator=generator)
    return nn.functional.cross_entropy(called(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def step_gradients(rank, world_size, kind, inside, folder, dtypes):
    """The gradients of two steps of several backwards; the first ``inside`` of each in no_sync.

    And how many gradients were reduced eagerly, and whether graphs inside and outside reduce.
    """
    model = made()
    options = {"plan": plan_for(kind, model, world_size), "hardware": SLOW, **dtypes}
    options["debug"] = folder
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found, sends = [], []
    with mock.patch("osdp_compile.engine.no_sync.add_gradient", wraps=add_gradient) as added:
        for step in range(2):
            micros = iter(range(MICROS))
            with osdp_compile.no_sync(compiled if step else model) if inside else nullcontext():
                for _ in range(inside):
                    loss_of(compiled, step, next(micros), rank).backward()
                if inside:
                    assert all(one.grad is None for one in model.parameters())
                    loss_of(compiled, step, 7, rank)  # no backward: changes nothing
                    with torch.no_grad():
                        loss_of(compiled, step, 8, rank)
                    sends.append(reduces(folder))
            for micro in micros:
                loss_of(compiled, step, micro, rank).backward()
                sends.append(reduces(folder))
            found += [None if p.grad is None else whole(p.grad) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return found, added.call_count, sends


def reduces(folder) -> bool:
    """Whether the backward graph that was compiled last sends gradients. Collective.

    The first rank writes the graph: the others wait for it, and it for them before the next.
    """
    dist.barrier()
    (path,) = Path(folder).glob("*-backward-reorder.txt")
    found = "# reduce" in path.read_text()
    dist.barrier()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "insides"),
    [("mixed", [MICROS]), ("sliced", [MICROS - 1]), *more(("replicate", [MICROS]))],
)
def test_gradients_are_those_of_backwards_that_all_reduce(two_ranks, tmp_path, kind, insides):
    expected = two_ranks.run(step_gradients, kind, 0, str(tmp_path), {})
    trained = [one for one in made().parameters() if one.requires_grad]
    for inside in insides:
        outcomes = two_ranks.run(step_gradients, kind, inside, str(tmp_path), {})
        for (ours, added, sends), (theirs, *_) in zip(outcomes, expected, strict=True):
            assert added == 2 * len(trained)
            # Inside none is sent. (In the second step nothing is compiled any more.)
            assert sends[:2] == [False, inside < MICROS]
            assert [one is None for one in ours] == [one is None for one in theirs]
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None]
            torch.testing.assert_close(*map(list, zip(*pairs, strict=True)), atol=1e-6, rtol=1e-5)


def in_lower_precision(rank, world_size, folder):
    """The first step's gradients; a second one's would be of parameters that are rounded anew."""
    dtypes = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    first = len([*made().parameters()])
    ours, *_ = step_gradients(rank, world_size, "mixed", MICROS, folder, dtypes)
    theirs, *_ = step_gradients(rank, world_size, "mixed", 0, folder, dtypes)
    return ours[:first], theirs[:first]


@pytest.mark.thorough
def test_in_lower_precision_they_add_up_in_the_type_in_which_they_travel(two_ranks, tmp_path):
    for ours, theirs in two_ranks.run(in_lower_precision, str(tmp_path)):
        # Of tied weights the two gradients of a backward are added in bfloat16 where it reduces.
        names = [name for name, _ in made().named_parameters()]
        for name, one, other in zip(names, ours, theirs, strict=True):
            if one is not None:
                assert one.dtype == torch.float32
                atol, rtol = (5e-3, 1e-2) if name == "token.weight" else (1e-6, 1e-5)
                torch.testing.assert_close(one, other, atol=atol, rtol=rtol)


def refusals(rank, world_size):
    """What is refused, and that training goes on after an error inside."""
    found = []
    for first_inside in (True, False):
        model = made()
        plan = plan_for("mixed", model, world_size)
        options = {"plan": plan, "hardware": SLOW, "memory_limit": "1GiB"}
        compiled = torch.compile(model, backend="osdp", options=options)
        if not first_inside:
            loss_of(compiled, 0, 0, rank).backward()
        with pytest.raises(OsdpError, match="accumulate"), osdp_compile.no_sync(model):
            loss_of(compiled, 0, 0, rank)
        found.append(osdp_compile.plan_of(model) is None)
    before = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
    options["accumulate"] = True
    torch._dynamo.reset()
    again = made()
    compiled = torch.compile(again, backend="osdp", options=options)
    with pytest.raises(ZeroDivisionError), osdp_compile.no_sync(again):
        loss_of(compiled, 0, 1, rank).backward()
        1 / 0  # noqa: B018
    assert all(p.grad is None for p in again.parameters())
    with osdp_compile.no_sync(again):
        loss = loss_of(compiled, 0, 1, rank)
    with pytest.raises(OsdpError, match="call backward inside"):
        loss.backward()
    assert all(p.grad is None for p in again.parameters())
    loss_of(compiled, 0, 0, rank).backward()
    after = [None if p.grad is None else whole(p.grad) for p in again.parameters()]
    for one, other in zip(before, after, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    return found


@pytest.mark.thorough
def test_without_room_it_is_refused_and_an_error_inside_drops_what_was_added_up(two_ranks):
    for found in two_ranks.run(refusals):
        assert found == [True, False]


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 8))


def peak_and_limit(rank, world_size):
    """Of several steps of three backwards, two of them inside, under a limit."""
    whole_bytes = sum(4 * one.numel() for one in wide().parameters())
    limit_bytes = 5 * whole_bytes
    with PeakMemory() as memory:
        model, x = wide(), torch.randn(16, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"hardware": SLOW, "memory_limit": limit_bytes, "accumulate": True}
        compiled = torch.compile(model, backend="osdp", options=options)
        for _ in range(4):
            with osdp_compile.no_sync(model):
                for _ in range(2):
                    compiled(x).square().mean().backward()
            compiled(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory.peak_bytes, limit_bytes, whole_bytes, osdp_compile.plan_of(model).shards


@pytest.mark.inductor
@pytest.mark.thorough
def test_the_measured_peak_is_under_the_limit(two_ranks):
    for peak_bytes, limit_bytes, whole_bytes, shards in two_ranks.run(peak_and_limit):
        assert shards
        assert 2 * whole_bytes < peak_bytes <= limit_bytes

"""Writes into parts of sharded parameters and gradients reach them, as those of a plain tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from osdp_compile import OsdpError, Plan
from osdp_compile.optim.written_rows import Part
from tests.training import SLOW, normal_batch, whole


def one_row(w):
    w[1] = 5.0
    w[-1].mul_(3)


def rows_of_several_ranks(w):
    w[2:7] = 0.5
    w[3:5].clamp_(max=0.1)


def rows_of_a_plain_tensor(w):
    w[1:3] = torch.arange(8.0).view(2, 4)
    w[8].copy_(torch.ones(4))


def parts_of_parts(w):
    w[2:7][1:4][0].zero_()
    w[2:7, 1:3] = 4.0


def split(w):
    w.split(4)[1].zero_()
    w.split([2, len(w) - 2])[1][0].add_(1)


def narrow_and_chunk(w):
    w.narrow(0, 3, 4).neg_()
    w.chunk(3)[2].fill_(2)


def flat(w):
    if len(w) % 2:  # torch views no uneven rows as flat
        return
    w.view(-1)[6] = 9.0
    w.flatten()[10:20].zero_()


def diagonal(w):
    w.diagonal().fill_(7.0)


def from_other_parts(w):
    w[0:2] = w[4:6] * 2
    w[5].add_(w[6])
    torch._foreach_mul_([w[1], w[7]], 3)


def as_it_was(w):
    """Reads of parts, and writes of what no other rank has."""
    w[:, 1].zero_()
    w.mul_(1 + w[2:4].mean().full_tensor() if isinstance(w, DTensor) else 1 + w[2:4].mean())


WRITES = (
    one_row,
    rows_of_several_ranks,
    rows_of_a_plain_tensor,
    parts_of_parts,
    split,
    narrow_and_chunk,
    flat,
    diagonal,
    from_other_parts,
    as_it_was,
)


def trained(rank, world_size, kind, rows=9):
    """A model after one backward. ``rows``: of its last weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, rows))
    plan = Plan.uniform(model.named_parameters(), kind, world_size=world_size)
    options = {"hardware": SLOW, "plan": plan}
    compiled = torch.compile(model, backend="osdp", options=options)
    compiled(normal_batch(0, 0, rank)).square().mean().backward()
    return model


def wrong(rank, world_size, kind, rows):
    """The writes after which a parameter or a gradient is not what a plain tensor would be."""
    weight = trained(rank, world_size, kind, rows)[2].weight
    gradient, found = weight.grad, []
    for write in WRITES:
        for tensor in (weight, weight.data, gradient):
            expected = whole(tensor).detach().clone()
            with torch.no_grad():
                write(tensor)
                write(expected)
            if not torch.equal(whole(tensor).detach(), expected):
                found.append(write.__name__)
    return found


@pytest.mark.parametrize(
    ("kind", "rows"), [("shard_regather", 9), ("shard_keep", 10), ("replicate", 9)]
)
def test_writes_into_parts_reach_the_tensor(two_ranks, kind, rows):
    assert two_ranks.run(wrong, kind, rows) == [[], []]


@pytest.mark.thorough
def test_writes_into_parts_on_four_ranks_reach_the_tensor(four_ranks):
    assert four_ranks.run(wrong, "shard_keep", 9) == [[]] * 4


def read(rank, world_size):
    """A gradient through a part; what a part is with others; a draw into one."""
    weight = trained(rank, world_size, "shard_keep")[2].weight
    weight.grad = None
    (weight[2:6] * 2).sum().backward()
    expected = torch.zeros(9, 4)
    expected[2:6] = 2.0
    with torch.no_grad():
        part = weight[2:6]
        with pytest.raises(OsdpError, match="draws random numbers into a part"):
            part.normal_()
        results = part + part, part.sum(), part.clone(), part.t() @ part
    return (
        torch.equal(whole(weight.grad), expected),
        type(part) is Part and isinstance(part, DTensor),
        [type(one) for one in results] == [DTensor] * 4,
    )


def test_parts_are_read_as_before(two_ranks):
    assert two_ranks.run(read) == [(True, True, True)] * 2

"""Ranks with data of their own beside the batch: sequences and tokens that ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor

from osdp_compile import OsdpError, Plan
from tests.end_to_end.test_parallelized import adamw, distance, local_parameters
from tests.training import SLOW

WORDS, WIDTH, HEADS, LENGTH = 24, 16, 2, 8


def whole_sequence(x, mesh):
    """The keys or values of all ranks; the gradient of a rank's part comes from all of them."""
    placed = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    return placed.full_tensor(grad_placements=[Partial()])


class Attention(nn.Module):
    """Causal attention of a sequence that is sharded over ``mesh``; None: it is whole."""

    def __init__(self, mesh=None):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mesh = mesh

    def forward(self, x, places):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        keys = torch.arange(k.shape[2])
        if self.mesh is not None:
            k, v = (whole_sequence(one, self.mesh) for one in (k, v))
            keys = torch.arange(k.shape[2])
        seen = places[:, None] >= keys
        x = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(x.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, mesh=None):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention(mesh) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, places):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x, places)
        return self.head(x)


def made(mesh=None):
    torch.manual_seed(0)
    return Language(mesh).double()


def batch_of(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)


def loss_of(called, batch, part=slice(None)):
    """The mean loss of a part of the sequence's places."""
    places = torch.arange(LENGTH)[part]
    logits = called(batch[:, :-1][:, part], places)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:][:, part].flatten())


def cut_sequences(rank, world_size, dims, kind):
    """``dims``: of the option ``mesh``. The distance to one process, or the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, reference = made(mesh["cp"]), made()
    ranks = mesh[dims].size()
    plan = Plan.uniform(local_parameters(model), kind, world_size=ranks)
    options = {"mesh": mesh[dims], "hardware": SLOW, "plan": plan}
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizers = adamw(model), adamw(reference)
    place, part = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    half = LENGTH // 2
    for step in range(3):
        own = slice(part * half, (part + 1) * half)
        loss_of(compiled, batch_of(step, place), own).backward()
        try:
            optimizers[0].step()
        except OsdpError as error:
            return str(error)
        optimizers[0].zero_grad()
        (sum(loss_of(reference, batch_of(step, one)) for one in range(2)) / 2).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return distance(model, reference)


@pytest.mark.parametrize(
    ("dims", "kind"),
    [
        (("dp", "cp"), "shard_regather"),
        pytest.param(("dp", "cp"), "replicate", marks=pytest.mark.thorough),
    ],
)
def test_sequences_that_ranks_share_train_like_one_process(four_ranks, dims, kind):
    assert max(four_ranks.run(cut_sequences, dims, kind)) < 1e-11


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["shard_regather", "replicate"])
def test_a_mesh_without_the_ranks_of_a_sequence_is_refused_on_every_rank(four_ranks, kind):
    for said in four_ranks.run(cut_sequences, "dp", kind):
        assert "'blocks.0.qkv.weight'" in said or "'words.weight'" in said
        assert "options={'mesh': mesh['dp', 'cp']}" in said


class Experts(nn.Module):
    """Stacked experts; each rank of ``mesh`` holds some, and computes them for all ranks."""

    def __init__(self, experts=4):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x):
        """``x``: by expert, its tokens."""
        own = self.up, self.down
        up, down = (one.to_local() if isinstance(one, DTensor) else one for one in own)
        return torch.bmm(torch.relu(torch.bmm(x, up)), down)


class Mixture(nn.Module):
    """A token goes to the expert of its place: all experts have as many tokens."""

    def __init__(self, mesh=None):
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.mesh = mesh

    def forward(self, x):
        x = self.inside(x).unflatten(0, (4, -1))
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False)
            x = x.redistribute(placements=[Shard(0)]).to_local()
        x = self.experts(x)
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
            x = x.redistribute(placements=[Shard(1)]).to_local()
        return self.outside(x.flatten(0, 1))


def mixture(mesh=None):
    torch.manual_seed(0)
    model = Mixture(mesh).double()
    if mesh is not None:

        def distribute(name, module, mesh):
            for key, one in list(module._parameters.items()):
                placed = distribute_tensor(one.detach(), mesh, [Shard(0)])
                module._parameters[key] = nn.Parameter(placed)

        distribute_module(model.experts, mesh, distribute)
    return model


def rows_of(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def with_experts(rank, world_size, dims, same=False):
    """``same``: the ranks of ``ep`` have one batch. The distance to one process, or the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, reference = mixture(mesh["ep"]), mixture()
    options = {"mesh": mesh[dims], "hardware": SLOW}
    options["plan"] = Plan.uniform(local_parameters(model), "shard_regather", world_size=2)
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizers = adamw(model), adamw(reference)
    for step in range(3):
        place = mesh["dp"].get_local_rank() if same else rank
        try:
            compiled(rows_of(step, place)).square().mean().backward()
            optimizers[0].step()
        except OsdpError as error:
            return str(error)
        optimizers[0].zero_grad()
        (sum(reference(rows_of(step, one)).square().mean() for one in range(4)) / 4).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return distance(model, reference)


@pytest.mark.thorough
def test_experts_train_like_one_process(four_ranks):
    assert max(four_ranks.run(with_experts, ("dp", "ep"))) < 1e-11


@pytest.mark.thorough
def test_experts_with_a_mesh_that_does_not_fit_the_batches_are_refused_on_every_rank(four_ranks):
    for said in four_ranks.run(with_experts, "dp"):
        assert "its gradient differs there" in said
    for said in four_ranks.run(with_experts, ("dp", "ep"), same=True):
        assert "the ranks along 'ep' have the same batch" in said

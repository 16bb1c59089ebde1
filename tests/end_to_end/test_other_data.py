"""Ranks with data of their own beside the batch: sequences and tokens that ranks share."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from osdp_compile import OsdpError, Plan
from tests.chosen import more, thorough
from tests.end_to_end.test_parallelized import adamw, distance, local_parameters
from tests.training import SLOW

WORDS, WIDTH, HEADS, KV_HEADS, LENGTH = 24, 16, 4, 2, 8
HEAD_WIDTH = WIDTH // HEADS


class Attended(nn.Module):
    """Causal attention of queries at ``places``; the keys are those of the whole sequence."""

    def forward(self, query, key, value, places):
        """Tensors of (batch, heads, places, width)."""
        key, value = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (key, value))
        seen = places[:, None] >= torch.arange(key.shape[2])
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def gathering(attended, mesh, gather):
    """Gather keys and values before ``attended`` is called with a rank's part of the sequence."""

    def before(module, args):
        query, key, value, places = args
        return query, gather(key, mesh), gather(value, mesh), places

    attended.register_forward_pre_hook(before)


def by_dtensors(attended, mesh):
    def gather(x, mesh):
        placed = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
        return placed.full_tensor(grad_placements=[Partial()])

    gathering(attended, mesh, gather)


def by_functions(attended, mesh):
    def gather(x, mesh):
        return all_gather_tensor_autograd(x.contiguous(), 2, (mesh, 0))

    gathering(attended, mesh, gather)


def by_torch(attended, mesh):
    """Torch's context parallelism, as for its FlexAttention, which has no backward on CPUs."""
    parallelize_module(attended, mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))


def rotated(x, places):
    """RoPE of (batch, heads, places, width)."""
    first, second = x.chunk(2, -1)
    at = places[:, None] * 10.0 ** -torch.arange(first.shape[-1], dtype=x.dtype)
    cos, sin = at.cos(), at.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """Llama's, with grouped queries."""

    def __init__(self):
        super().__init__()
        self.norm, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))
        self.attended = Attended()
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, places):
        y = self.norm(x)
        q, k, v = (
            one(y).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        y = self.attended(rotated(q, places), rotated(k, places), v, places)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, places):
        """``places``: in the sequence, of a rank's tokens."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, places)
        return self.head(self.norm(x))


def made():
    torch.manual_seed(0)
    return Language().double()


def batch_of(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)


def loss_of(called, batch, part=slice(None)):
    """The mean loss of a part of the sequence's places."""
    places = torch.arange(LENGTH)[part]
    logits = called(batch[:, :-1][:, part], places)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:][:, part].flatten())


def cut_sequences(rank, world_size, dims, kind, way, tp=1):
    """``dims``: of the option ``mesh``; ``way``: to gather keys; ``tp``: ranks that share weights.
    The distance to one process, or the error."""
    places = world_size // (2 * tp)
    _clear_sharding_prop_cache()  # it may know an equal mesh of another test
    mesh = init_device_mesh("cpu", (places, 2, tp), mesh_dim_names=("dp", "cp", "tp"))
    model, reference = made(), made()
    for block in model.blocks:
        way(block.attended, mesh["cp"])
        if tp > 1:
            ways = {one: ColwiseParallel() for one in ("q", "k", "v", "gate", "up")}
            parallelize_module(
                block, mesh["tp"], ways | dict.fromkeys(("o", "down"), RowwiseParallel())
            )
    ours = mesh["dp", "cp"]._flatten("dp_cp") if dims == "dp_cp" else mesh[dims]
    plan = Plan.uniform(local_parameters(model), kind, world_size=ours.size())
    options = {"mesh": ours, "hardware": SLOW, "plan": plan}
    compiled = torch.compile(model, backend="osdp", options=options, fullgraph=True)
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
        losses = [loss_of(reference, batch_of(step, one)) for one in range(places)]
        (sum(losses) / places).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return distance(model, reference)


@pytest.mark.parametrize(
    ("dims", "kind", "way"),
    [
        *thorough(
            ("dp_cp", "shard_regather", by_functions), (("dp", "cp"), "shard_keep", by_torch)
        ),
        *more((("dp", "cp"), "replicate", by_dtensors)),
    ],
)
def test_sequences_that_ranks_share_train_like_one_process(four_ranks, dims, kind, way):
    assert max(four_ranks.run(cut_sequences, dims, kind, way)) < 1e-11


@pytest.mark.thorough
def test_sequences_that_ranks_share_beside_tensor_parallelism(four_ranks):
    found = four_ranks.run(cut_sequences, "dp_cp", "shard_regather", by_dtensors, tp=2)
    assert max(found) < 1e-11


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "way"), [("replicate", by_torch), *more(("shard_regather", by_functions))]
)
def test_a_mesh_without_the_ranks_of_a_sequence_is_refused_on_every_rank(four_ranks, kind, way):
    for said in four_ranks.run(cut_sequences, "dp", kind, way):
        assert "'words.weight' is equal on the ranks" in said
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


def trained_experts(called, model, reference, place, optimizer=adamw):
    """Three steps; the batches of ``reference`` are those of four places.

    The distance of ``model`` to it, or the error.
    """
    optimizers = optimizer(model), optimizer(reference)
    for step in range(3):
        try:
            called(rows_of(step, place)).square().mean().backward()
            optimizers[0].step()
        except OsdpError as error:
            return str(error)
        optimizers[0].zero_grad()
        (sum(reference(rows_of(step, one)).square().mean() for one in range(4)) / 4).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return distance(model, reference)


def with_experts(rank, world_size, dims, same=False):
    """``same``: the ranks of ``ep`` have one batch. The distance to one process, or the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model, reference = mixture(mesh["ep"]), mixture()
    options = {"mesh": mesh[dims], "hardware": SLOW}
    options["plan"] = Plan.uniform(local_parameters(model), "shard_regather", world_size=2)
    compiled = torch.compile(model, backend="osdp", options=options)
    place = mesh["dp"].get_local_rank() if same else rank
    return trained_experts(compiled, model, reference, place)


@pytest.mark.thorough
def test_experts_train_like_one_process(four_ranks):
    assert max(four_ranks.run(with_experts, ("dp", "ep"))) < 1e-11


@pytest.mark.thorough
def test_experts_with_a_mesh_that_does_not_fit_the_batches_are_refused_on_every_rank(four_ranks):
    for said in four_ranks.run(with_experts, "dp"):
        assert "its gradient differs there" in said
    for said in four_ranks.run(with_experts, ("dp", "ep"), same=True):
        assert "the ranks along 'ep' have the same batch" in said

"""Models that ``parallelize_module`` distributed before: osdp over ``mesh["dp"]`` beside ``tp``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from itertools import repeat
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef

import osdp_compile
from osdp_compile import InfeasibleLimit, OsdpError, Plan, plan_of
from osdp_compile.planning.planner_inputs import UNSEEN_BYTES
from osdp_compile.trace import fake_world
from osdp_compile.tracking.session import session_for
from tests.boxed import without_inductor
from tests.chosen import more
from tests.end_to_end.test_limit_is_kept import STEPS, kept, trained
from tests.training import SLOW

WORDS, WIDTH, HEADS, LENGTH = 24, 16, 4, 6


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head_width = width // HEADS

    def forward(self, x):
        q, k, v = (
            one(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Language(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(width=WIDTH, layers=1):
    torch.manual_seed(0)
    return Language(width, layers).double()


def linears_only(model, mesh):
    """Megatron's split of attention and MLP; norms, embedding and head stay plain."""
    ways = {f"attention.{one}": ColwiseParallel() for one in "qkv"}
    ways |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, ways)


def by_sequence(model, mesh):
    """torchtitan's Llama: sequences are sharded between the layers; everything is distributed."""
    parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for block in model.blocks:
        ways = {
            "norm": SequenceParallel(),
            "second": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            **{f"attention.{one}": ColwiseParallel() for one in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, ways)


def two_by_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tokens(step, place):
    generator = torch.Generator().manual_seed(10 * step + place)
    return torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)


def loss_of(called, batch):
    logits = called(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step_of(called, model, optimizer, batch):
    loss_of(called, batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return whole(norm).item()


def reference_step(model, optimizer, step, places=2):
    (sum(loss_of(model, tokens(step, place)) for place in range(places)) / places).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def distance(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((whole(one) - other).abs().max().item() for one, other in pairs)


#: Of each way of distributing.


@dataclasses.dataclass
class Found:
    apart: float
    norms: list[float]
    placements: dict[str, tuple]
    theirs: dict[str, tuple]
    loss_apart: float
    freed: bool


def placements(model):
    return {
        name: one.placements for name, one in model.named_parameters() if isinstance(one, DTensor)
    }


def local_of(parameter):
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter


def local_parameters(model):
    """Names and local tensors, about which the plan decides."""
    return [(name, local_of(p)) for name, p in model.named_parameters()]


def storages(model):
    """The memory of each parameter on this rank; the result keeps none of it alive."""
    return {n: StorageWeakRef(p.untyped_storage()) for n, p in local_parameters(model)}


def are_freed(before, model):
    """Whether sharded parameters have lost their memory of ``before`` the first call."""
    return all(
        before[name].expired()
        for name, one in model.named_parameters()
        if isinstance(one, DTensor) and not one.placements[0].is_replicate()
    )


def options_for(kind, model, mesh):
    plan = Plan.uniform(local_parameters(model), kind, world_size=2)
    return {"mesh": mesh["dp"], "hardware": SLOW, "plan": plan}


def train(rank, world_size, distribute, kind, early, layers):
    """``early``: the optimizer is made before the first call, and has stepped."""
    mesh = two_by_two()
    model, reference, theirs = (made(layers=layers) for _ in range(3))
    for one in (model, theirs):
        distribute(one, mesh["tp"])
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(theirs, mesh=mesh["dp"])
    place = mesh["dp"].get_local_rank()
    options = options_for(kind, model, mesh)
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizers = adamw(model), adamw(reference)
    norms, before = [], storages(model)
    for step in range(4):
        if step == 1 and not early:
            optimizers = adamw(model), adamw(reference)
        ours = step_of(compiled, model, optimizers[0], tokens(step, place))
        norms.append(ours - reference_step(reference, optimizers[1], step))
    batch = tokens(9, 0)
    with torch.no_grad():
        eager = loss_of(model, batch) - loss_of(reference, batch)
        called = loss_of(compiled.eval(), batch) - loss_of(reference, batch)
    return Found(
        distance(model, reference),
        norms,
        placements(model),
        placements(theirs),
        max(abs(eager.item()), abs(called.item())),
        are_freed(before, model),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("distribute", "kind", "early", "layers"),
    [
        (linears_only, "shard_keep", False, 1),
        (by_sequence, "shard_regather", True, 2),
        *more(
            (by_sequence, "replicate", True, 1),
            (linears_only, "shard_regather", True, 2),
            (linears_only, "replicate", True, 2),
            (by_sequence, "shard_keep", False, 2),
        ),
    ],
)
def test_trains_like_one_process(four_ranks, distribute, kind, early, layers):
    for found in four_ranks.run(train, distribute, kind, early, layers):
        assert found.apart < 1e-11
        assert max(map(abs, found.norms)) < 1e-11
        assert found.loss_apart < 1e-11
        assert found.freed
        if kind == "replicate":
            assert all(one[0] == Replicate() for one in found.placements.values())
        else:  # what FSDP2 leaves on one dimension is replicated over the other here
            theirs = {n: p if len(p) == 2 else (*p, Replicate()) for n, p in found.theirs.items()}
            assert found.placements == theirs


def train_under_a_limit(rank, world_size):
    mesh = two_by_two()
    model, reference = made(), made()
    by_sequence(model, mesh["tp"])
    before = dict(model.named_parameters())
    options = {"mesh": mesh["dp"], "hardware": SLOW, "memory_limit": "1KiB"}
    batch = tokens(0, mesh["dp"].get_local_rank())
    with pytest.raises(InfeasibleLimit) as refused:
        torch.compile(model, backend="osdp", options=options)(batch)
    assert dict(model.named_parameters()) == before, "the model has changed"
    assert loss_of(model, batch).item() == pytest.approx(loss_of(reference, batch).item())
    torch._dynamo.reset()
    limit_bytes = refused.value.least_bytes + 2000
    options["memory_limit"] = f"{limit_bytes / 1024}KiB"
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizers = adamw(model), adamw(reference)
    for step in range(3):
        batch = tokens(step, mesh["dp"].get_local_rank())
        step_of(compiled, model, optimizers[0], batch)
        reference_step(reference, optimizers[1], step)
    plan = plan_of(model)
    return distance(model, reference), str(plan), plan.prediction.peak_bytes <= limit_bytes


@pytest.mark.thorough
def test_one_plan_for_all_ranks_under_a_limit(four_ranks):
    apart, plans, kept = zip(*four_ranks.run(train_under_a_limit), strict=True)
    assert max(apart) < 1e-11
    assert len(set(plans)) == 1
    assert all(kept)


def measured(rank, world_size):
    mesh = two_by_two()
    return kept_beside(mesh["tp"], rank // 2, mesh=mesh["dp"])


def kept_beside(tp, place, **options):
    """``place``: of the rank among the data-parallel ones."""

    def run(given):
        model = made(width=64)
        by_sequence(model, tp)
        generator = torch.Generator().manual_seed(place)
        batch = torch.randint(0, WORDS, (4, 32), generator=generator)
        return trained(model, repeat(batch, STEPS), given, lambda one: one.square().mean())

    return kept(run, **options)


@pytest.mark.inductor
@pytest.mark.thorough
def test_the_measured_peak_is_within_the_limit(four_ranks):
    assert_within(four_ranks.run(measured))


def assert_within(found):
    for one in found:
        assert one.peak_bytes <= one.limit_bytes
        assert one.predicted_bytes - UNSEEN_BYTES <= 1.05 * one.peak_bytes
        assert not one.warnings


def with_fsdp2(mesh):
    model = made()
    by_sequence(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def checkpoints(rank, world_size, folder):
    mesh, place = two_by_two(), rank // 2
    model, reference = made(), made()
    by_sequence(model, mesh["tp"])
    compiled = torch.compile(
        model, backend="osdp", options=options_for("shard_regather", model, mesh)
    )
    optimizers = adamw(model), adamw(reference)
    for step in range(2):
        step_of(compiled, model, optimizers[0], tokens(step, place))
        reference_step(reference, optimizers[1], step)
    state = get_state_dict(model, optimizers[0])
    dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=folder)

    theirs = with_fsdp2(mesh)
    optimizer = adamw(theirs)
    model_state, optimizer_state = get_state_dict(theirs, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        theirs, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    step_of(theirs, theirs, optimizer, tokens(2, place))
    reference_step(reference, optimizers[1], 2)
    loaded = distance(theirs, reference)

    dcp.save({"model": theirs.state_dict()}, checkpoint_id=f"{folder}/theirs")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/theirs")
    model.load_state_dict(state["model"])
    back = distance(model, reference)
    model.load_state_dict(made().state_dict())  # whole tensors
    return loaded, back, distance(model, made())


@pytest.mark.thorough
def test_checkpoints_go_to_fsdp2_with_tensor_parallelism_and_back(four_ranks, tmp_path):
    for apart in four_ranks.run(checkpoints, str(tmp_path)):
        assert max(apart) < 1e-11


def with_no_sync(model, compiled, mesh):
    batches = [tokens(step, mesh["dp"].get_local_rank()) for step in range(2)]
    with osdp_compile.no_sync(compiled):
        loss_of(compiled, batches[0]).backward()
    loss_of(compiled, batches[1]).backward()
    reference = made()
    for step, place in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (loss_of(reference, tokens(step, place)) / 2).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((whole(one.grad) - other.grad).abs().max().item() for one, other in pairs)


def with_param_dtype(model, compiled, mesh):
    """Against the eager model, which reads its parameters in the same type."""
    batch = tokens(0, 0)
    found = loss_of(compiled, batch)
    found.backward()
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    assert {one.grad.dtype for one in model.parameters()} == {torch.float64}
    assert all(torch.isfinite(whole(one.grad)).all() for one in model.parameters())
    with torch.no_grad():
        return abs(found.item() - loss_of(model, batch).item()) / 10  # bfloat16


def with_muon(model, compiled, mesh):
    loss_of(compiled, tokens(0, mesh["dp"].get_local_rank())).backward()
    reference = made()
    (sum(loss_of(reference, tokens(0, place)) for place in range(2)) / 2).backward()
    for one in (model, reference):
        torch.optim.Muon([p for p in one.parameters() if p.dim() == 2], lr=1e-2).step()
    return distance(model, reference) / 10  # products in bfloat16


class Broken(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        x = self.inner.words(batch)
        for block in self.inner.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.inner.head(self.inner.norm(x))


def train_with(rank, world_size, what):
    mesh, model = two_by_two(), made()
    by_sequence(model, mesh["tp"])
    options = options_for("shard_regather", model, mesh)
    if what is with_param_dtype:
        options["param_dtype"] = "bfloat16"
    return what(model, torch.compile(model, backend="osdp", options=options), mesh)


@pytest.mark.thorough
@pytest.mark.parametrize("what", [with_no_sync, with_param_dtype, with_muon])
def test_with(four_ranks, what):
    coarse = what in (with_param_dtype, with_muon)
    for apart in four_ranks.run(train_with, what):
        assert apart < (1e-2 if coarse else 1e-11)


def refusals(rank, world_size):
    mesh, said = two_by_two(), {}
    batch = tokens(0, mesh["dp"].get_local_rank())

    def refused(name, mesh_option, call=lambda model: None, wrap=lambda m: m, **given):
        torch._dynamo.reset()
        model = made()
        by_sequence(model, mesh["tp"])
        options = {"hardware": SLOW, **given} | (
            {} if mesh_option is None else {"mesh": mesh_option}
        )
        with pytest.raises(Exception) as error:
            compiled = torch.compile(wrap(model), backend="osdp", options=options)
            loss_of(compiled, batch).backward()
            call(model)
        said[name] = str(error.value)

    refused("no mesh", None)
    refused("both dimensions", mesh)
    refused("the same", mesh["tp"])

    def whole_inside(model):
        with osdp_compile.full_parameters(model):
            raise AssertionError("not refused")

    refused("full parameters", mesh["dp"], call=whole_inside)

    def adafactor(model):
        torch.optim.Adafactor(model.parameters()).step()

    refused("Adafactor", mesh["dp"], call=adafactor)
    refused("moves", mesh["dp"], tensor_parallel=True)
    refused("a graph break", mesh["dp"], wrap=Broken)
    return said


def after_a_refused_graph_break(rank, world_size):
    """Dynamo compiles each module of a broken loop on its own, the embedding before its sum."""
    mesh = two_by_two()
    model = made()
    by_sequence(model, mesh["tp"])
    batch = tokens(0, mesh["dp"].get_local_rank())
    options = {"hardware": SLOW, "mesh": mesh["dp"]}
    with pytest.raises(OsdpError, match="fullgraph=True"):
        loss_of(torch.compile(Broken(model), backend="osdp", options=options), batch)
    torch._dynamo.reset()
    found = loss_of(torch.compile(model, backend="osdp", options=options), batch)
    return abs((found - loss_of(made(), batch)).item())


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", more("real ones"))
def test_a_model_trains_after_a_refused_graph_break(four_ranks, ranks):
    assert max(four_ranks.run(after_a_refused_graph_break)) < 1e-11


@contextlib.contextmanager
def new_world(world_size, rank=0):
    """A fake world without the caches of an earlier one, which know its groups by their names."""
    torch.compiler.reset()
    _clear_sharding_prop_cache()
    with fake_world(world_size, rank):
        yield


@pytest.mark.thorough
def test_a_model_compiles_after_a_refused_graph_break():
    with new_world(4), without_inductor():
        after_a_refused_graph_break(0, 4)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return self.down(self.up(x)) * self.scale


def test_a_trace_that_starts_again_for_a_number_has_no_local_parameters():
    """AOTAutograd makes the number in a buffer a constant after the first trace."""
    with new_world(4), without_inductor():
        mesh = two_by_two()
        ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Scaled().double(), mesh["tp"], ways)
        options = options_for("shard_regather", model, mesh)
        called = torch.compile(model, backend="osdp", options=options)
        called(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        assert all(isinstance(one.grad, DTensor) for one in model.parameters())


@pytest.mark.thorough
def test_what_is_refused_says_what_to_give(four_ranks):
    for said in four_ranks.run(refusals):
        assert "options={'mesh': mesh['dp']}" in said["no mesh"]
        assert "such as mesh['dp']" in said["both dimensions"]
        assert "options={'mesh': mesh['dp']}" in said["the same"]
        assert "full_parameters" in said["full parameters"]
        assert "full_tensor" in said["full parameters"]
        assert "another optimizer, such as AdamW" in said["Adafactor"]
        assert "fullgraph=True" in said["a graph break"]
        assert "option 'tensor_parallel'" in said["moves"]


def rates_and_links(rank, world_size, folder):
    """The rates along ``tp`` that the first call measures, and the groups of ours on its links."""
    torch._dynamo.reset()
    mesh = two_by_two()
    model = made(layers=1)
    linears_only(model, mesh["tp"])
    with mock.patch.dict(os.environ, OSDP_CACHE_DIR=folder):
        compiled = torch.compile(model, backend="osdp", options={"mesh": mesh["dp"]})
        loss_of(compiled, tokens(0, rank // 2)).backward()
    context = session_for(model).context
    ((name, own),) = context.model_groups.items()
    assert name == mesh["tp"].get_group().group_name and own.beside == {context.group_name}
    return dataclasses.asdict(context.hardware)["dimensions"]


@pytest.mark.thorough
def test_the_first_call_measures_the_dimension_of_the_models_own_collectives(four_ranks, tmp_path):
    """All ranks at once; they share the links of this machine with ours."""
    found = four_ranks.run(rates_and_links, str(tmp_path))
    assert all(one == found[0] for one in found)
    assert list(found[0]) == ["tp"] and "all_reduce" in found[0]["tp"]
    assert found[0]["tp"]["all_reduce"]["seconds_per_byte"] > 0

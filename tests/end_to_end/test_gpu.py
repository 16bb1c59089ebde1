"""Training on a GPU, which two ranks share where there is only one: over gloo, and over NCCL.

Without a GPU the tests are skipped. ``OSDP_TEST_DEVICE=cpu`` runs them on the CPU, over gloo.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import osdp_compile
from examples.gpt import GPT, GPTConfig
from osdp_compile import PeakMemory, Plan, _torch
from osdp_compile.calibration.calibrate import calibrate, library_bytes
from passes.types.decision import FLAT_DECISIONS
from tests.end_to_end import moving
from tests.osdp_compile.runtime.test_p2p import order_in_code
from tests.ranks import Ranks
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    mixed_plan,
    plan_for,
    plan_in_force,
    train_osdp,
    trains_like_reference,
    whole,
)

DEVICE = os.environ.get("OSDP_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
#: A process of a GPU test compiles no C++.
PRELOAD = "tests.imported" if DEVICE == "cpu" else "osdp_compile.engine.backend"
CONFIG = GPTConfig(vocab=61, layers=2, width=64, heads=2, context=12)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not DEVICE, reason="no GPU; OSDP_TEST_DEVICE=cpu runs it on the CPU"),
]


@pytest.fixture(scope="module")
def pair(inductor_cache):
    """Two ranks: on GPUs over NCCL."""
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    with Ranks(2, inductor_cache, PRELOAD, backend=backend, device=DEVICE) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def gloo_pair(inductor_cache):
    """Two ranks over gloo."""
    with Ranks(2, inductor_cache, PRELOAD, device=DEVICE) as ranks:
        yield ranks


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """A function that makes a module or tensors, and its result on the device."""

    make: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        torch.backends.cudnn.allow_tf32 = False  # as by default for matrix products
        made = self.make(*args)
        if isinstance(made, tuple):
            return tuple(one.to(DEVICE) for one in made)
        return made.to(DEVICE)


def trains(ranks: Ranks, make: Any, plan: Any, recipe: Recipe, **changes: Any) -> Any:
    recipe = dataclasses.replace(recipe, batch=OnDevice(recipe.batch))
    return trains_like_reference(ranks, OnDevice(make), plan, recipe, **changes)


def words(step: int, micro: int, rank: int) -> Tensor:
    """Tokens, of another seed for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, CONFIG.vocab, (2, CONFIG.context), generator=generator)


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, tokens)
    return loss


def loss_in_bf16(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        return language_loss(model, tokens)


LANGUAGE = Recipe(language_loss, words, adamw, max_norm=1.0)


def gpt() -> nn.Module:
    return GPT(CONFIG)


def mixed() -> Plan:
    """Every decision of a flat mesh, in small buckets."""
    return mixed_plan(gpt(), list(FLAT_DECISIONS), bucket_bytes=4096, world_size=2)


@pytest.mark.parametrize("plan", ["shard_regather", "replicate", mixed(), 0.3, None])
def test_a_gpt_trains_like_one_process(pair, plan):
    trains(pair, gpt, plan, LANGUAGE)


def test_gloo(gloo_pair):
    trains(gloo_pair, gpt, mixed(), LANGUAGE)


def test_autocast(pair):
    recipe = dataclasses.replace(LANGUAGE, step=loss_in_bf16)
    trains(pair, gpt, "shard_regather", recipe, tolerance=2e-2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-5, fused=True)


def test_a_fused_optimizer_and_two_backwards_a_step(pair):
    recipe = dataclasses.replace(LANGUAGE, optimizer=fused, backwards=2)
    trains(pair, gpt, "shard_keep", recipe)


def pictures(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 3, 8, 8, generator=generator)


def conv_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def test_convolutions_and_batch_norms(pair):
    trains(pair, conv_net, "shard_regather", Recipe(batch=pictures))


def test_operators_in_slices(pair):
    plan = plan_for("mixed", moving.Mlp(), 2)
    trains(pair, moving.Mlp, plan, Recipe())
    sliced = plan_for("sliced", moving.Mlp(), 2)
    trains(pair, moving.Mlp, sliced, Recipe())


@pytest.mark.parametrize("model", [moving.Mlp, moving.Gated])
def test_activations_that_move(pair, model):
    recipe = dataclasses.replace(moving.recipe_of(moving.batch), steps=3)
    doubled = Doubled(model)
    trains(pair, doubled, moving.plan_for(doubled(), 2), recipe, tolerance=1e-10)


class Attention(nn.Module):
    """Causal attention of 4 heads; x: [rows, tokens, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (4, 16)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(2))


def attention_by_heads(rank: int, world_size: int, dtype: torch.dtype) -> tuple[float, Any]:
    """Distance from one process, and the weights that stay."""
    torch.manual_seed(0)
    model = Attention().to(DEVICE, dtype)

    def sequences(step: int, micro: int, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + number)
        return torch.randn(3, 32, 64, generator=generator).to(DEVICE, dtype)

    recipe = dataclasses.replace(moving.recipe_of(sequences), steps=3)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": ["q.weight"], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    return ours.distance(wanted), plan_in_force(model).moved


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["float", "bfloat16"]
)
def test_attention_by_heads(pair, dtype, tolerance):
    """The types select other operators of attention."""
    for apart, moved in pair.run(attention_by_heads, dtype):
        assert apart < tolerance
        assert moved == {f"{name}.weight" for name in "qkvo"}


@dataclasses.dataclass(frozen=True)
class Doubled:
    """A module in double precision."""

    make: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.make().double()


def test_the_generated_code_keeps_the_order(pair):
    in_graphs, in_code = pair.run(order_in_code, DEVICE)[0]
    assert len(in_graphs) == 2  # forward and backward
    assert all(len(calls) > 4 for calls in in_graphs)
    assert in_code == in_graphs


#: Large beside what a GPU's libraries hold, and trained in a second.
LARGE = GPTConfig(vocab=512, layers=2, width=512, heads=8, context=256)


def peak(rank: int, world_size: int, limit_bytes: int | None) -> tuple[int, int]:
    """The measured and the predicted peak of two steps, after the one that compiles.

    In the first step Inductor measures its kernels, in memory of its own.
    """
    hardware = dataclasses.replace(SLOW, library_bytes=library_bytes(torch.device(DEVICE)))
    if DEVICE == "cuda":  # so that those of the training are counted
        _torch.memory.free_cublas_workspaces()
    options = {"hardware": hardware, "memory_limit": limit_bytes}
    with PeakMemory(DEVICE) as memory:
        torch.manual_seed(0)
        model = GPT(LARGE).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = torch.compile(model, backend="osdp", options=options)
        for step in range(3):
            if step == 1 and DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            tokens = torch.zeros(8, LARGE.context, dtype=torch.long, device=DEVICE)
            compiled(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    plan = osdp_compile.plan_of(model)
    assert plan is not None and plan.prediction is not None
    return memory.peak_bytes, plan.prediction.peak_bytes


def test_the_measured_peak_is_the_predicted_one(pair):
    for measured_bytes, predicted_bytes in pair.run(peak, None):
        assert 0.95 * predicted_bytes <= measured_bytes <= 1.02 * predicted_bytes
    limit_bytes = int(0.7 * predicted_bytes)
    for measured_bytes, predicted_bytes in pair.run(peak, limit_bytes):
        assert 0.95 * predicted_bytes <= measured_bytes <= limit_bytes


def resume(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps after a checkpoint, and of the model built anew on the meta device."""
    tokens = words(0, 0, rank).to(DEVICE)
    torch.manual_seed(0)
    model = GPT(CONFIG).to(DEVICE)
    optimizer = adamw(model.parameters())
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    options = {"plan": plan, "hardware": SLOW}
    compiled = torch.compile(model, backend="osdp", options=options)

    def steps(compiled: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            loss = compiled(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    steps(compiled, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    going_on = steps(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.device("meta"):
        again = GPT(CONFIG)
    saved = osdp_compile.plan_of(model)
    assert saved is not None
    osdp_compile.shard(again, saved, mesh=init_device_mesh(DEVICE, (world_size,)))
    again.to_empty(device=DEVICE)
    state = again.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    again.load_state_dict(state)
    compiled = torch.compile(again, backend="osdp", options={"hardware": SLOW})
    resumed = steps(compiled, torch.optim.SGD(again.parameters(), lr=0.1))
    held = [whole(one).isnan().any().item() for one in again.parameters()]
    assert not any(held)
    return going_on, resumed


def test_a_checkpoint_into_a_model_of_the_meta_device(pair, tmp_path):
    for going_on, resumed in pair.run(resume, str(tmp_path)):
        assert going_on[0] != going_on[1]
        assert resumed == pytest.approx(going_on, rel=1e-6)


def profile(rank: int, world_size: int) -> Any:
    return calibrate(dist.group.WORLD, torch.device(DEVICE), seconds=2.0).hardware.to_dict()


def test_a_measured_profile(pair):
    found = pair.run(profile)
    assert found[0] == found[1]
    hardware = osdp_compile.Hardware.from_dict(found[0])
    assert hardware.device_type == DEVICE and hardware.memory_bytes > 1 << 30
    assert set(hardware.collectives) == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
    }
    if DEVICE == "cuda":
        assert hardware.flops_per_second["bfloat16"] > hardware.flops_per_second["float32"]


class Wide(nn.Module):
    """Layers whose activations are many times as large as their weights; x: [rows, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


def test_one_rank_keeps_a_limit():
    """Without a process group, in this process."""
    torch.manual_seed(0)
    rows = torch.randn(1 << 15, 64, device=DEVICE)

    def trained(memory_limit: int | None) -> tuple[int, list[float]]:
        torch._dynamo.reset()
        losses = []
        with PeakMemory(DEVICE) as memory:
            torch.manual_seed(0)
            model = Wide().to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options = {"memory_limit": memory_limit, "hardware": SLOW} if memory_limit else {}
            compiled = torch.compile(model, backend="osdp", options=options)
            for _ in range(3):
                loss = compiled(rows)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return memory.peak_bytes, losses

    peak_bytes, losses = trained(None)
    limit_bytes = int(0.8 * peak_bytes)
    limited_bytes, limited = trained(limit_bytes)
    assert limited_bytes <= limit_bytes
    assert limited == pytest.approx(losses, rel=1e-5)

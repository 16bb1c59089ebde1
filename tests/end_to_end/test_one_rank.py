"""One rank, with or without a process group: its memory limit is kept, and nothing is sharded."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import osdp_compile
from osdp_compile import Hardware, InfeasibleLimit, PeakMemory, Plan, PlanMismatch, plan_of
from tests.chosen import more
from tests.searching import short_searches
from tests.training import adamw, without_other_models

#: A profile of one process: it has no collectives.
ALONE = Hardware(
    name="one process",
    flops_per_second={"default": 5e10},
    memory_bytes_per_second=1e10,
    launch_seconds=5e-6,
    collectives={},
)
WORDS, WIDTH, STEPS = 4096, 48, 3


@pytest.fixture(autouse=True)
def search_that_finds_slices() -> Iterator[None]:
    """The least limit needs the head in slices, which fewer plans do not find."""
    with short_searches(40):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, tied: bool = False, breaks: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.breaks = breaks
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.words(tokens[:, :-1]))
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(autouse=True)
def alone(request, tmp_path, inductor_cache, monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch._dynamo.reset()
    gc.collect()
    if getattr(request, "param", "no process group") == "no process group":
        yield
        return
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of(**kind: int) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**kind)


def train(model: nn.Module, options: dict[str, object] | None) -> list[float]:
    """The losses of a few steps. ``options``: None: in eager mode."""
    optimizer = adamw(model.parameters())
    compiled = model if options is None else torch.compile(model, backend="osdp", options=options)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        loss = compiled(torch.randint(0, WORDS, (2, 129), generator=generator))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def least_bytes(**kind: int) -> int:
    """The least limit, which the error about a lower one says."""
    try:
        train(model_of(**kind), {"hardware": ALONE, "memory_limit": 1 << 20})
    except InfeasibleLimit as error:
        assert "for this model on one rank" in str(error)
        return error.least_bytes
    raise AssertionError("1 MiB is enough")


def trains_as_in_eager_mode(options: dict[str, object], **kind: int) -> LanguageModel:
    """The model after training with options, compared with training in eager mode."""
    model = model_of(**kind)
    eager = copy.deepcopy(model)
    before = dict(model.named_parameters())
    losses = train(model, {"hardware": ALONE, **options})
    assert losses == pytest.approx(train(eager, None), abs=1e-5, rel=1e-5)
    assert list(model.state_dict()) == list(eager.state_dict())
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter, eager.get_parameter(name), atol=1e-5, rtol=1e-5)
    if not kind.get("breaks"):
        assert all(one is before[name] for name, one in model.named_parameters())
    return model


# Without a group: the peaks of the next tests.
@pytest.mark.thorough
@pytest.mark.parametrize("alone", ["a world of one", *more("no process group")], indirect=True)
def test_the_measured_peak_is_under_a_limit_that_inductor_does_not_keep():
    with PeakMemory() as unlimited:
        train(model_of(), {})
    least = least_bytes()
    limit = least * 9 // 8
    assert limit < unlimited.peak_bytes
    gc.collect()
    with PeakMemory() as memory:
        model = model_of()
        train(model, {"hardware": ALONE, "memory_limit": limit})
    plan = plan_of(model)
    assert plan.world_size == 1 and not plan.shards
    assert plan.recompute
    assert memory.peak_bytes <= limit
    assert memory.peak_bytes <= plan.prediction.peak_bytes <= 1.1 * memory.peak_bytes


@pytest.mark.thorough
def test_the_least_limit_runs_the_head_in_slices_of_its_tokens():
    least = least_bytes()
    gc.collect()
    with PeakMemory() as memory:
        model = model_of()
        train(model, {"hardware": ALONE, "memory_limit": least})
    assert plan_of(model)["head.weight"].slices > 1
    assert memory.peak_bytes <= least


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [{"tied": True}, {"breaks": True}, *more({})], ids=str)
def test_a_step_under_a_limit_is_that_of_eager_mode(kind):
    with without_other_models():
        model = trains_as_in_eager_mode({"memory_limit": least_bytes(**kind) * 101 // 100}, **kind)
    assert plan_of(model).recompute


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [(4, 1), *more(4)], ids=str)
def test_slices_are_those_of_eager_mode(kept):
    slices = {"blocks.*.up.weight": kept, "head.weight": 2}
    model = trains_as_in_eager_mode({"memory_limit": "1GiB", "slices": slices}, layers=2)
    plan = plan_of(model)
    assert plan["blocks.0.up.weight"].slices == plan["blocks.0.down.weight"].slices == 4
    assert plan["head.weight"].slices == 2


@pytest.mark.thorough
def test_a_limit_is_kept_with_tuned_kernels():
    limit = least_bytes() * 9 // 8
    settings = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    with without_other_models():
        trains_as_in_eager_mode({"memory_limit": limit, "inductor": settings})
    torch._dynamo.reset()
    gc.collect()
    with PeakMemory() as memory:  # without the trials of tuning, which are over
        train(model_of(), {"hardware": ALONE, "memory_limit": limit, "inductor": settings})
    assert memory.peak_bytes <= limit


@pytest.mark.thorough
def test_gradients_inside_no_sync_are_those_of_several_backwards():
    model = model_of()
    eager = copy.deepcopy(model)
    options = {"hardware": ALONE, "memory_limit": "1GiB", "accumulate": True}
    compiled = torch.compile(model, backend="osdp", options=options)
    for index in range(3):
        tokens = torch.arange(index, index + 129)[None]
        eager(tokens).backward()
        with osdp_compile.no_sync(model) if index < 2 else contextlib.nullcontext():
            compiled(tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, eager.get_parameter(name).grad, atol=1e-5, rtol=1e-5
        )


@pytest.mark.thorough
def test_a_frozen_model_an_evaluation_first_and_eager_reads():
    model = model_of()
    model.words.requires_grad_(False)
    eager = copy.deepcopy(model)
    options = {"hardware": ALONE, "memory_limit": "1GiB"}
    compiled = torch.compile(model, backend="osdp", options=options)
    tokens = torch.arange(129)[None]
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), eager(tokens))
    assert plan_of(model) is None
    for one in (compiled, model):  # compiled, then uncompiled through the markers
        one(tokens).backward()
        eager(tokens).backward()
    assert model.words.weight.grad is None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), eager(tokens))


@pytest.mark.thorough
@pytest.mark.parametrize("alone", ["no process group", *more("a world of one")], indirect=True)
def test_a_plan_is_taken_and_one_for_several_ranks_is_refused(tmp_path):
    model = model_of()
    train(model, {"hardware": ALONE, "memory_limit": least_bytes() * 6 // 5})
    plan = plan_of(model)
    plan.save(tmp_path / "plan.json")
    again = model_of()
    train(again, {"hardware": ALONE, "plan": tmp_path / "plan.json"})
    assert plan_of(again).recompute == plan.recompute
    several = Plan.uniform(model.named_parameters(), "shard_keep", world_size=2)
    options = {"plan": several, "memory_limit": "1GiB", "hardware": ALONE}
    with pytest.raises(PlanMismatch, match="the plan is for 2 ranks, this run has 1"):
        train(model_of(), options)


@pytest.mark.thorough
def test_without_a_limit_nothing_is_planned():
    model = model_of()
    train(model, {"hardware": ALONE})
    assert plan_of(model) is None
    assert type(model) is LanguageModel


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["shard", *more("option")])
def test_a_plan_that_was_made_before_is_kept(way):
    limit = least_bytes() * 9 // 8
    tokens = torch.zeros(2, 129, dtype=torch.long)
    made = osdp_compile.plan(
        model_of(), (tokens,), world_size=1, hardware=ALONE, memory_limit=limit
    )
    assert made.recompute and not made.shards
    model = model_of()
    if way == "shard":
        assert osdp_compile.shard(model, made) is model
    train(model, {"hardware": ALONE, **({"plan": made} if way == "option" else {})})
    assert plan_of(model) == made

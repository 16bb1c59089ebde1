"""Mixed precision: gathering and computing in bfloat16, sending gradients in it or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import osdp_compile
from osdp_compile import Plan
from osdp_compile.planning.traced_step import trace
from passes.pipeline import default_passes
from tests.training import SLOW, adamw, mean_over_ranks, whole

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    """A residual MLP; its linears have rows that no number of ranks divides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Tied embeddings around blocks, and a projection of floating-point features."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(37, 32)
        self.features = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 37, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens, features):
        x = self.token(tokens) + self.features(features)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made() -> Language:
    torch.manual_seed(0)
    return Language()


def batch(step: int, rank: int):
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 37, (4, 12), generator=generator).sort().values
    return tokens[:, :-1], torch.randn(4, 11, 8, generator=generator), tokens[:, 1:]


def losses(called, optimizer, rank: int, steps=range(6)) -> list[float]:
    found = []
    for step in steps:
        tokens, features, targets = batch(step, rank)
        logits = called(tokens, features)
        assert logits.dtype == BF16
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean_over_ranks(loss))
    return found


def plan_for(kind: str, model: nn.Module, world_size: int) -> Plan:
    if kind != "sliced":
        return Plan.uniform(model.named_parameters(), kind, world_size=world_size)
    plan = Plan.uniform(
        model.named_parameters(), "shard_regather", world_size=world_size, bucket_bytes=1 << 12
    )
    plan = plan.split("blocks.0.up.weight", 3, kept_slices=1)
    return plan.split("blocks.1.down.weight", 2, along=1)


def beside_fsdp(rank, world_size, kinds, reduce_dtype, folder):
    """Losses under some kinds of plan, and FSDP2's losses."""
    theirs = made()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    for block in theirs.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(theirs, mp_policy=policy)
    found = {"fsdp": losses(theirs, adamw(theirs.parameters()), rank)}
    for kind in kinds:
        model = made()
        options = {"plan": plan_for(kind, model, world_size), "hardware": SLOW, "param_dtype": BF16}
        options |= {"reduce_dtype": reduce_dtype, "debug": f"{folder}/{kind}"}
        compiled = torch.compile(model, backend="osdp", options=options)
        optimizer = adamw(model.parameters())
        found[kind] = losses(compiled, optimizer, rank)
        assert all(one.dtype == FP32 for one in model.state_dict().values())
        held = [value for one in optimizer.state.values() for value in one.values()]
        assert all(value.dtype == FP32 for value in held)
        compiled(*batch(0, rank)[:2]).float().sum().backward()
        assert all(p.grad.dtype == FP32 for p in model.parameters())
        with torch.no_grad():
            eager = model(*batch(0, rank)[:2])
            with osdp_compile.full_parameters(model):
                exact = model(*batch(0, rank)[:2])
        assert eager.dtype == BF16 and exact.dtype == FP32
        exact = exact.float()
        assert (eager.float() - exact).abs().mean() < 0.02 * exact.abs().mean()
    return found


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("reduce_dtype", "kinds"),
    [(None, ["shard_regather"]), (FP32, ["replicate", "sliced"])],
    ids=["reduced in bf16", "reduced in fp32"],
)
def test_losses_are_those_of_fsdp_with_its_policy(two_ranks, tmp_path, reduce_dtype, kinds):
    for found in two_ranks.run(beside_fsdp, kinds, reduce_dtype, str(tmp_path)):
        theirs = found.pop("fsdp")
        assert theirs[-1] < theirs[0] - 0.1
        for ours in found.values():
            assert ours == pytest.approx(theirs, rel=2**-9)  # half of what bf16 resolves
    sent = sent_types(tmp_path / kinds[-1])
    assert sent["gather"] == {"bf16"}
    assert sent["reduce"] == {"f32" if reduce_dtype else "bf16"}


def sent_types(folder) -> dict[str, set[str]]:
    """In which types collectives are carried out, by what they do."""
    found: dict[str, set[str]] = {"gather": set(), "reduce": set()}
    for path in folder.glob("*-reorder.txt"):
        for line in path.read_text().splitlines():
            for kind, types in found.items():
                if f"# {kind}" in line:
                    types.add(line.split(": ")[1].split("[")[0])
    return found


def scaled(rank, world_size):
    """Scales after each step with a GradScaler, and which steps changed the parameters.

    In the second step the loss of one rank overflows.
    """
    model = made()
    options = {"plan": plan_for("shard_regather", model, world_size), "hardware": SLOW}
    options["param_dtype"] = "float16"
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
    scales, changed = [], []
    for step in range(3):
        tokens, features, targets = batch(step, rank)
        logits = compiled(tokens, features).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        before = [whole(one) for one in model.parameters()]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 1e6))
        assert bool(torch.isfinite(norm)) == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = zip(before, model.parameters(), strict=True)
        changed.append(any(not torch.equal(old, whole(new)) for old, new in now))
        scales.append(scaler.get_scale())
    return scales, changed


@pytest.mark.thorough
def test_all_ranks_skip_a_step_in_which_one_overflows(two_ranks):
    for scales, changed in two_ranks.run(scaled):
        assert scales == [256.0, 128.0, 128.0]
        assert changed == [True, False, True]


def with_autocast(rank, world_size, narrows):
    """Losses and parameters under autocast; with the pass that casts before gathers, or without."""
    torch._dynamo.reset()
    model = made()
    passes = [one for one in default_passes() if narrows or one.name != "narrow"]
    plan = Plan.uniform(model.named_parameters(), "shard_keep", world_size=world_size)
    options = {"plan": plan, "hardware": SLOW, "passes": passes}
    compiled = torch.compile(model, backend="osdp", options=options)
    with torch.autocast("cpu", BF16):
        found = losses(compiled, adamw(model.parameters()), rank, range(3))
    return found, [whole(one) for one in model.parameters()]


@pytest.mark.thorough
def test_a_cast_before_the_gather_changes_no_bit_of_training(two_ranks):
    for with_it, without_it in zip(
        two_ranks.run(with_autocast, True), two_ranks.run(with_autocast, False), strict=True
    ):
        assert with_it[0] == without_it[0]
        assert all(map(torch.equal, with_it[1], without_it[1]))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = made()

    def forward(self, tokens, features, targets):
        logits = self.model(tokens, features)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.thorough
def test_the_plan_says_what_autocast_gathers_in_bf16(short_search):
    ranks = {"ranks": 2}
    with torch.autocast("cpu", BF16):
        step = trace(WithLoss(), batch(0, 0))
    plan = step.plan(ranks, SLOW, step.least_bytes(ranks, SLOW) * 11 // 10)
    sharded = {row.name: row.reason for row in plan.parameters if row.decision.sharded}
    said = {name for name, reason in sharded.items() if "gathered in bf16" in reason}
    assert said and said <= {name for name in sharded if "norm" not in name}
    assert "model.token.weight" not in said  # the embedding reads it in fp32

"""Models that are sharded by osdp_compile.shard, before they have memory and are called."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

import osdp_compile
from examples.gpt import GPT, GPTConfig
from osdp_compile import OsdpError, Plan, PlanMismatch, RanksDiffer
from osdp_compile.trace import fake_world
from passes.types.decision import FLAT_DECISIONS, Decision
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    mixed_plan,
    placements,
    reset,
    train_osdp,
    whole,
)

WORDS = 13  # which two ranks do not divide


class Tied(nn.Module):
    """An embedding that is the head too, a norm with buffers, and a layer in between."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, WORDS)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.inner(self.token(tokens)))))


def words(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(WORDS, (6,), generator=generator)


def next_word(model, tokens):
    return F.cross_entropy(model(tokens), (tokens + 1) % WORDS)


RECIPE = Recipe(step=next_word, batch=words, optimizer=adamw)


def initialise(model: nn.Module) -> None:
    """What scripts do after to_empty."""
    reset(model)
    nn.init.trunc_normal_(model.token.weight, std=0.5)
    with torch.no_grad():
        model.inner.weight.mul_(2.0)


def on_meta(make_model=Tied) -> nn.Module:
    with torch.device("meta"):
        return make_model()


def refused(model: nn.Module, plan: Plan) -> tuple[str, bool]:
    """Why ranks that differ cannot shard, and whether the model is as it was."""
    before = placements(model)
    with pytest.raises(RanksDiffer) as error:
        osdp_compile.shard(model, plan)
    return str(error.value), before == placements(model)


def train_from_meta(rank, world_size):
    model = on_meta()
    decisions = list(FLAT_DECISIONS)[::-1]
    plan = mixed_plan(model, decisions, bucket_bytes=1 << 10, world_size=world_size)
    model.inner.weight.kind = "matrix"
    early = adamw(model.parameters())
    other = plan if rank == 0 else plan.replace(bucket_bytes=1)
    text, unchanged = refused(model, other)
    osdp_compile.shard(model, plan)

    laid_out = placements(model)
    names = list(model.state_dict())
    kept = model.inner.weight.kind == "matrix" and model.head.weight is model.token.weight
    in_force = osdp_compile.plan_of(model) == plan
    empty = all(p.to_local().is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    halves = all(
        p.to_local().shape[0] == -(-p.shape[0] // 2) - (rank if p.shape[0] % 2 else 0)
        for name, p in model.named_parameters()
        if laid_out[name] == "shard"
    )
    held = list(map(id, early.param_groups[0]["params"])) == list(map(id, model.parameters()))
    initialise(model)
    kept = kept and model.head.weight is model.token.weight

    alone = Tied()
    initialise(alone)
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    alike = [torch.equal(whole(ours), theirs) for ours, theirs in pairs]
    if rank == 1:  # replicated parameters and buffers become rank 0's at the first call
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if laid_out[name] == "replicate":
                    parameter.to_local().add_(1.0)
            model.norm.running_mean.add_(1.0)
    reference = Reference(alone, RECIPE, world_size).train(rank)
    trained = train_osdp(model, {"hardware": SLOW}, RECIPE, rank)
    checks = {
        "decisions": [row.decision for row in osdp_compile.plan_of(model).parameters],
        "placements": laid_out == placements(model),
        "names": names,
        "other plans are refused": unchanged and "rank 0 has 'option plan" in text,
        "kept": kept,
        "in force": in_force,
        "empty": empty,
        "halves": halves,
        "held": held,
        "begins alike": all(alike),
    }
    return checks, laid_out, trained, reference


def test_a_model_sharded_on_the_meta_device_trains_like_one_process(two_ranks):
    for rank, (checks, laid_out, trained, reference) in enumerate(two_ranks.run(train_from_meta)):
        assert set(checks.pop("decisions")) == set(FLAT_DECISIONS)
        assert checks.pop("names") == list(Tied().state_dict())
        assert all(checks.values()), (rank, checks)
        assert set(laid_out.values()) == {"shard", "replicate"}
        assert trained.losses == pytest.approx(reference.losses, abs=1e-5)
        for name, value in {**reference.parameters, **reference.buffers}.items():
            ours = {**trained.parameters, **trained.buffers}[name]
            assert torch.allclose(ours, value, atol=1e-5), (rank, name)


class Kinds(nn.Module):
    def __init__(self, rows: int = 7) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 6))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.square = nn.Parameter(torch.zeros(6, 6))
        self.word = nn.Embedding(7, 6, padding_idx=5)
        self.image = nn.Conv2d(4, 6, 3)


def no_grad(write):
    def write_without_grad(model):
        with torch.no_grad():
            write(model)

    return write_without_grad


@no_grad
def divide_by_norm(model):
    """Rounded, for the ranks' parts are added in another order: the last bits of a sum differ."""
    norm = model.weight.normal_().norm()
    model.weight.div_((1024 * norm).round())


@no_grad
def set_rows(model):
    model.weight[-1] = 2.0
    model.weight[1, 3] = 3.0
    model.weight[4].normal_()
    model.bias[2].fill_(1.0)
    model.weight.data[5].add_(1.0)


@no_grad
def set_columns(model):
    model.weight[:, 3].normal_()
    model.square.t()[:, 4].uniform_()


@no_grad
def copy_whole_tensors(model):
    model.weight.copy_(torch.randn(model.weight.shape))
    model.bias.copy_(torch.tensor(4.0))
    model.square.t().copy_(torch.randn(6, 6))


#: What scripts and libraries do to initialise a model.
WRITES = {
    "normal": lambda model: nn.init.normal_(model.weight, std=0.02),
    "uniform": lambda model: nn.init.uniform_(model.bias),
    "data": lambda model: model.weight.data.normal_(0, 2),
    "generator": lambda model: nn.init.normal_(
        model.weight, generator=torch.Generator().manual_seed(4)
    ),
    "kaiming": lambda model: model.image.reset_parameters(),
    "padding": lambda model: model.word.reset_parameters(),
    "rejecting": lambda model: nn.init.trunc_normal_(model.weight, a=-1.0, b=1.0),
    "orthogonal": lambda model: nn.init.orthogonal_(model.square),
    "eye": lambda model: nn.init.eye_(model.square),
    "dirac": lambda model: nn.init.dirac_(model.image.weight),
    "transposed": no_grad(lambda model: model.weight.t().normal_()),
    "like": no_grad(lambda model: model.weight.add_(torch.randn_like(model.weight))),
    "norm": divide_by_norm,
    "columns": no_grad(lambda model: [part.uniform_() for part in model.square.chunk(3, dim=1)]),
    "rows": set_rows,
    "row by columns": set_columns,
    "copy": copy_whole_tensors,
    "state": lambda model: model.load_state_dict(
        {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    ),
}


def distribute(model, mesh):
    """As parallelize_module: rows of some parameters, columns of others, the rest stays plain."""
    cut = {
        (model, "bias"): 0,
        (model, "square"): 0,
        (model, "weight"): 1,
        (model.word, "weight"): 1,
    }
    for (module, name), dim in cut.items():
        placed = distribute_tensor(getattr(module, name).detach(), mesh, [Shard(dim)])
        setattr(module, name, nn.Parameter(placed))


def sharded_kinds(mesh, rows):
    """On the meta device; distributed over ``mesh["tp"]`` before, if that has several ranks."""
    model, given = on_meta(lambda: Kinds(rows)), None
    hosts, ranks_of_a_host, tp = mesh.shape
    kinds = [Decision.SHARD_REGATHER]
    if hosts > 1:
        given = mesh["host", "gpu"]
        kinds += [Decision.SHARD_HOST_REGATHER, Decision.SHARD_HOST_KEEP]
    elif tp > 1:
        given = mesh["gpu"]
    if tp > 1:
        distribute(model, mesh["tp"])
    plan = mixed_plan(model, kinds, bucket_bytes=1 << 10, world_size=hosts * ranks_of_a_host)
    return osdp_compile.shard(model, plan.replace(ranks_of_a_host=ranks_of_a_host), mesh=given)


def write_both(rank, world_size, hosts=1, tp=1):
    """The writes that leave a sharded model, or the generator, other than a plain one."""
    differ, writes, rows = [], dict(WRITES), 7
    shape = hosts, world_size // hosts // tp, tp
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("host", "gpu", "tp"))
    if tp > 1:
        rows = 6  # which two ranks of ``tp`` divide, and two others do not divide again
    if hosts == 1 and tp > 1:  # the ranks' parts of such a view are no adjacent rows
        writes["flat"] = no_grad(lambda model: model.weight.view(-1).normal_())
    for name, write in writes.items():
        sharded, plain = sharded_kinds(mesh, rows), Kinds(rows)
        sharded.to_empty(device="cpu")
        next_numbers = []
        for model in (sharded, plain):
            for parameter in model.parameters():
                nn.init.ones_(parameter)
            torch.manual_seed(3)
            write(model)
            next_numbers.append(torch.rand(3))
        after = [whole(p) for p in sharded.parameters()]
        alike = [torch.equal(*pair) for pair in zip(after, plain.parameters(), strict=True)]
        changed = any((p != 1).any() for p in plain.parameters())
        if not (all(alike) and changed and torch.equal(*next_numbers)):
            differ.append((name, alike, changed))
    refused = []
    for write in (
        lambda p: p[1:3].fill_(1.0),
        lambda p: [one.normal_() for one in p.chunk(3)],
        lambda p: p.t()[:, 1:3].fill_(1.0),
    ):
        try:
            no_grad(write)(sharded.square)
        except OsdpError as error:
            refused.append("would be lost" in str(error))
    return differ, refused


def test_what_initialises_a_whole_model_initialises_a_sharded_one(two_ranks):
    for differ, refused in two_ranks.run(write_both):
        assert not differ
        assert refused == [True] * 3


def test_what_initialises_a_whole_model_initialises_one_that_is_sharded_within_hosts(four_ranks):
    for differ, refused in four_ranks.run(write_both, hosts=2):
        assert not differ
        assert refused == [True] * 3


def test_what_initialises_a_whole_model_initialises_one_that_was_distributed_before(four_ranks):
    for differ, refused in four_ranks.run(write_both, tp=2):
        assert not differ
        assert refused == [True] * 3


def evaluate_then_train(rank, world_size):
    """A model with values, other ones on each rank; evaluated first; an early optimizer."""
    torch.manual_seed(rank)
    model = Tied()
    optimizer = adamw(model.parameters())
    torch.manual_seed(0)
    alone = Tied()
    plan = mixed_plan(model, list(FLAT_DECISIONS), bucket_bytes=1 << 10, world_size=world_size)
    osdp_compile.shard(model, plan)
    compiled = torch.compile(model, backend="osdp", options={"hardware": SLOW})
    tokens = words(0, 0, 0)

    def evaluated(one):
        one.eval()
        with torch.no_grad():
            logits = one(tokens)
        one.train()
        return logits

    first = torch.allclose(evaluated(compiled), evaluated(alone), atol=1e-6)
    provisional = osdp_compile.plan_of(model).prediction is None
    next_word(compiled, tokens).backward()  # the same batch on all ranks: a mean of equals
    next_word(alone, tokens).backward()
    optimizer.step()
    adamw(alone.parameters()).step()
    apart = max(
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )
    # Eager code computes with whole tensors after the first call, as after one that plans.
    x = torch.ones(2, 8)
    eager = torch.allclose(model.inner(x), alone.inner(x), atol=1e-5)
    return first, provisional, apart, eager


def test_a_model_with_values_gets_rank_zeros_and_may_be_evaluated_first(two_ranks):
    for first, provisional, apart, eager in two_ranks.run(evaluate_then_train):
        assert first and provisional and eager
        assert apart < 1e-5


SMALL = GPTConfig(vocab=61, layers=1, width=32, heads=2, context=12)


def gpt() -> GPT:
    return GPT(SMALL)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(26).reshape(2, 13) % SMALL.vocab
    return rows[:, :-1], rows[:, 1:]


def after_first_call(model, **options) -> Plan:
    """The plan in force after a first call whose graph runs as it is."""
    torch._dynamo.reset()
    with mock.patch("osdp_compile.engine.backend.lower", lambda gm, *rest: gm):
        torch.compile(model, backend="osdp", options={"hardware": SLOW, **options})(*tokens())
    found = osdp_compile.plan_of(model)
    assert found is not None
    return found


@pytest.mark.thorough
def test_nothing_is_planned_again_and_a_plan_by_hand_is_completed(short_search):
    offline = osdp_compile.plan(on_meta(gpt), tokens(), world_size=8, hardware=SLOW)
    with fake_world(8):
        model = on_meta(gpt)
        osdp_compile.shard(model, offline)
        model.to_empty(device="cpu")
        with mock.patch("osdp_compile.engine.first_call.captured_step", side_effect=AssertionError):
            assert after_first_call(model) is offline

        by_hand = mixed_plan(gpt(), list(FLAT_DECISIONS), bucket_bytes=1 << 12, world_size=8)
        completed = after_first_call(gpt(), plan=by_hand)
        sharded = osdp_compile.shard(gpt(), by_hand)
        assert completed.order and completed.prediction is not None
        assert after_first_call(sharded) == completed
    torch._dynamo.reset()


class Recurrent(nn.Module):
    """Dynamo does not trace an nn.LSTM, nor the frame that calls it: what that calls, it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.rnn(self.first(x))[0].square().mean()


def test_a_model_that_dynamo_cannot_trace_as_a_whole():
    torch._dynamo.reset()
    with fake_world(8):
        model = on_meta(Recurrent)
        plan = mixed_plan(model, list(FLAT_DECISIONS), bucket_bytes=1 << 12, world_size=8)
        osdp_compile.shard(model, plan)
        model.to_empty(device="cpu")
        for part in (model.first, model.rnn):
            part.reset_parameters()
        compiled = torch.compile(model, backend="osdp", options={"hardware": SLOW})
        with mock.patch("osdp_compile.engine.backend.lower", lambda gm, *rest: gm):
            compiled(torch.randn(2, 5, 8)).backward()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    torch._dynamo.reset()


def first_error(model, **options) -> Exception:
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="osdp", options={"hardware": SLOW, **options})(*tokens())
    except Exception as error:
        return error
    raise AssertionError("nothing was refused")


def test_what_cannot_be_is_refused_and_named(tmp_path):
    meta = on_meta(gpt)
    plan = Plan.uniform(meta.named_parameters(), "shard_regather", world_size=8)
    plan.save(tmp_path / "plan.json")
    with fake_world(8):
        with pytest.raises(PlanMismatch, match="the plan is for 4 ranks, this run has 8"):
            osdp_compile.shard(meta, plan.replace(world_size=4))
        with pytest.raises(PlanMismatch, match=r"'token\.weight' has shape"):
            osdp_compile.shard(GPT(GPTConfig(vocab=99, layers=1, width=32, heads=2)), plan)
        with pytest.raises(ValueError, match="option 'plan'"):
            osdp_compile.shard(meta, 3)
        within = Plan.uniform(
            meta.named_parameters(), "shard_host_regather", world_size=8, ranks_of_a_host=4
        )
        with pytest.raises(PlanMismatch, match="hosts of 4 ranks, this run has no two-dim"):
            osdp_compile.shard(meta, within)
        hooked = gpt()
        hooked.head.weight.register_hook(lambda grad: grad)
        with pytest.raises(OsdpError, match=r"'head\.weight' has a gradient hook"):
            osdp_compile.shard(hooked, plan)
        with pytest.raises(OsdpError, match="'weight' is lazy"):
            osdp_compile.shard(nn.LazyLinear(4), plan)
        assert set(placements(meta).values()) == {"plain"}

        osdp_compile.shard(meta, tmp_path / "plan.json")
        with pytest.raises(OsdpError, match="sharded already"):
            osdp_compile.shard(meta, plan)
        error = first_error(meta)
        assert isinstance(error, OsdpError)
        assert "'token.weight' is still on the meta device: call model.to_empty" in str(error)

        meta.to_empty(device="cpu")
        error = first_error(meta, plan=plan.replace(bucket_bytes=7))
        assert isinstance(error, OsdpError) and "leave the option out" in str(error)
        error = first_error(meta, slices=1)
        assert isinstance(error, OsdpError) and "leave out options={'slices'}" in str(error)
        error = first_error(meta, search="thorough")
        assert isinstance(error, OsdpError) and "leave out options={'search'}" in str(error)
        meta.load_state_dict(gpt().state_dict(), assign=True)
        error = first_error(meta)
        assert isinstance(error, OsdpError)
        assert "was replaced by a plain tensor" in str(error)
    torch._dynamo.reset()


def test_without_a_process_group_nothing_is_sharded():
    model = gpt()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=8)
    assert osdp_compile.shard(model, plan) is model
    assert set(placements(model).values()) == {"plain"} and osdp_compile.plan_of(model) is None


def meta_on_one_rank(rank, world_size):
    model = Tied() if rank == 0 else on_meta()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    return refused(model, plan)


def test_a_model_that_is_on_the_meta_device_on_one_rank_is_refused_on_all(two_ranks):
    for text, unchanged in two_ranks.run(meta_on_one_rank):
        assert "token.weight" in text and "device=cpu" in text and "device=meta" in text
        assert unchanged

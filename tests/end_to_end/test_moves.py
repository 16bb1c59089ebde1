"""Activations that move to weights that stay, trained: like one process that has all batches."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import osdp_compile
from osdp_compile import OsdpError, Plan
from passes.types.plan import Collective
from tests.training import (
    SLOW,
    Recipe,
    Reference,
    adamw,
    finish_step,
    plan_in_force,
    train_osdp,
    whole,
)

MLP = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
GATED = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}


class Mlp(nn.Module):
    """A linear, then two with an activation between them; x: [batch, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.up = nn.Linear(12, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.tanh(self.first(x)))))


class Gated(nn.Module):
    """Normalized input, a gated MLP with a residual, and a head; x: [batch, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 48, bias=False)
        self.gate = nn.Linear(8, 48, bias=False)
        self.down = nn.Linear(48, 8, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (2, -1))
        y = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


def plan_for(model: nn.Module, world_size: int, rest: str = "shard_regather") -> Plan:
    dims = GATED if isinstance(model, Gated) else MLP
    return Plan.uniform(model.named_parameters(), rest, world_size=world_size).tensor_parallel(dims)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64)


def mean_square(model: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = model(given).square().mean()
    return loss


def recipe_of(batch, **changes) -> Recipe:
    return Recipe(
        step=mean_square, optimizer=adamw, steps=10, batch=batch, max_norm=0.05, **changes
    )


def _train(rank, world_size, make, rest, recipe):
    """Distance from one process's parameters; placements; the plan; whole weights gathered."""
    torch.manual_seed(0)
    model = make().double()
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "plan": plan_for(model, world_size, rest), "debug": True}
    with mock.patch("osdp_compile.engine.agreeing.log.warning") as warned:
        trained = train_osdp(model, options, recipe, rank)
    wanted = reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item()
        for name, one in trained.parameters.items()
    )
    norms = [a / b - 1 for a, b in zip(trained.norms, wanted.norms, strict=True)]
    placed = {name: str(p.placements[0]) for name, p in model.named_parameters()}
    differ = sum("batches differ" in call.args[0] for call in warned.call_args_list)
    return apart, max(map(abs, norms)), placed, plan_in_force(model), differ


@pytest.mark.parametrize("rest", ["replicate", "shard_regather"])
def test_an_mlp_that_stays_trains_like_one_process(two_ranks, rest):
    for apart, norm, placed, plan, warnings in two_ranks.run(_train, Mlp, rest, recipe_of(batch)):
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert placed["up.weight"] == placed["up.bias"] == "S(0)"
        assert placed["down.weight"] == "S(1)"
        purposes = [one for order in plan.order.values() for one in order]
        assert sum(one.tokens for one in purposes) == 5
        assert not {n for one in purposes if not one.tokens for n in one.names} & set(MLP)


def test_a_gated_mlp_on_four_ranks_with_accumulated_gradients(four_ranks):
    found = four_ranks.run(_train, Gated, "replicate", recipe_of(batch, backwards=2))
    for apart, norm, placed, plan, warnings in found:
        assert apart < 1e-11 and norm < 1e-9 and not warnings
        assert placed["gate.weight"] == "S(0)" and placed["down.weight"] == "S(1)"
        assert Collective(("down.weight#0",), gathers=False, tokens=True) in plan.order["forward"]


def differing(step: int, micro: int, rank: int) -> Tensor:
    """From the third step on, some ranks have other batches than others."""
    rows = {2: 4 + rank, 4: 4 - rank, 5: 1 + rank, 7: 6}.get(step, 4)
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(rows, 8, generator=generator, dtype=torch.float64)


def test_ranks_with_other_batches_train_like_one_process(two_ranks):
    """Weights travel in steps whose batches differ: rank 0 has a second graph for them."""
    results = two_ranks.run(_train, Mlp, "shard_regather", recipe_of(differing))
    for apart, norm, *_ in results:
        assert apart < 1e-11 and norm < 1e-9
    assert results[0][-1] == 2  # its graphs of four rows and of one have a second form


def _a_rank_cannot_compile(rank, world_size):
    """The error of every rank, where the graph that gathers all weights fails on one."""
    torch.manual_seed(0)
    model = Mlp().double()
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    compiled = torch.compile(model, backend="osdp", options=options, dynamic=False)
    compiled(batch(0, 0, rank)).sum().backward()
    with (
        mock.patch("osdp_compile.engine.lower._lowered", side_effect=RuntimeError("no compiler"))
        if rank == 0
        else contextlib.nullcontext()
    ):
        compiled(batch(0, 0, rank)).sum().backward()  # equal batches need no other graph
        try:
            compiled(differing(2, 0, rank) if rank == 0 else batch(0, 0, 1)[:3])
        except OsdpError as error:
            return str(error)
    return "no error"


def test_the_error_of_a_rank_is_the_error_of_every_rank(two_ranks):
    first, second = two_ranks.run(_a_rank_cannot_compile)
    assert "the ranks' batches differ" in first and "no compiler" in first
    assert "rank 0: the ranks' batches differ" in second


def _deviations(rank, world_size, autocast):
    """Distances of osdp's and DDP's parameters from those of float64 training in one process."""
    torch.manual_seed(0)
    model = Gated()

    def step(called, given):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = called(given.float())
        return out.float().square().mean()

    recipe = Recipe(step=step, optimizer=adamw, steps=10, batch=batch)
    exact = dataclasses_replace(recipe, step=mean_square)
    reference = Reference(copy.deepcopy(model).double(), exact, world_size).train(rank)
    parallel = copy.deepcopy(model)
    wrapped, optimizer = DistributedDataParallel(parallel), adamw(parallel.parameters())
    for number in range(recipe.steps):
        step(wrapped, batch(number, 0, rank)).backward()
        finish_step(parallel, optimizer, None, recipe)
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    ours = train_osdp(model, options, recipe, rank).parameters

    def distance(parameters):
        return sum(
            (one.double() - reference.parameters[name]).square().sum().item()
            for name, one in parameters.items()
        )

    return distance(ours), distance({n: p.detach() for n, p in parallel.named_parameters()})


def dataclasses_replace(recipe: Recipe, **changes) -> Recipe:
    made = copy.copy(recipe)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize("autocast", [False, True])
def test_no_further_from_one_process_than_twice_ddp(two_ranks, autocast):
    for ours, theirs in two_ranks.run(_deviations, autocast):
        assert 0 < ours <= 4 * theirs  # squares


def _states(rank, world_size, folder):
    """Evaluation, whole parameters, and a checkpoint that plans without these weights go on with.

    Returns distances: of evaluation, of whole parameters, of training after loading.
    """
    torch.manual_seed(0)
    model = Mlp().double()
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    compiled, optimizer = (
        torch.compile(model, backend="osdp", options=options),
        adamw(model.parameters()),
    )

    def go_on(called, trained, its, steps):
        for step in steps:
            mean_square(called, batch(step, 0, rank)).backward()
            finish_step(trained, its, None, Recipe())

    go_on(compiled, model, optimizer, range(3))
    alone = Mlp().double()
    with osdp_compile.full_parameters(model):
        alone.load_state_dict(copy.deepcopy(model.state_dict()))
    with torch.no_grad():
        given = batch(7, 0, rank)
        evaluated = (compiled.eval()(given) - alone(given)).abs().max().item()
        eager = (model(given) - alone(given)).abs().max().item()
    compiled.train()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
    go_on(compiled, model, optimizer, range(3, 6))
    wanted = {name: whole(p) for name, p in model.named_parameters()}
    distances = [evaluated, eager]
    for kind in ("moved", "shard_keep", "alone"):
        torch.manual_seed(5)
        other = Mlp().double()
        plan = plan_for(other, world_size)
        if kind != "moved":
            plan = Plan.uniform(other.named_parameters(), "shard_keep", world_size=world_size)
        called = torch.compile(other, backend="osdp", options={"hardware": SLOW, "plan": plan})
        its = adamw(other.parameters())
        if kind == "alone":
            osdp_compile.shard(other, plan_for(other, world_size))
            called = torch.compile(other, backend="osdp", options={"hardware": SLOW})
        go_on(called, other, its, range(1))
        of_model, of_optimizer = get_state_dict(other, its)
        state = {"model": of_model, "optim": of_optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"])
        go_on(called, other, its, range(3, 6))
        distances += [
            (whole(p) - wanted[name]).abs().max().item() for name, p in other.named_parameters()
        ]
    return distances


def test_evaluation_whole_parameters_and_checkpoints(two_ranks, tmp_path):
    for distances in two_ranks.run(_states, str(tmp_path)):
        assert max(distances) < 1e-11


def _meta(rank, world_size):
    """Distance from one process of a model that is sharded on the meta device."""
    recipe = Recipe(step=mean_square, optimizer=adamw, steps=3, batch=batch)
    with torch.device("meta"):
        model = Mlp().double()
    osdp_compile.shard(model, plan_for(model, world_size))
    model.to_empty(device="cpu")
    alone = Mlp().double()
    for one in (model, alone):
        torch.manual_seed(7)
        for layer in one.children():
            layer.reset_parameters()
    reference = Reference(alone, recipe, world_size).train(rank)
    trained = train_osdp(model, {"hardware": SLOW}, recipe, rank)
    return max(
        (one - reference.parameters[name]).abs().max().item()
        for name, one in trained.parameters.items()
    )


def test_from_the_meta_device(two_ranks):
    for distance in two_ranks.run(_meta):
        assert distance < 1e-11


def _in_bfloat16(rank, world_size):
    """Distances from float64 training of training in param_dtype: activations, weights moving."""
    found = []
    for moves in (True, False):
        torch.manual_seed(0)
        model = Gated()
        recipe = Recipe(step=mean_square, optimizer=adamw, steps=5, batch=_float_batch)
        exact = dataclasses_replace(recipe, batch=batch)
        reference = Reference(copy.deepcopy(model).double(), exact, world_size).train(rank)
        plan = plan_for(model, world_size)
        if not moves:
            plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
        options = {"hardware": SLOW, "plan": plan, "param_dtype": "bfloat16"}
        options["reduce_dtype"] = "float32"
        ours = train_osdp(model, options, recipe, rank).parameters
        found.append(
            sum(
                (one.double() - reference.parameters[name]).square().sum().item()
                for name, one in ours.items()
            )
        )
    return found


def _float_batch(step, micro, rank):
    return batch(step, micro, rank).float()


def test_param_dtype(two_ranks):
    for moving, without in two_ranks.run(_in_bfloat16):
        assert 0 < moving <= 4 * without  # squares


def _no_sync(rank, world_size):
    torch.manual_seed(0)
    model = Mlp().double()
    alone = copy.deepcopy(model)
    options = {"hardware": SLOW, "plan": plan_for(model, world_size)}
    compiled = torch.compile(model, backend="osdp", options=options)
    for step in range(2):
        with osdp_compile.no_sync(compiled):
            mean_square(compiled, batch(step, 0, rank)).backward()
        mean_square(compiled, batch(step, 1, rank)).backward()
    for step in range(2):
        for micro in range(2):
            for other in range(world_size):
                (mean_square(alone, batch(step, micro, other)) / world_size).backward()
    return max(
        (whole(p.grad) - other.grad).abs().max().item()
        for p, other in zip(model.parameters(), alone.parameters(), strict=True)
    )


def test_no_sync(two_ranks):
    for distance in two_ranks.run(_no_sync):
        assert distance < 1e-11


KINDS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
    "NAdam": {"lr": 1e-3},
}


def _optimizers(rank, world_size):
    """By optimizer, the distance from one process."""
    found = {}
    for kind, options in KINDS.items():

        def make(parameters, kind=kind, options=options):
            chosen = [p for p in parameters if kind != "Muon" or p.dim() == 2]
            return getattr(torch.optim, kind)(chosen, **options)

        torch.manual_seed(0)
        model = Mlp().double()
        recipe = Recipe(step=mean_square, optimizer=make, steps=3, batch=batch)
        reference = Reference(copy.deepcopy(model), recipe, world_size)
        given = {"hardware": SLOW, "plan": plan_for(model, world_size)}
        ours, wanted = train_osdp(model, given, recipe, rank), reference.train(rank)
        found[kind] = max(
            (one - wanted.parameters[name]).abs().max().item()
            for name, one in ours.parameters.items()
        )
    return found


@pytest.mark.thorough
def test_optimizers(two_ranks):
    for found in two_ranks.run(_optimizers):
        # Muon computes in bfloat16.
        assert {kind for kind, far in found.items() if far > 1e-9} <= {"Muon"}, found
        assert found["Muon"] < 1e-2


def _planned(rank, world_size, rows):
    """What the planner lets stay with the option, and the distance from one process."""
    torch.manual_seed(0)
    model = Gated().double()

    def some(step, micro, rank):
        return batch(step, micro, rank).repeat(rows // 4, 1)

    recipe = Recipe(step=mean_square, optimizer=adamw, steps=3, batch=some)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item() for name, one in ours.parameters.items()
    )
    return plan_in_force(model).moved, apart


@pytest.mark.parametrize("rows, moved", [(4, set(GATED)), (1024, set())])
def test_the_planner_moves_the_smaller_thing(two_ranks, rows, moved):
    for found, apart in two_ranks.run(_planned, rows):
        assert found == moved
        assert apart < 1e-11


class Words(nn.Module):
    """An embedding and a linear; tokens: [rows, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.words(tokens)))


class Bags(nn.Module):
    """Means of bags of words, and a linear; tokens: [rows, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(64, 8, mode="mean")
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mix(torch.tanh(self.words(tokens)))


def _words(rank, world_size, make):
    """Distance from one process; the placement of the table."""
    torch.manual_seed(0)
    model = make().double()

    def tokens(step, micro, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = 3 + (rank if step == 4 else 0)
        return torch.randint(0, 64, (rows, 5), generator=generator)

    recipe = Recipe(step=mean_square, optimizer=adamw, steps=8, batch=tokens, max_norm=0.05)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": ["words.*"], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item() for name, one in ours.parameters.items()
    )
    return apart, plan_in_force(model).moved, str(model.words.weight.placements)


@pytest.mark.parametrize("make", [Words, Bags])
def test_the_table_of_an_embedding_stays(two_ranks, make):
    """In one step the ranks have other batches: the table travels."""
    for apart, moved, placed in two_ranks.run(_words, make):
        assert apart < 1e-11
        assert moved == {"words.weight"} and placed == "(Shard(dim=0),)"


class Language(nn.Module):
    """An embedding, a norm, a head by vocabulary, and the loss; ids: [rows, length]."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64, bias=not tied)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(self.words(ids)))
        # Each rank ignores another number of tokens.
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=3)


def its_loss(model: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = model(given)
    return loss


def _ids(step, micro, rank):
    """In step 4 the ranks have other batches."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 64, (3 + (rank if step == 4 else 0), 5), generator=generator)


def _language(rank, world_size, tied, named):
    """Distances from one process: parameters, losses, norms; the weights that stay; placements."""
    torch.manual_seed(0)
    model = Language(tied).double()
    recipe = Recipe(
        step=its_loss, optimizer=adamw, steps=10, batch=_ids, backwards=2, max_norm=0.05
    )
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": [named], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item() for name, one in ours.parameters.items()
    )
    losses = max(abs(a - b) for a, b in zip(ours.losses, wanted.losses, strict=True))
    norms = max(abs(a / b - 1) for a, b in zip(ours.norms, wanted.norms, strict=True))
    placed = {str(p.placements) for p in model.parameters() if p.dim() == 2 and p.shape[0] == 64}
    return apart, losses, norms, plan_in_force(model).moved, placed


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_its_loss_trains_like_one_process(request, ranks, tied):
    named = "words.weight" if tied else "head.weight"
    for apart, losses, norms, moved, placed in request.getfixturevalue(ranks).run(
        _language, tied, named
    ):
        assert apart < 1e-11 and losses < 1e-11 and norms < 1e-9
        assert moved == ({"words.weight"} if tied else {"head.weight", "head.bias"})
        assert "(Shard(dim=0),)" in placed


class Attention(nn.Module):
    """A norm, and attention of 4 heads, keys and values for ``keys`` of them; x: [rows, 5, 8].

    ``masks``: tokens that are not seen, beside those to come.
    """

    def __init__(self, keys: int, bias: bool, masks: bool) -> None:
        super().__init__()
        self.masks = masks
        self.norm = nn.LayerNorm(8)
        self.q = nn.Linear(8, 24, bias=bias)
        self.k, self.v = (nn.Linear(8, 6 * keys, bias=bias) for _ in range(2))
        self.o = nn.Linear(24, 8, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            one(y).unflatten(-1, (-1, 6)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mask = None
        if self.masks:
            seen = (x[:, None, None, :, 0] > 0) | (torch.arange(5) == 0)
            mask = seen & torch.ones(5, 5, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return x + self.o(y.transpose(1, 2).flatten(2))


def _sequences(step, micro, rank):
    """In step 4 the ranks have other batches."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    rows = 3 + (rank if step == 4 else 0)
    return torch.randn(rows, 5, 8, generator=generator, dtype=torch.float64)


def _attention(rank, world_size, keys, bias):
    """Distance from one process; the weights that stay; the placement of the last product's."""
    torch.manual_seed(0)
    model = Attention(keys, bias, masks=bias).double()
    recipe = recipe_of(_sequences, backwards=2)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": ["q.weight"], "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item() for name, one in ours.parameters.items()
    )
    norms = max(abs(a / b - 1) for a, b in zip(ours.norms, wanted.norms, strict=True))
    return apart, norms, plan_in_force(model).moved, str(model.o.weight.placements)


@pytest.mark.parametrize("ranks, keys, bias", [("two_ranks", 2, True), ("four_ranks", 4, False)])
def test_attention_by_heads_trains_like_one_process(request, ranks, keys, bias):
    found = request.getfixturevalue(ranks).run(_attention, keys, bias)
    for apart, norm, moved, placed in found:
        assert apart < 1e-11 and norm < 1e-9
        weights = {f"{name}.weight" for name in "qkvo"}
        assert moved == (weights | {f"{name}.bias" for name in "qkv"} if bias else weights)
        assert placed == "(Shard(dim=1),)"


class WithLoss(nn.Module):
    """A small model of Hugging Face, which returns its loss alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            use_cache=False,
            tie_word_embeddings=kind == "Qwen3",
        )
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def _of_hugging_face(rank, world_size, kind):
    """Distance from one process in float32; the modules whose weights move."""
    torch.manual_seed(0)
    model = WithLoss(kind)

    def ids(step, micro, number):
        generator = torch.Generator().manual_seed(100 * step + number)
        return torch.randint(0, 64, (2, 12), generator=generator)

    recipe = Recipe(step=its_loss, optimizer=adamw, steps=5, batch=ids, max_norm=1.0)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    named = ["*embed_tokens*", "*q_proj*", "*up_proj*"] + ["*lm_head*"] * (kind == "Llama")
    options = {"hardware": SLOW, "tensor_parallel": named, "debug": True}
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item() for name, one in ours.parameters.items()
    )
    moved = plan_in_force(model).moved
    return apart, {p.rsplit(".", 2)[-2] for p in wanted.parameters if p not in moved}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_model_of_hugging_face_moves_in_all_its_groups(two_ranks, kind):
    pytest.importorskip("transformers")
    for apart, rest in two_ranks.run(_of_hugging_face, kind):
        assert apart < 1e-5
        assert rest - {"q_norm", "k_norm"} == {
            "input_layernorm",
            "post_attention_layernorm",
            "norm",
        }


def _dynamic(rank, world_size, make, differ):
    """Distance from one process; the number of compiled graphs that move activations; warnings."""
    torch.manual_seed(0)
    model = make().double()

    def some(step, micro, number):
        generator = torch.Generator().manual_seed(1000 * step + number)
        rows = 4 + 2 * step + (2 * number if differ and step >= 3 else 0)
        if make in (Words, Language):
            return torch.randint(0, 64, (rows, 5), generator=generator)
        return torch.randn(rows, 8, generator=generator, dtype=torch.float64)

    recipe = Recipe(step=mean_square, optimizer=adamw, steps=6, batch=some)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    by_words = make in (Words, Language)
    dims = {"words.weight": 0} if by_words else GATED if make is Gated else MLP
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    options = {"hardware": SLOW, "plan": plan.tensor_parallel(dims), "debug": True}
    with mock.patch("osdp_compile.engine.lower.log.warning") as warned:
        ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    apart = max(
        (one - wanted.parameters[name]).abs().max().item() for name, one in ours.parameters.items()
    )
    said = [call.args[0] for call in warned.call_args_list]
    return (
        apart,
        sum("travel in this graph" in one for one in said),
        sum("batches differ" in one for one in said),
    )


@pytest.mark.parametrize("make", [Mlp, Gated, Words, Language])
def test_one_graph_for_all_sizes_moves_activations(two_ranks, make):
    for apart, travel, differ in two_ranks.run(_dynamic, make, False):
        assert apart < 1e-11
        assert not travel and not differ


def test_one_graph_for_all_sizes_on_ranks_that_differ(two_ranks):
    for apart, travel, differ in two_ranks.run(_dynamic, Mlp, True):
        assert apart < 1e-11
        assert not travel and differ


class Checkpointed(Gated):
    """The same in a region of torch.utils.checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_activation_checkpointing(two_ranks):
    for apart, norm, *_ in two_ranks.run(_train, Checkpointed, "shard_keep", recipe_of(batch)):
        assert apart < 1e-11 and norm < 1e-9


def distance_of(rank, world_size, make):
    """Distance from one process of a model whose sizes change: one graph, then another."""
    return _dynamic(rank, world_size, make, False)[0]

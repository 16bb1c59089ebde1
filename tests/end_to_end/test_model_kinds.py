"""Models as they come: buffers, dropout, modes, uneven batches, graph breaks, ranks that differ."""

from __future__ import annotations

import copy
from itertools import product
from unittest import mock

import pytest
import torch
from torch import nn

from osdp_compile.runtime import eager_markers
from tests.chosen import more, others
from tests.training import (
    Recipe,
    mean_over_ranks,
    normal_batch,
    placements,
    plan_options,
    sgd,
    trains_like_reference,
    whole,
)


def two_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def with_batch_norm():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["shard_regather", *more("shard_keep", 0.5)])
def test_batch_norm_keeps_each_ranks_own_statistics(two_ranks, plan):
    # The reference has buffers for each rank, as DDP(broadcast_buffers=False).
    outcome = trains_like_reference(two_ranks, with_batch_norm, plan)
    assert outcome.osdp.buffers["1.num_batches_tracked"] == 3
    assert "shard" in outcome.placements.values()


def with_dropout(p):
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(p), nn.Linear(16, 4))


def without_dropped():
    return with_dropout(0.0)


def test_dropout_of_nothing_changes_nothing(two_ranks):
    trains_like_reference(two_ranks, without_dropped, "shard_regather")


def dropped_half():
    return with_dropout(0.5)


def eager_numbers(model, batch):
    """The default step with random numbers as eager mode draws them, seeded by the batch."""
    torch.manual_seed(int(batch.abs().sum() * 1000))
    with torch._inductor.config.patch(fallback_random=True):
        return model(batch).square().mean()


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["shard_regather", *more("shard_keep")])
def test_dropout_is_the_same_in_forward_and_backward(two_ranks, plan):
    trains_like_reference(two_ranks, dropped_half, plan, Recipe(step=eager_numbers))


def drop_on_each_rank(rank, world_size):
    torch.manual_seed(rank)
    model = with_dropout(0.5)
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    same_for_all = torch.ones(64, 8)
    outputs = [compiled(same_for_all).detach() for _ in range(2)]
    loss = compiled(same_for_all).square().mean()
    loss.backward()
    return outputs, loss.item(), placements(model)


@pytest.mark.thorough
@pytest.mark.inductor
def test_ranks_and_calls_drop_different_numbers(two_ranks):
    (zero, loss, placed), (one, *_) = two_ranks.run(drop_on_each_rank)
    assert set(placed.values()) == {"shard"}
    assert torch.isfinite(torch.tensor(loss))
    assert not torch.equal(zero[0], zero[1]), "two calls drop the same"
    assert not torch.equal(zero[0], one[0]), "two ranks that were seeded apart drop the same"


def train_and_evaluate(rank, world_size, plan):
    """Evaluate, train, evaluate, train, evaluate; the differences to eager mode each time."""
    model = with_batch_norm()
    reference = copy.deepcopy(model)
    options = plan_options(model, plan, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer, reference_optimizer = sgd(model.parameters()), sgd(reference.parameters())
    batch = normal_batch(0, 0, 0)  # the same on all ranks, so that one process is a reference
    differences, placed = [], []

    def evaluate(mode):
        model.eval(), reference.eval()
        with mode():
            output = compiled(batch)
            differences.append((output - reference(batch)).abs().max().item())
        assert not output.requires_grad
        placed.append(placements(model))

    def train():
        for one, call, step in (
            (model, compiled, optimizer),
            (reference, reference, reference_optimizer),
        ):
            one.train()
            call(batch).square().mean().backward()
            step.step()
            step.zero_grad()

    evaluate(torch.no_grad)
    train()
    evaluate(torch.no_grad)
    train()
    evaluate(torch.inference_mode)
    model.eval()
    output = compiled(batch)  # evaluation with gradients, as for saliency
    differences.append((output - reference(batch)).abs().max().item())
    output.sum().backward()
    return differences, placed


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["shard_regather", *more("shard_keep", "replicate")])
def test_evaluation_before_between_and_after_training(two_ranks, plan):
    for differences, placed in two_ranks.run(train_and_evaluate, plan):
        assert max(differences) < 1e-5, differences
        assert set(placed[0].values()) == {"plain"}, "an evaluation is no reason to shard"
        wanted = "replicate" if plan == "replicate" else "shard"
        assert set(placed[1].values()) == set(placed[2].values()) == {wanted}


def smaller_last_batch(step, micro, rank):
    return normal_batch(step, micro, rank)[: 2 if step == 2 else 4]


def last_batch_smaller_on_one_rank(step, micro, rank):
    return normal_batch(step, micro, rank)[: 3 if step == 2 and rank == 1 else 4]


_SMALLER = [("shard_regather", smaller_last_batch), ("shard_keep", last_batch_smaller_on_one_rank)]
_BATCHES = (smaller_last_batch, last_batch_smaller_on_one_rank)
_SMALLER += others(product(("shard_keep", "shard_regather", 0.5), _BATCHES), _SMALLER)


@pytest.mark.thorough
@pytest.mark.parametrize(("plan", "batch"), _SMALLER)
def test_a_smaller_last_batch(two_ranks, plan, batch):
    recipe = Recipe(batch=batch, steps=4)
    outcome = trains_like_reference(two_ranks, two_layers, plan, recipe)
    assert "shard" in outcome.placements.values()


class Attention(nn.Module):
    """torch's own layers, which read their parameters past their submodules' forward."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.encoder(x.unsqueeze(0))
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.inductor
@pytest.mark.thorough
def test_attention_layers_of_torch(two_ranks):
    outcome = trains_like_reference(two_ranks, Attention, "shard_regather")
    assert set(outcome.placements.values()) == {"shard"}


class Recurrent(nn.Module):
    """A GRU, which keeps its parameters in a list besides."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        # Sequences of one: Dynamo unrolls every step, and every step is compiled.
        return self.head(self.gru(x.unsqueeze(1))[0])


def step_with_rnn(model, batch):
    # Dynamo runs every function that calls an nn.GRU in eager mode unless told otherwise.
    with torch._dynamo.config.patch(allow_rnn=True):
        return model(batch).square().mean()


@pytest.mark.thorough
def test_recurrent_layers_where_dynamo_is_told_to_trace_them(two_ranks):
    recipe = Recipe(step=step_with_rnn)
    outcome = trains_like_reference(two_ranks, Recurrent, "shard_regather", recipe)
    assert set(outcome.placements.values()) == {"shard"}


def step_in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch)
    return output.float().square().mean()


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["shard_keep", *more("shard_regather")])
def test_autocast(two_ranks, plan):
    # Compiled code keeps sums in float32 that eager mode rounds to bfloat16's 8 bits.
    outcome = trains_like_reference(
        two_ranks, two_layers, plan, Recipe(step=step_in_bfloat16), tolerance=5e-3
    )
    assert {p.dtype for p in outcome.osdp.parameters.values()} == {torch.float32}


class Broken(nn.Module):
    """A graph break between two layers; one weight is read before and after it."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.after = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.tanh(self.before(x))
        torch._dynamo.graph_break()
        return self.after(x) + self.before.bias[:4]


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["shard_keep", *more("replicate", 0.5, "shard_regather")])
def test_a_graph_break_in_the_middle(two_ranks, plan):
    outcome = trains_like_reference(two_ranks, Broken, plan)
    if plan in ("shard_keep", "shard_regather"):
        assert set(outcome.placements.values()) == {"shard"}


def broken_in_sequence():
    """Dynamo leaves out the outer forward, and compiles the same code for each inner one."""
    inner = [nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 4)) for n in (16, 12)]
    return nn.Sequential(Broken(), *inner)


@pytest.mark.thorough
def test_the_same_code_for_modules_of_different_shapes(two_ranks):
    trains_like_reference(two_ranks, broken_in_sequence, "shard_regather")


class NotTraced(nn.Module):
    """A layer that runs in eager mode between two that are compiled."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    @torch.compiler.disable
    def in_eager_mode(self, x):
        return torch.tanh(self.middle(x))

    def forward(self, x):
        return self.last(self.in_eager_mode(self.first(x)))


@pytest.mark.parametrize("plan", ["shard_regather", *more("replicate")])
def test_a_layer_that_runs_in_eager_mode(two_ranks, plan):
    outcome = trains_like_reference(two_ranks, NotTraced, plan)
    assert set(outcome.placements.values()) == {"shard" if plan == "shard_regather" else plan}


def unfreeze_in_the_middle(rank, world_size, plan):
    """Train the last layer, then both; the largest difference to eager mode."""
    model = two_layers()
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    options = plan_options(model, plan, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer, reference_optimizer = sgd(model.parameters()), sgd(reference.parameters())
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
            reference[0].requires_grad_(True)
        for call, used in ((compiled, optimizer), (reference, reference_optimizer)):
            call(normal_batch(step, 0, 0)).square().mean().backward()
            used.step()
            used.zero_grad()
    return max(
        (whole(p) - q).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


@pytest.mark.parametrize("plan", ["shard_regather", *more("replicate")])
def test_a_layer_unfrozen_in_the_middle_of_training(two_ranks, plan):
    assert max(two_ranks.run(unfreeze_in_the_middle, plan)) < 1e-6


def train_from_different_weights(rank, world_size, plan):
    torch.manual_seed(10 + rank)
    model = with_batch_norm()
    model[1].running_mean.fill_(rank)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = plan_options(model, plan, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    model.eval()  # so that batch norm does not move the buffers
    loss = compiled(normal_batch(0, 0, 0)).square().mean()
    loss.backward()
    after = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return first, after, loss.item(), mean_over_ranks(loss)


@pytest.mark.parametrize("plan", ["replicate", "shard_regather"])
def test_ranks_that_start_differently_all_get_rank_zeros_weights_and_buffers(two_ranks, plan):
    results = two_ranks.run(train_from_different_weights, plan)
    (wanted, *_), (others, *_) = results
    assert not torch.equal(wanted["0.weight"], others["0.weight"])
    for _, after, loss, mean_loss in results:
        assert list(after) == list(wanted)
        assert all(torch.equal(after[name], wanted[name]) for name in wanted)
        assert loss == pytest.approx(mean_loss)


def round_trip(rank, world_size):
    model = two_layers()
    names = list(model.state_dict())
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizer = sgd(model.parameters())
    batch = normal_batch(0, 0, rank)
    compiled(batch).square().mean().backward()
    optimizer.step()
    saved = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    plain = two_layers()
    plain.load_state_dict(saved)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = compiled(batch).detach()
    optimizer.zero_grad()
    compiled(batch).square().mean().backward()
    optimizer.step()
    moved = (compiled(batch).detach() - before).abs().max().item()
    model.load_state_dict(kept)
    back = (compiled(batch).detach() - before).abs().max().item()
    as_plain = (plain(batch).detach() - before).abs().max().item()
    compiled_names = [name.removeprefix("_orig_mod.") for name in compiled.state_dict()]
    return names, list(saved), compiled_names, moved, back, as_plain


def test_state_dict_keeps_its_names_and_loads_into_plain_and_sharded_models(two_ranks):
    for names, saved, compiled_names, moved, back, as_plain in two_ranks.run(round_trip):
        assert names == saved == compiled_names
        assert moved > 1e-3
        assert back == 0.0
        assert as_plain < 1e-6


def attributes_of_a_sharded_model(rank, world_size):
    model = two_layers()
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    compiled(normal_batch(0, 0, rank)).sum().backward()
    eager = model(normal_batch(0, 0, rank)).detach()
    with torch.no_grad():
        again = compiled(normal_batch(0, 0, rank))
    return {
        "is a Linear": isinstance(model[0], nn.Linear) and type(model[0]).__name__ == "Linear",
        "eager equals compiled": torch.allclose(eager, again, atol=1e-6),
        "repr": repr(model) == repr(two_layers()),
    }


def test_a_sharded_model_reads_like_a_plain_one_in_eager_mode(two_ranks):
    for results in two_ranks.run(attributes_of_a_sharded_model):
        assert all(results.values()), results


def eager_collectives(rank, world_size):
    """How many collectives ran outside compiled graphs: in a compiled step, in an eager forward."""
    model = two_layers()
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    compiled(normal_batch(0, 0, rank)).sum().backward()
    counts = []
    for call in (compiled, model):
        with mock.patch(
            "osdp_compile.runtime.eager_markers.group_of", wraps=eager_markers.group_of
        ) as group_of:
            call(normal_batch(1, 0, rank)).sum().backward()
        counts.append(group_of.call_count)
    return counts


def test_a_compiled_step_communicates_inside_its_graphs_only(two_ranks):
    gathers_and_reductions = 2 * len(list(two_layers().parameters()))
    assert two_ranks.run(eager_collectives) == [[0, gathers_and_reductions]] * 2


def penalised(rank, world_size):
    """A penalty of the weights, computed before the first call: the gradients of both parts."""
    torch.manual_seed(0)
    model = two_layers()
    reference = copy.deepcopy(model)
    options = plan_options(model, "shard_regather", Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (compiled(normal_batch(0, 0, rank)).square().mean() + penalty).backward()
    for one in range(world_size):
        loss = reference(normal_batch(0, 0, one)).square().mean()
        (loss / world_size).backward()
    sum(parameter.square().sum() for parameter in reference.parameters()).backward()
    return max(
        (whole(p.grad) - q.grad).abs().max().item()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_a_penalty_that_was_computed_before_the_first_call(two_ranks):
    assert max(two_ranks.run(penalised)) < 1e-5


class Cayley(nn.Module):
    """A rotation by a linear solve: its check that there is a solution gives no value."""

    def __init__(self) -> None:
        super().__init__()
        self.skew = nn.Parameter(torch.randn(8, 8) / 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        skew = self.skew - self.skew.t()
        one = torch.eye(8)
        return self.head(x @ torch.linalg.solve(one + skew, one - skew, left=False))


@pytest.mark.thorough
@pytest.mark.inductor
def test_operators_that_give_no_value(two_ranks):
    trains_like_reference(two_ranks, Cayley, "shard_regather")

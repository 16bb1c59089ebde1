"""Every kind of parameter trains as in one process, sharded where it can be."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from osdp_compile import Plan, PlanMismatch
from osdp_compile.trace import fake_world
from tests.chosen import more, others, thorough
from tests.training import SLOW, Recipe, adamw, sgd, trains_like_reference, whole


class Odd(nn.Module):
    """First dimensions of 7, 5 and 3 rows: on two ranks one rank has a row less, on four ranks
    the last of the second layer has none."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.second = nn.Linear(7, 5)
        self.third = nn.Linear(5, 3)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["shard_keep", *more("shard_regather")])
def test_a_first_dimension_the_world_does_not_divide(two_ranks, plan):
    outcome = trains_like_reference(two_ranks, Odd, plan, Recipe(optimizer=adamw))
    assert set(outcome.placements.values()) == {"shard"}


@pytest.mark.parametrize("plan", ["shard_keep", *thorough("shard_regather")])
def test_a_rank_that_gets_no_row_at_all(four_ranks, plan):
    outcome = trains_like_reference(four_ranks, Odd, plan, Recipe(optimizer=adamw))
    assert outcome.placements["second.weight"] == outcome.placements["second.bias"] == "shard"
    assert outcome.placements["third.weight"] == "shard"
    assert outcome.placements["third.bias"] == "replicate"  # three numbers for four ranks


class Tiny(nn.Module):
    """A scalar, one number, one row, nothing at all, and a layer that can be cut."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.randn(1, 8))
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.cat([x + self.row, self.nothing])
        return self.layer(x) * self.scale + self.shift


@pytest.mark.thorough
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("shard_regather", marks=pytest.mark.inductor),
        pytest.param(0.5, id="planned"),
    ],
)
def test_scalars_and_tiny_parameters_are_replicated(two_ranks, plan):
    outcome = trains_like_reference(two_ranks, Tiny, plan)
    small = ("scale", "shift", "row", "nothing")
    assert {outcome.placements[name] for name in small} == {"replicate"}
    assert outcome.placements["layer.weight"] == "shard"


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(9, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.token.weight

    def forward(self, words):
        return self.head(torch.tanh(self.middle(self.token(words))))


def words(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(9, (4,), generator=generator)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("shard_regather", marks=pytest.mark.inductor),
        *more(0.5, "shard_keep", "replicate"),
    ],
)
def test_tied_weights_are_one_parameter(two_ranks, plan):
    outcome = trains_like_reference(two_ranks, Tied, plan, Recipe(batch=words))
    assert list(outcome.placements) == ["token.weight", "middle.weight", "middle.bias"]
    assert outcome.state_names == [*outcome.placements, "head.weight"]
    if plan in ("shard_keep", "shard_regather"):
        assert set(outcome.placements.values()) == {"shard"}


class Frozen(nn.Module):
    """Two layers that are not trained, below and above one that is."""

    def __init__(self):
        super().__init__()
        self.below = nn.Linear(8, 8).requires_grad_(False)
        self.trained = nn.Linear(8, 8)
        self.above = nn.Linear(8, 4).requires_grad_(False)

    def forward(self, x):
        return self.above(torch.relu(self.trained(self.below(x))))


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["shard_regather", *more("shard_keep")])
def test_frozen_parameters_are_sharded_and_stay_as_they_are(two_ranks, plan):
    outcome = trains_like_reference(two_ranks, Frozen, plan, Recipe(optimizer=adamw))
    assert set(outcome.placements.values()) == {"shard"}
    torch.manual_seed(0)
    start = Frozen()
    for name in ("below.weight", "below.bias", "above.weight", "above.bias"):
        assert torch.equal(outcome.osdp.parameters[name], start.get_parameter(name).detach())


class Unused(nn.Module):
    """A layer that is never called, and a weight that is only read where no gradients are."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.target = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        with torch.no_grad():
            center = self.target * 2
        return self.used(x) - center


@pytest.mark.parametrize("plan", ["shard_regather", *more("shard_keep")])
def test_parameters_that_get_no_gradient_are_left_alone(two_ranks, plan):
    # AdamW's weight decay would move them if they had a gradient of zeros.
    outcome = trains_like_reference(two_ranks, Unused, plan, Recipe(optimizer=adamw))
    assert set(outcome.placements.values()) == {"shard"}
    torch.manual_seed(0)
    start = Unused()
    for name in ("never.weight", "never.bias", "target"):
        assert torch.equal(outcome.osdp.parameters[name], start.get_parameter(name).detach())


class TwoTypes(nn.Module):
    """A layer in bfloat16 between two in float32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 16).to(torch.bfloat16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.narrow(self.first(x).to(torch.bfloat16)).float())


@pytest.mark.inductor
@pytest.mark.parametrize("plan", ["shard_keep", *more("shard_regather")])
def test_parameters_of_several_types(two_ranks, plan):
    # bfloat16 has 8 bits: one rounding of a weight of 0.25 is 1e-3.
    outcome = trains_like_reference(two_ranks, TwoTypes, plan, tolerance=4e-3)
    assert set(outcome.placements.values()) == {"shard"}
    types = {name: p.dtype for name, p in outcome.osdp.parameters.items()}
    assert types["narrow.weight"] == torch.bfloat16 and types["last.weight"] == torch.float32


def double_model():
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def double_loss(model, batch):
    return model(batch.double()).square().mean()


@pytest.mark.thorough
@pytest.mark.inductor
def test_double_precision_is_kept(two_ranks):
    outcome = trains_like_reference(
        two_ranks, double_model, "shard_regather", Recipe(step=double_loss), tolerance=1e-13
    )
    assert set(outcome.placements.values()) == {"shard"}


class SeveralPlaces(nn.Module):
    """One weight read twice in the forward, once transposed, and held by two modules."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.gate = nn.Linear(8, 8)
        self.gate.weight = self.weight

    def forward(self, x):
        x = torch.tanh(F.linear(x, self.weight))
        x = F.linear(x, self.weight.t()) + self.weight.sum(0)
        return self.gate(x)


class CalledTwice(nn.Module):
    """One layer called twice in a forward, another in between."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.between = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.again(x))
        x = torch.tanh(self.between(x))
        return self.again(x)


_SEVERAL = [
    (SeveralPlaces, "shard_regather"),
    (CalledTwice, "shard_keep"),
    (CalledTwice, "replicate"),
]
_PLANS = ("replicate", "shard_keep", "shard_regather")
_SEVERAL += others(product((SeveralPlaces, CalledTwice), _PLANS), _SEVERAL)


@pytest.mark.parametrize(("make_model", "plan"), _SEVERAL)
def test_a_parameter_used_more_than_once_gets_the_sum_of_its_gradients(two_ranks, make_model, plan):
    outcome = trains_like_reference(two_ranks, make_model, plan)
    wanted = "replicate" if plan == "replicate" else "shard"
    assert set(outcome.placements.values()) == {wanted}


class Containers(nn.Module):
    """Parameters in a list, in a dictionary, and behind torch's parametrizations."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(8, 8) / 3)})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.normed(x) @ self.named["last"]


def test_parameters_in_containers_and_behind_parametrizations(two_ranks):
    outcome = trains_like_reference(two_ranks, Containers, "shard_regather")
    assert set(outcome.placements.values()) == {"shard"}
    assert "normed.parametrizations.weight.original1" in outcome.placements


class NotContiguous(nn.Module):
    """A weight that is laid out by columns, and one that is a view of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.columns = nn.Parameter(torch.randn(8, 6).t())
        self.slice = nn.Parameter(torch.randn(4, 12)[:, :6])

    def forward(self, x):
        return F.linear(F.linear(x, self.columns), self.slice)


@pytest.mark.inductor
def test_parameters_that_are_not_contiguous(two_ranks):
    outcome = trains_like_reference(two_ranks, NotContiguous, "shard_regather")
    assert set(outcome.placements.values()) == {"shard"}


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, tokens):
        return self.linear(self.token(tokens))


class Around(nn.Module):
    """A head that is tied to what is compiled by itself, and is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.inside.token.weight

    def forward(self, tokens, call=None):
        return self.head((self.inside if call is None else call)(tokens))


def tied_to_what_is_compiled(rank, world_size):
    """The largest difference after three steps."""
    torch.manual_seed(0)
    model = Around()
    reference = copy.deepcopy(model)
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    options = {"plan": plan, "hardware": SLOW}
    compiled = torch.compile(model.inside, backend="osdp", options=options)
    optimizers = [sgd(one.parameters()) for one in (model, reference)]
    for step in range(3):
        tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        for one, call in ((model, compiled), (reference, None)):
            F.cross_entropy(one(tokens, call).flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.head._parameters["weight"] is model.inside.token._parameters["weight"]
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((whole(one) - other).abs().max().item() for one, other in pairs)


def test_a_weight_that_is_tied_to_one_outside_of_what_is_compiled(two_ranks):
    assert max(two_ranks.run(tied_to_what_is_compiled)) <= 1e-6


def test_a_plan_for_a_part_is_refused_where_all_of_the_model_is_planned():
    model = Around()
    plan = Plan.uniform(model.inside.named_parameters(), "shard_regather", world_size=8)
    with fake_world(8):
        options = {"plan": plan, "hardware": SLOW}
        compiled = torch.compile(model.inside, backend="osdp", options=options)
        with pytest.raises(PlanMismatch, match=r"for all of Around, .* 'inside\.token\.weight'"):
            model(torch.zeros(4, 6, dtype=torch.int64), compiled)

"""Split families: what belongs together is found, in every kind of model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes.candidates.slice_groups import find_slice_groups, splits_by_hand
from passes.types.context import Context
from passes.types.plan import OF_INPUT, Split
from tests.passes.captures import capture_step
from tests.passes.split.test_split_operators import Experts, Gated, Guessing, Mlp, Words


class Columns(nn.Module):
    """An MLP whose weights are read untransposed, as GPT-2's of Hugging Face; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up = nn.Parameter(torch.randn(6, 24))
        self.down = nn.Parameter(torch.randn(24, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x) @ self.up) @ self.down


class Blocks(nn.Module):
    """Two gated MLPs; x: [batch, tokens, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Gated(), Gated())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


ROWS, WORDS = torch.randn(3, 6), torch.arange(10).reshape(2, 5)
TOKENS = torch.randn(2, 3, 6)


@pytest.mark.parametrize(
    ("model", "batch", "wanted"),
    [
        (Mlp(48, bias=True), ROWS, {"up.weight": (0, None), "down.weight": (1, "up.weight")}),
        (Columns(), ROWS, {"up": (1, "down"), "down": (0, None)}),
        (
            Gated(),
            TOKENS,
            {
                "up.weight": (0, None),
                "gate.weight": (0, None),
                "down.weight": (1, "up.weight"),
            },
        ),
        (Words(), WORDS, {"words.weight": (1, None), "mix.weight": (1, None)}),
        (Experts(), torch.randn(5, 3, 6), {"weight": (0, None)}),
    ],
)
def test_what_is_sliced_together_is_found(model, batch, wanted):
    captured, ctx = capture_step(model, batch, world_size=2)
    found = [
        {name: (along, like) for name, along, like in layer.along}
        for slice_group in find_slice_groups(captured, ctx)
        for layer in slice_group.layers
    ]
    assert wanted in found


def test_a_head_of_many_words_by_rows_of_its_input():
    captured, ctx = capture_step(Guessing(), WORDS, world_size=2)
    first, *_ = find_slice_groups(captured, ctx)
    assert first.of_input and first.layer_bytes == 10 * 64 * 4
    assert first.into(3) == (Split("head.weight", 3, OF_INPUT),)
    assert first.recompute  # of the logits
    # A head that makes less than it holds.
    captured, ctx = capture_step(Words(), WORDS[:1, :2], world_size=2)
    assert not any(slice_group.of_input for slice_group in find_slice_groups(captured, ctx))


def test_layers_that_are_alike_are_split_alike_and_each_by_itself():
    captured, ctx = capture_step(Blocks(), TOKENS, world_size=2)
    (slice_group,) = [
        one for one in find_slice_groups(captured, ctx) if "blocks.0.up.weight" in one.names
    ]
    assert len(slice_group.layers) == 2 and slice_group.layer_bytes == 3 * 6 * 16 * 4
    for number, layer in enumerate(slice_group.layers):
        assert {like for *_, like in layer.along} == {None, f"blocks.{number}.up.weight"}
        assert all(name.startswith(f"blocks.{number}.") for name, *_ in layer.along)


def by_hand(ctx: Context, kept: int = 0, **slices: int) -> Context:
    named = ((name.replace("__", "."), n, kept) for name, n in slices.items())
    return ctx.replace(slices=tuple(named))


def test_by_hand_one_layer_and_what_is_sliced_like_it():
    captured, ctx = capture_step(Blocks(), TOKENS, world_size=2)
    splits, again = splits_by_hand(captured, by_hand(ctx, blocks__1__gate__weight=3))
    assert {one.name.split(".", 2)[2]: one.along for one in splits} == {
        "up.weight": 0,
        "gate.weight": 0,
        "down.weight": 1,
    }
    assert {one.slices for one in splits} == {3} and not again
    assert all(one.name.startswith("blocks.1.") for one in splits)
    assert splits_by_hand(captured, by_hand(ctx, blocks__0__up__weight=1)) == ((), ())

    captured, ctx = capture_step(Guessing(), WORDS, world_size=2)
    splits, again = splits_by_hand(captured, by_hand(ctx, head__weight=2))
    assert splits == (Split("head.weight", 2, OF_INPUT),) and again


class Residual(nn.Module):
    """A linear, and an MLP beside which its result goes on; x: [batch, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 24)
        self.down = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(torch.tanh(x))
        return x + self.down(torch.relu(self.up(self.norm(x))))


def test_an_mlp_is_sliced_by_what_lies_between_its_linears_whatever_else_it_is_in():
    captured, ctx = capture_step(Residual(), ROWS, world_size=2)
    mlp = {"up.weight": 0, "down.weight": 1}
    found = [
        {name: along for name, along, _ in slice_group.layers[0].along}
        for slice_group in find_slice_groups(captured, ctx)
    ]
    assert mlp in found
    assert {"proj.weight": 0, "up.weight": 1, "down.weight": 0} in found
    assert {"down.weight": 0} not in found  # by itself
    for name in mlp:
        splits, _ = splits_by_hand(captured, by_hand(ctx, **{name.replace(".", "__"): 2}))
        assert {one.name: one.along for one in splits} == mlp


def test_what_cannot_be_is_refused_and_named():
    captured, ctx = capture_step(Mlp(48, bias=True), ROWS, world_size=2)
    with pytest.raises(ValueError, match=r"'up\.bias' cannot run in slices"):
        splits_by_hand(captured, by_hand(ctx, up__bias=2))
    with pytest.raises(ValueError, match=r"'down\.weight' and 'up\.weight' .* 3 and 2 slices"):
        splits_by_hand(captured, by_hand(ctx, up__weight=2, down__weight=3))

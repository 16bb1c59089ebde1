"""The operator keys of all layers, from those of a few."""

from __future__ import annotations

import pytest

from passes.capture.layer_keys import layer_keys

LAYERS, KEPT = 12, (1, 2, 3, 8, 9, 10)


def of_layer(number: int, following: int, counts: list[int]) -> list[str]:
    own = [
        f"m.blocks.{number}.up:mm:0",
        f"m.blocks.{number}:add:1",
        f"m.blocks.{following}.norm:mul:0",
    ]
    return own + [f":div:{count}" for count in counts]


def following(number: int) -> int:
    return 8 if number == 3 else number + 1


def whole(counts) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(of_layer(number, number + 1, counts(number))) for number in range(1, LAYERS - 1)
    )


def test_operators_that_are_counted_backwards():
    traced = [
        of_layer(number, following(number), [15 - 2 * place, 16 - 2 * place])
        for place, number in enumerate(KEPT, start=1)
    ]
    found = layer_keys(traced, "blocks.", LAYERS)
    assert found is not None
    assert found.operators == whole(lambda n: [15 + 8 - 2 * n, 16 + 8 - 2 * n])
    assert found.renamed(":div:3") == ":div:3"  # of the last layers, which come first
    assert found.renamed(":div:14") == ":div:22"
    assert found.renamed("norm:mul:0") == "norm:mul:0"


def test_operators_that_are_counted_forwards():
    traced = [
        of_layer(number, following(number), [place]) for place, number in enumerate(KEPT, start=1)
    ]
    found = layer_keys(traced, "blocks.", LAYERS)
    assert found is not None
    assert found.operators == whole(lambda n: [n])
    assert found.renamed(":div:3") == ":div:3"
    assert found.renamed(":div:7") == ":div:11"


@pytest.mark.parametrize("counts", [[1, 2, 4, 5, 6, 7], [1, 1, 1, 1, 1, 1], [2, 4, 6, 8, 10, 12]])
def test_operators_that_are_counted_otherwise_give_no_keys(counts):
    traced = [
        of_layer(number, following(number), [count])
        for number, count in zip(KEPT, counts, strict=True)
    ]
    assert layer_keys(traced, "blocks.", LAYERS) is None

"""The dynamic programme against HiGHS, an integer-programming solver."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from passes.candidates.choices import Choice
from passes.plan.dynamic_program import UNITS, best_options
from passes.types.decision import Decision

INSTANCES = 120
#: How far memory in units is from bytes, at most: 1 % of the limit.
DISCRETISATION = 0.01


def choices(draw: random.Random, parameters: int) -> list[list[Choice]]:
    """Parameters of widely different sizes on a network of random speed."""
    found = []
    ranks, byte_seconds = draw.choice([2, 8, 64]), 10 ** draw.uniform(-11, -8)
    for _ in range(parameters):
        full = round(10 ** draw.uniform(3, 8))
        state, part = 16 * full, 16 * full // ranks
        gather = full * byte_seconds * draw.uniform(0.5, 2)
        reduce = full * byte_seconds * draw.uniform(0.5, 2)
        update = 10 ** draw.uniform(-12, -10)
        options = [Choice(Decision.REPLICATE, state, 0.0, 2 * reduce, state * update)]
        if draw.random() < 0.5:  # on hosts of two ranks, within which all is ten times as fast
            half, within = state // 2, gather / 10
            options += [
                Choice(Decision.SHARD_HOST_KEEP, half + full, within, 2 * reduce, half * update),
                Choice(
                    Decision.SHARD_HOST_REGATHER, half, within, within + 2 * reduce, half * update
                ),
            ]
        if draw.random() < 0.9:  # the others are too small to shard
            sharded = part * update
            options += [
                Choice(Decision.SHARD_KEEP, part + full, gather, reduce, sharded),
                Choice(Decision.SHARD_REGATHER, part, gather, gather + reduce, sharded),
            ]
        found.append(options)
    return found


def cost(option: Choice, weights: tuple[float, float]) -> float:
    forward, backward = weights
    return (
        forward * option.forward_seconds
        + backward * option.backward_seconds
        + option.compute_seconds
    )


def by_highs(
    instance: list[list[Choice]], weights: tuple[float, float], limit: float
) -> float | None:
    """The least cost within a limit, to a relative gap of 1e-7; None if nothing fits."""
    flat = [option for options in instance for option in options]
    owner = np.repeat(np.arange(len(instance)), [len(options) for options in instance])
    one_each = csr_array(
        (np.ones(len(flat)), (owner, np.arange(len(flat)))), shape=(len(instance), len(flat))
    )
    memory = csr_array([[option.memory_bytes / limit for option in flat]])
    costs = np.array([cost(option, weights) for option in flat])
    scale = costs.max()
    solved = milp(
        costs / scale,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(memory, -np.inf, 1.0)],
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-7},
    )
    return None if solved.x is None else float(solved.fun) * scale


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_as_cheap_as_an_integer_program_within_the_memory_discretisation(seed):
    draw = random.Random(seed)
    instance = choices(draw, draw.randint(20, 60))
    weights = draw.choice([(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 1.0)])
    least = sum(min(option.memory_bytes for option in options) for options in instance)
    most = sum(max(option.memory_bytes for option in options) for options in instance)
    limit = round(least * 1.03 + draw.random() * (most - least))
    picks = best_options(*tables(instance, weights), limit)
    assert picks is not None
    chosen = [options[pick] for options, pick in zip(instance, picks, strict=True)]
    memory = sum(option.memory_bytes for option in chosen)
    found = sum(cost(option, weights) for option in chosen)
    assert memory <= limit
    within = by_highs(instance, weights, limit * (1 - DISCRETISATION))
    at_most = by_highs(instance, weights, limit)
    assert at_most is not None and found >= at_most * (1 - 1e-5)
    assert within is None or found <= within * (1 + 1e-5)


def tables(
    instance: list[list[Choice]], weights: tuple[float, float]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    values = [np.array([cost(option, weights) for option in options]) for options in instance]
    sizes = [np.array([option.memory_bytes for option in options]) for options in instance]
    return values, sizes


def test_a_budget_that_nothing_fits_in_has_no_decisions():
    instance = choices(random.Random(0), 10)
    least = sum(min(option.memory_bytes for option in options) for options in instance)
    given = tables(instance, (1.0, 1.0))
    assert best_options(*given, least) is not None
    assert best_options(*given, least - 1) is None
    assert best_options(*given, -1) is None


def test_weights_are_fractions_of_bytes():
    """Weights are means over places."""
    values = [np.array([0.0, 3.0]), np.array([2.0, 1.0])]
    weights = [np.array([86.0, 2 / 3]), np.array([4 / 3, 9.0])]
    assert best_options(values, weights, 2) == [1, 0]
    assert best_options(values, weights, 1) is None


def test_without_a_budget_each_item_has_its_best_option():
    values = [np.array([3.0, 1.0, 2.0]), np.array([1.0, 5.0])]
    assert best_options(values, [np.array([1, 9, 1]), np.array([7, 1])], None) == [1, 0]


def test_units_are_finer_than_a_percent():
    assert 1 / UNITS < DISCRETISATION

"""Random steps, networks, ranks and limits, small enough to look at every plan there is.

Three kinds take turns, by the seed, and from 300 on there is a fourth:

* ``flat``: a mesh of one dimension; three to six parameters, or up to eight where some have too
  few numbers to be cut;
* ``hosts``: a mesh of hosts and the ranks of each, with rates along both; two to four parameters;
* ``recompute``: two to four parameters and more activations than those take; the limit is below
  what fits without recomputing, where recomputing helps. A part of them on a two-dimensional mesh;
* ``slices``: one layer far wider than the others, whose operators may run in slices, some kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.annotate.training_state import state_bytes
from passes.candidates.recompute_sets import recompute_sets
from passes.candidates.slice_groups import find_slice_groups
from passes.plan.neighbours import SLICES
from passes.pricing.evaluator import RECOMPUTE_SETS
from passes.pricing.predict import predict
from passes.types.context import Context
from passes.types.decision import DECISIONS, Decision
from passes.types.hardware import Hardware, LinkRate
from passes.types.plan import ParameterPlan, Plan, shardable

KINDS = ("flat", "hosts", "recompute", "slices")
#: The first seed of the fourth kind.
SLICED_FROM = 300
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_ACTIVATIONS = (torch.relu, nn.functional.gelu, torch.tanh)


@dataclasses.dataclass(frozen=True)
class Instance:
    """What is to be planned. ``ranks``: by dimension of the mesh."""

    seed: int
    kind: str
    step: TracedStep
    ranks: dict[str, int]
    hardware: Hardware
    limit_bytes: int

    @property
    def context(self) -> Context:
        return self.step.context(self.ranks, self.hardware, self.limit_bytes)

    def plans(self) -> list[Plan]:
        """Every plan that can be written down and whose state fits, but for its buckets' size."""
        ctx, kind = self.context, self.kind
        every = list(_decided(self.step, ctx))
        if kind == "recompute":
            every += [
                plan.replace(recompute=one.recompute, also_save=one.also_save)
                for one in recompute_sets(self.step.captured, ctx, RECOMPUTE_SETS)
                for plan in every
            ]
        if kind == "slices":
            every += list(_in_slices(self.step, ctx, every))
        return [one for one in every if sum(state_bytes(ctx, one).values()) <= self.limit_bytes]


def instance(seed: int) -> Instance:
    """The same for the same seed."""
    draw = random.Random(seed)
    kind = KINDS[3] if seed >= SLICED_FROM else KINDS[seed % 3]
    ranks = _ranks(draw, kind)
    step, hardware = _step(draw, kind, ranks), _hardware(draw, ranks)
    return Instance(seed, kind, step, ranks, hardware, _limit(draw, kind, step, ranks, hardware))


def _ranks(draw: random.Random, kind: str) -> dict[str, int]:
    two = kind == "hosts" or (kind == "recompute" and draw.random() < 0.25)
    if not two:
        return {"ranks": draw.choice([2, 4, 8, 64])}
    return {"host": draw.choice([2, 4]), "rank": draw.choice([2, 4, 8])}


class _Chain(nn.Module):
    """Layers one after the other; after some, what came before them is passed on beside."""

    def __init__(self, layers: list[nn.Linear], skips: list[bool], activations: list[int]) -> None:
        super().__init__()
        self.layers, self.skips, self.activations = nn.ModuleList(layers), skips, activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, skip, number in zip(self.layers, self.skips, self.activations, strict=True):
            after = _ACTIVATIONS[number](layer(x))
            x = torch.cat([x, after], dim=1) if skip else after
        return x.square().mean()


def _step(draw: random.Random, kind: str, ranks: dict[str, int]) -> TracedStep:
    """A chain of layers, some of which read what comes before the last one."""
    if kind == "slices":
        return _wide_step(draw)
    world_size, flat = math.prod(ranks.values()), kind == "flat"
    rows = draw.choice([512, 2048, 8192] if kind == "recompute" else [8, 32, 128, 512])
    # With five choices each, three parameters have 125 plans, and four 625.
    most = draw.choice([3, 4, 4, 5, 5, 6] if flat else [2, 3] if len(ranks) == 2 else [3, 4])
    if kind == "hosts":
        most = draw.choice([2, 3, 3, 4])
    uncut = draw.choice([0, 2]) if flat else 0  # besides
    width = draw.choice([32, 64, 128])
    layers, skips, activations = [], [], []
    cut = small = 0
    with torch.device("meta"):
        x = torch.empty(rows, width)
        while cut < most:
            outputs = draw.choice([16, 30, 64, 128, 256, 512])
            too_small = not shardable((outputs,), world_size)
            bias = draw.random() < (1.0 if too_small else 0.3)
            bias = bias and (small < uncut if too_small else cut + 2 <= most)
            layers.append(nn.Linear(width, outputs, bias=bias))
            skips.append(draw.random() < 0.3)
            activations.append(draw.choice([0, 1, 2]) if kind == "recompute" else 0)
            width = width + outputs if skips[-1] else outputs
            cut += 1 + (bias and not too_small)
            small += bias and too_small
        chain = _Chain(layers, skips, activations)
        return trace(chain, (x,), optimizer=draw.choice(["adamw", "sgd"]))


def _wide_step(draw: random.Random) -> TracedStep:
    """Two layers with many numbers between them, and perhaps one before or after."""
    width, wide = draw.choice([32, 64]), draw.choice([512, 1024, 2048])
    sizes = [(width, wide), (wide, width)]
    other = draw.choice([0, 1, 2])
    if other:
        sizes.insert(2 * (other - 1), (width, width))
    with torch.device("meta"):
        layers = [nn.Linear(*size, bias=False) for size in sizes]
        activations = [draw.choice([0, 1, 2]) for _ in layers]
        chain = _Chain(layers, [False] * len(layers), activations)
        x = torch.empty(draw.choice([8, 64, 512]), width)
        return trace(chain, (x,), optimizer=draw.choice(["adamw", "sgd"]))


def _hardware(draw: random.Random, ranks: dict[str, int]) -> Hardware:
    """From a network that is nearly free to one that takes ten times as long as the computing.

    Of the two the inner one is up to a hundred times as fast, and never slower.
    """
    byte_seconds = 10 ** draw.uniform(-10, -7.5)
    latency = draw.uniform(-6, -4)
    if len(ranks) == 1:
        return Hardware("random", {"default": 5e10}, 1e10, 2e-6, _rates(draw, byte_seconds))
    outer, inner = ranks
    faster = 10 ** draw.uniform(0, 2)
    carried_out = draw.choice(["ring", "messages"])
    # One ring through all ranks leaves a host once; groups between hosts may share what it sends.
    shared = draw.choice([1, ranks[inner]])
    flat = _rates(draw, byte_seconds, latency, carried_out)
    return Hardware(
        "random",
        {"default": 5e10},
        1e10,
        2e-6,
        flat,
        dimensions={
            outer: _rates(draw, byte_seconds * shared, latency, carried_out),
            inner: _rates(draw, byte_seconds / faster, latency - draw.random(), carried_out),
        },
    )


def _rates(
    draw: random.Random, byte_seconds: float, latency: float | None = None, carried_out: str = ""
) -> dict[str, LinkRate]:
    """``latency``: the power of ten of its seconds, for all kinds about the same."""
    return {
        kind: LinkRate(
            latency_seconds=10
            ** (draw.uniform(-6, -4) if latency is None else latency + draw.uniform(-0.1, 0.1)),
            seconds_per_byte=byte_seconds * draw.uniform(0.8, 1.25),
            overhead_seconds_per_byte=draw.choice([0.0, 0.15]) * byte_seconds,
            carried_out=carried_out,
        )
        for kind in _COLLECTIVES
    }


def _limit(
    draw: random.Random, kind: str, step: TracedStep, ranks: dict[str, int], hardware: Hardware
) -> int:
    """So far on the way from the least limit to what is taken without one, or not recomputing.

    Either may be the larger: the planner finds its least by descent. There are plans at both.
    """
    least = step.least_bytes(ranks, hardware)
    most = predicted(step.plan(ranks, hardware)).peak_bytes
    if kind == "recompute":
        without = _least_without(step, step.context(ranks, hardware, 0))
        most = without if without > least else most
    return round(min(least, most) + draw.random() * abs(most - least))


def _least_without(step: TracedStep, ctx: Context) -> int:
    """The least peak of a plan that recomputes nothing, overlap given up."""
    every, deciding = _decided(step, ctx), ctx.replace(deciding=True)
    return min(
        predict(step.captured, plan, deciding, step.passes).prediction.peak_bytes for plan in every
    )


def _decided(step: TracedStep, ctx: Context) -> Iterator[Plan]:
    """Every choice of decisions."""
    options = []
    for one in step.parameters:
        options.append([Decision.REPLICATE])
        for decision in DECISIONS:
            ranks = ctx.ranks_of_a_host if decision.within_host else ctx.world_size
            if decision.sharded and ranks is not None and shardable(one.shape, ranks):
                options[-1].append(decision)
    for decisions in itertools.product(*options):
        yield Plan(
            tuple(
                ParameterPlan(one.name, one.shape, one.dtype, decision)
                for one, decision in zip(step.parameters, decisions, strict=True)
            ),
            world_size=ctx.world_size,
            ranks_of_a_host=ctx.ranks_of_a_host,
        )


def _in_slices(step: TracedStep, ctx: Context, plans: Sequence[Plan]) -> Iterator[Plan]:
    """Plans with one family in slices; of a weight that is gathered again any number is kept."""
    for slice_group in find_slice_groups(step.captured, ctx):
        for plan, slices in itertools.product(plans, SLICES):
            splits = slice_group.into(slices)
            some = [
                not slice_group.of_input and plan.decision(one.name).regathers for one in splits
            ]
            for kept in itertools.product(*(range(slices if own else 1) for own in some)):
                split = {
                    one.name: one._replace(kept_slices=count)
                    for one, count in zip(splits, kept, strict=True)
                }
                rows = (
                    dataclasses.replace(row, **split[row.name]._asdict())
                    if row.name in split
                    else row
                    for row in plan.parameters
                )
                yield plan.replace(parameters=tuple(rows), recompute=slice_group.recompute)

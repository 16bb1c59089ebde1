"""Training tests: train with osdp and with a reference on the same ranks, and compare them.

The reference needs no communication: every rank runs the batches of all ranks, on copies of the
model that share parameters and have separate buffers. Gradients then add up to their average over
ranks, and batch norm computes the statistics of data-parallel training.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import osdp_compile
from osdp_compile import Decision, Hardware, Plan
from osdp_compile.runtime.collectives import backend_of
from osdp_compile.runtime.meshes import local_part
from osdp_compile.tracking.other_models import OtherModels
from passes.types.decision import FLAT_DECISIONS
from passes.types.hardware import LinkRate
from passes.types.units import parse_bytes
from tests.ranks import Ranks

#: A fixed profile with a slow network (10 us, 50 MB/s), for equal plans in every run.
SLOW = Hardware(
    name="slow network",
    flops_per_second={"default": 5e10},
    memory_bytes_per_second=1e10,
    launch_seconds=5e-6,
    collectives={
        kind: LinkRate(latency_seconds=1e-5, seconds_per_byte=2e-8)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    },
)

Step = Callable[[nn.Module, Any], Tensor]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters):
    # Some gradients are zero except for rounding (an attention's key bias). The default eps of
    # 1e-8 would turn a difference of 1e-10 between two of them into one of the learning rate.
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-5, weight_decay=0.1)


def mean_square(model, batch):
    """The default step: the loss of a batch, here without targets."""
    return model(batch).float().square().mean()


def normal_batch(step: int, micro: int, rank: int) -> Tensor:
    """The default batch: 4 rows of 8 numbers, different for every step, micro-batch and rank."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(4, 8, generator=generator)


def reset(model: nn.Module) -> None:
    """The modules initialise their parameters; the random numbers are those of one seed."""
    torch.manual_seed(7)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The training loop without the model, the same for osdp and for the reference.

    ``backwards``: number of backwards before each optimizer step, each with its own batch.
    ``max_norm``: for clip_grad_norm_. ``schedule``: makes the scheduler of an optimizer.
    """

    step: Step = mean_square
    batch: Callable[[int, int, int], Any] = normal_batch
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    steps: int = 3
    backwards: int = 1
    max_norm: float | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None


@dataclasses.dataclass
class Trained:
    """The result of training on a rank: tensors are whole, losses are averaged over ranks."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def distance(self, other: Trained) -> float:
        """The largest absolute difference of a parameter from the other training's."""
        return max(
            (one - other.parameters[name]).abs().max().item()
            for name, one in self.parameters.items()
        )


@dataclasses.dataclass
class Outcome:
    """One rank's training with osdp and with the reference."""

    osdp: Trained
    reference: Trained
    placements: dict[str, str]
    decisions: dict[str, str]
    state_names: list[str]
    reference_state_names: list[str]

    def distance(self, name: str) -> float:
        """The largest absolute difference of a parameter or buffer from the reference."""
        ours = {**self.osdp.parameters, **self.osdp.buffers}[name]
        theirs = {**self.reference.parameters, **self.reference.buffers}[name]
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0


def trains_like_reference(
    ranks: Ranks,
    make_model: Callable[[], nn.Module],
    plan: str | dict[str, str] | float | Plan | None,
    recipe: Recipe | None = None,
    *,
    tolerance: float = 1e-5,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Outcome:
    """Train on all ranks and assert that losses, parameters and buffers equal the reference's.

    ``plan``: a plan; or one decision for all parameters; or decisions by name; or a float: the
    planner runs for a slow network, under the limit of :func:`limit_between` for that share; or
    None: the planner runs without a limit, on a measured profile.
    ``prepare``: called with the model right before osdp compiles it.

    Returns rank 0's outcome, for further assertions.
    """
    recipe = recipe or Recipe()
    return _equal(ranks.run(_train_both, make_model, plan, recipe, prepare), tolerance)


def each_trains_like_reference(
    ranks: Ranks,
    make_model: Callable[[], nn.Module],
    plan: dict[str, str] | str,
    recipes: Mapping[str, Recipe],
) -> dict[str, Outcome]:
    """:func:`trains_like_reference` for several recipes, with one compiled model without buffers.

    All optimizers exist at the first call. The model starts again for each recipe.
    """
    found = ranks.run(_train_each, make_model, plan, recipes)
    return {name: _equal([of_rank[name] for of_rank in found], name=name) for name in recipes}


def _equal(outcomes: list[Outcome], tolerance: float = 1e-5, name: str = "") -> Outcome:
    """Rank 0's outcome, after the assertions of :func:`trains_like_reference`."""
    for rank, outcome in enumerate(outcomes):
        osdp, reference = outcome.osdp, outcome.reference
        where = f"rank {rank} {name}"
        assert osdp.losses == _close(reference.losses, tolerance), f"losses of {where}"
        assert osdp.norms == _close(reference.norms, tolerance), f"gradient norms of {where}"
        assert all(loss == loss for loss in osdp.losses), "a loss is not a number"
        assert list(osdp.parameters) == list(reference.parameters)
        assert list(osdp.buffers) == list(reference.buffers)
        assert outcome.state_names == outcome.reference_state_names
        for tensor in [*osdp.parameters, *osdp.buffers]:
            distance = outcome.distance(tensor)
            assert distance <= tolerance, f"{tensor} is {distance} off on {where}"
        assert outcome.decisions == outcomes[0].decisions, "ranks have different plans"
        assert outcome.placements == {
            name: "shard" if Decision.named(decision).sharded else "replicate"
            for name, decision in outcome.decisions.items()
        }
    moved = outcomes[0].reference.losses
    assert len(set(moved)) == len(moved), "the reference does not learn: the test shows nothing"
    return outcomes[0]


def _close(values: list[float], tolerance: float) -> Any:
    return pytest.approx(values, abs=tolerance, rel=tolerance)


def _train_both(rank, world_size, make_model, plan, recipe, prepare) -> Outcome:
    torch.manual_seed(0)
    model = make_model()
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    with without_other_models():
        options = plan_options(model, plan, recipe, world_size)
        if prepare is not None:
            prepare(model)
        trained = train_osdp(model, options, recipe, rank)
    return _outcome(model, trained, reference, rank)


def _train_each(rank, world_size, make_model, plan, recipes) -> dict[str, Outcome]:
    torch.manual_seed(0)
    model = make_model()
    start = copy.deepcopy(model)
    optimizers = {name: one.optimizer(model.parameters()) for name, one in recipes.items()}
    options = plan_options(model, plan, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    found = {}
    for name, recipe in recipes.items():
        with torch.no_grad():
            for ours, given in zip(model.parameters(), start.parameters(), strict=True):
                if found:
                    given = distribute_tensor(given, ours.device_mesh, ours.placements)
                ours.copy_(given)
        reference = Reference(copy.deepcopy(start), recipe, world_size)
        trained = train_compiled(compiled, model, optimizers[name], recipe, rank)
        found[name] = _outcome(model, trained, reference, rank)
    return found


def _outcome(model: nn.Module, trained: Trained, reference: Reference, rank: int) -> Outcome:
    return Outcome(
        osdp=trained,
        reference=reference.train(rank),
        placements=placements(model),
        decisions={row.name: row.decision.name for row in plan_in_force(model).parameters},
        state_names=list(model.state_dict()),
        reference_state_names=list(reference.replicas[0].state_dict()),
    )


def without_other_models() -> AbstractContextManager[Any]:
    """Count no other models under a limit: the reference exists for the test only."""
    return mock.patch("osdp_compile.engine.first_call.other_models", lambda *_: OtherModels())


class Reference:
    """Data-parallel training of all ranks in this process, in eager mode."""

    def __init__(self, model: nn.Module, recipe: Recipe, world_size: int) -> None:
        shared = {id(p): p for p in model.parameters()}
        self.replicas = [model] + [
            copy.deepcopy(model, dict(shared)) for _ in range(world_size - 1)
        ]
        self.recipe = recipe
        self.optimizer = recipe.optimizer(model.parameters())
        self.scheduler = recipe.schedule(self.optimizer) if recipe.schedule else None

    def train(self, rank: int) -> Trained:
        """Run all steps; the returned buffers are those of this rank's replica."""
        recipe, world_size = self.recipe, len(self.replicas)
        losses, norms = [], []
        for step in range(recipe.steps):
            for micro in range(recipe.backwards):
                total = 0.0
                for other, replica in enumerate(self.replicas):
                    loss = recipe.step(replica, recipe.batch(step, micro, other)) / world_size
                    loss.backward()
                    total += loss.item()
                losses.append(total)
            norms += finish_step(self.replicas[0], self.optimizer, self.scheduler, recipe)
        return Trained(
            losses,
            norms,
            {name: p.detach().clone() for name, p in self.replicas[0].named_parameters()},
            {name: b.detach().clone() for name, b in self.replicas[rank].named_buffers()},
        )


def train_osdp(model: nn.Module, options: dict[str, Any], recipe: Recipe, rank: int) -> Trained:
    """Run all steps of one rank; the model is compiled, and sharded at its first call."""
    compiled = torch.compile(model, backend="osdp", options=options)
    return train_compiled(compiled, model, recipe.optimizer(model.parameters()), recipe, rank)


def train_compiled(
    compiled: Any, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, rank: int
) -> Trained:
    """Run all steps of one rank with a compiled model and an optimizer of its parameters."""
    scheduler = recipe.schedule(optimizer) if recipe.schedule else None
    losses, norms = [], []
    for step in range(recipe.steps):
        for micro in range(recipe.backwards):
            loss = recipe.step(compiled, recipe.batch(step, micro, rank))
            loss.backward()
            losses.append(mean_over_ranks(loss))
        norms += finish_step(model, optimizer, scheduler, recipe)
    return Trained(
        losses,
        norms,
        {name: whole(p) for name, p in model.named_parameters()},
        {name: b.detach().clone() for name, b in model.named_buffers()},
    )


def finish_step(model, optimizer, scheduler, recipe: Recipe) -> list[float]:
    """Clip, step, schedule, zero gradients; returns the gradients' norm if the recipe clips."""
    norms = []
    if recipe.max_norm is not None:
        norms.append(
            whole(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)).item()
        )
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return norms


def whole(tensor: Tensor) -> Tensor:
    """A copy of the full tensor, of a DTensor or of a plain tensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        # On a GPU over gloo torch's gather of a DTensor ends in a segmentation fault.
        device = tensor.device_mesh.device_type
        is_fatal = device == "cuda" and backend_of(dist.group.WORLD, device) == "gloo"
        tensor = _gathered(tensor) if is_fatal else tensor.full_tensor()
    return tensor.clone()


def _gathered(tensor: DTensor) -> Tensor:
    """The full tensor, over a mesh of one dimension, by way of the CPU."""
    (placement,) = tensor.placements
    local = tensor.to_local()
    if not placement.is_shard():
        return local
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.cpu())
    return torch.cat(parts, placement.dim).to(local.device)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def placements(model: nn.Module) -> dict[str, str]:
    """The placement of each parameter: ``shard``, ``shard within host``, ``replicate``, ``plain``.

    ``shard``: a rank holds its rows only.
    ``replicate`` also names a plain tensor under a plan that shards nothing.
    ``shard within host``: a rank holds its rows only, and each host holds all rows.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            plan = osdp_compile.plan_of(model)
            found[name] = "plain" if plan is None or plan.shards else "replicate"
            continue
        mesh, placed = parameter.device_mesh, parameter.placements
        within_host = placed == (Replicate(), Shard(0))
        if within_host or set(placed) in ({Shard(0)}, {Shard(1)}):
            dim = placed[-1].dim
            rows = -(-parameter.shape[dim] // (mesh.size(1) if within_host else mesh.size()))
            assert parameter.to_local().shape[dim] <= rows, f"{name} is not cut"
            found[name] = "shard within host" if within_host else "shard"
        else:
            assert set(placed) == {Replicate()}
            assert parameter.to_local().shape == parameter.shape
            found[name] = "replicate"
    return found


def plan_in_force(model: nn.Module) -> Plan:
    plan = osdp_compile.plan_of(model)
    assert plan is not None, "the model was not planned"
    return plan


def plan_options(model, plan, recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The backend's options for the ``plan`` of :func:`trains_like_reference`."""
    if plan is None:
        return {}
    if isinstance(plan, Plan):
        return {"plan": plan, "hardware": SLOW}
    if isinstance(plan, float):
        return {"memory_limit": limit_between(model, plan, recipe), "hardware": SLOW}
    uniform = Plan.uniform(
        model.named_parameters(),
        plan if isinstance(plan, str) else "replicate",
        world_size=world_size,
    )
    if isinstance(plan, dict):
        unknown = set(plan) - {row.name for row in uniform.parameters}
        assert not unknown, f"no parameters of these names: {unknown}"
        uniform = uniform.replace(
            parameters=tuple(
                dataclasses.replace(row, decision=Decision.named(plan.get(row.name, row.decision)))
                for row in uniform.parameters
            )
        )
    return {"plan": uniform, "hardware": SLOW}  # a measurement would take longer than training


def mixed_plan(
    model: nn.Module, decisions: Sequence[Decision], *, bucket_bytes: int, world_size: int
) -> Plan:
    """A plan that assigns these decisions to the parameters, or their local tensors, in turn."""
    local = [(name, local_part(one.detach())) for name, one in model.named_parameters()]
    plan = Plan.uniform(local, decisions[0], world_size=world_size)
    rows = [
        dataclasses.replace(row, decision=decisions[index % len(decisions)])
        for index, row in enumerate(plan.parameters)
    ]
    return plan.replace(parameters=tuple(rows), bucket_bytes=bucket_bytes)


def plan_for(kind: str, model: nn.Module, world_size: int) -> Plan:
    """A plan for a model with linears ``up`` and ``down``.

    ``mixed``: every decision of a flat mesh; ``sliced``: regather all, run ``up`` (along 0, one
    slice kept) and ``down`` (along 1) in three slices; ``replicate``: shard nothing.
    """
    if kind == "mixed":
        return mixed_plan(model, list(FLAT_DECISIONS), bucket_bytes=1 << 10, world_size=world_size)
    if kind == "replicate":
        return Plan.uniform(model.named_parameters(), "replicate", world_size=world_size)
    again = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    return again.split("up.weight", 3, kept_slices=1).split("down.weight", 3, along=1)


def limit_between(model: nn.Module, share: float, recipe: Recipe) -> int:
    """A limit in bytes: ``share`` of the way from the least limit to the peak without a limit.

    The error about an infeasible limit names the least limit.
    """
    trial = copy.deepcopy(model)
    optimizer = recipe.optimizer(trial.parameters())  # alive, so that its state is counted

    def first_call(**options):
        compiled = torch.compile(trial, backend="osdp", options={"hardware": SLOW, **options})
        recipe.step(compiled, recipe.batch(0, 0, 0))

    with pytest.raises(osdp_compile.InfeasibleLimit) as infeasible:
        first_call(memory_limit="1KiB")
    least_bytes = parse_bytes(str(infeasible.value).split("least possible ")[1].split(" for ")[0])
    # Only the plan is needed: the graph runs without lowering.
    with mock.patch("osdp_compile.engine.backend.lower", lambda gm, *rest: gm):
        first_call()
    prediction = plan_in_force(trial).prediction
    assert prediction is not None and optimizer is not None
    return round(least_bytes + share * (prediction.peak_bytes - least_bytes))

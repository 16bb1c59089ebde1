"""Owner ranks: whole matrices' updates are computed once, and are those of one process."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from osdp_compile import OsdpError, PeakMemory, Plan, update_by_owners
from osdp_compile.optim import owner_ranks
from passes.annotate.owner_ranks import orthogonal_bytes
from passes.types.context import Parameter
from passes.types.decision import Decision
from tests.chosen import more, thorough
from tests.training import SLOW, Recipe, normal_batch, plan_options, whole

#: Matrices of uneven sizes under every decision; the last one costs most.
SIZES = ((8, 9), (9, 7), (7, 12), (12, 30))
PLAN = {"0.weight": "shard_regather", "1.weight": "shard_keep", "2.weight": "replicate"}
PLAN |= {"3.weight": "shard_regather"}
OTHER_MUON = {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}


#: Computing takes longer than sending, for replicas too.
SLOW_COMPUTE = dataclasses.replace(SLOW, flops_per_second={"default": 1.0})

#: And the machine has two hosts of two ranks.
HOSTS = dataclasses.replace(
    SLOW_COMPUTE, dimensions={"host": SLOW.collectives, "gpu": SLOW.collectives}
)


def linears(sizes=SIZES):
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def compiled_once(model, options, rank, columns=SIZES[0][0]):
    """The model after its first call; gradients are dropped."""
    torch.compile(model, backend="osdp", options=options)(
        torch.randn(4, columns, generator=torch.Generator().manual_seed(rank))
    ).sum().backward()
    model.zero_grad()


def stepped(model, reference, steps=3, **muon):
    """The largest difference to torch's Muon on whole tensors, and calls of the iteration here."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    ours, theirs = (torch.optim.Muon([p[i] for p in pairs], lr=0.1, **muon) for i in range(2))
    calls = 0
    for step in range(steps):
        for index, (one, other) in enumerate(pairs):
            torch.manual_seed(10 * step + index)
            other.grad = torch.randn(other.shape)
            one.grad = other.grad.clone()
            if isinstance(one, DTensor):
                one.grad = distribute_tensor(other.grad, one.device_mesh, one.placements)
        from torch.optim import _muon

        plain = _muon._zeropower_via_newtonschulz
        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", side_effect=plain) as counted:
            ours.step()
        calls += counted.call_count
        theirs.step()
    off = max((whole(one) - other).abs().max().item() for one, other in pairs)
    moments = [
        (whole(ours.state[one]["momentum_buffer"]) - theirs.state[other]["momentum_buffer"])
        for one, other in pairs
    ]
    assert max(one.abs().max().item() for one in moments) < 1e-6
    return off, calls


def under_a_plan(rank, world_size, plan, round_bytes, muon, hardware=SLOW_COMPUTE):
    model = linears()
    reference = copy.deepcopy(model)
    options = plan_options(model, plan, Recipe(), world_size) | {"hardware": hardware}
    compiled_once(model, options, rank)
    with mock.patch.object(owner_ranks, "ROUND_BYTES", round_bytes):
        return stepped(model, reference, **muon)


@pytest.mark.parametrize(
    ("round_bytes", "plan", "muon"),
    [  # matrix by matrix, and all at once
        (1, PLAN, {}),
        (1 << 20, "replicate", OTHER_MUON),
        *thorough((1, "replicate", OTHER_MUON), (1 << 20, PLAN, OTHER_MUON)),
        *thorough((1 << 20, "replicate", {})),
        *more((1, PLAN, OTHER_MUON), (1 << 20, PLAN, {})),
    ],
)
def test_muon_steps_as_on_whole_tensors_and_each_matrix_has_one_owner(
    two_ranks, plan, round_bytes, muon
):
    found = two_ranks.run(under_a_plan, plan, round_bytes, muon)
    assert max(off for off, _ in found) < 1e-6
    assert sum(calls for _, calls in found) == 3 * len(SIZES)
    assert min(calls for _, calls in found) > 0


@pytest.mark.thorough
def test_replicas_that_take_longer_to_send_are_computed_by_all(two_ranks):
    found = two_ranks.run(under_a_plan, PLAN, 1 << 20, {}, SLOW)
    assert max(off for off, _ in found) < 1e-6
    assert sum(calls for _, calls in found) == 3 * (len(SIZES) + 1)


def compiled_step(rank, world_size):
    model = linears()
    reference = copy.deepcopy(model)
    compiled_once(model, plan_options(model, PLAN, Recipe(), world_size), rank)
    muons = [torch.optim.Muon(one.parameters(), lr=0.1) for one in (model, reference)]
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    for one, other in pairs:
        other.grad = torch.randn(other.shape, generator=torch.Generator().manual_seed(7))
        one.grad = distribute_tensor(other.grad, one.device_mesh, one.placements)
    torch.compile(muons[0].step)()
    muons[1].step()
    return max((whole(one) - other).abs().max().item() for one, other in pairs)


@pytest.mark.thorough
def test_a_compiled_step(two_ranks):
    assert max(two_ranks.run(compiled_step)) < 1e-6


def within_hosts(rank, world_size):
    model = linears()
    reference = copy.deepcopy(model)
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    rows = {"1.weight": Decision.SHARD_HOST_KEEP, "3.weight": Decision.SHARD_HOST_REGATHER}
    plan = plan.replace(
        parameters=tuple(
            dataclasses.replace(row, decision=rows.get(row.name, row.decision))
            for row in plan.parameters
        ),
        ranks_of_a_host=2,
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
    compiled_once(model, {"plan": plan, "mesh": mesh, "hardware": HOSTS}, rank)
    return stepped(model, reference)


@pytest.mark.thorough
def test_sharded_within_hosts(four_ranks):
    found = four_ranks.run(within_hosts)
    assert max(off for off, _ in found) < 1e-6
    assert sum(calls for _, calls in found) == 3 * len(SIZES)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def columns_stay(rank, world_size):
    model = Mlp()
    reference = copy.deepcopy(model)
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    compiled_once(model, {"plan": plan.tensor_parallel({"up.weight": 0, "down.weight": 1})}, rank)
    dims = [one.placements[0].dim for one in model.parameters()]
    return dims, stepped(model, reference)


def test_weights_to_which_activations_move(two_ranks):
    for dims, (off, _) in two_ranks.run(columns_stay):
        assert dims == [0, 1]
        assert off < 1e-6


def memory_of_a_step(rank, world_size):
    sizes = [(256, 256)] * 8
    model = linears(sizes)
    compiled_once(model, plan_options(model, "shard_regather", Recipe(), world_size), rank, 256)
    optimizer = torch.optim.Muon(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with mock.patch.object(owner_ranks, "ROUND_BYTES", 2 << 17), PeakMemory() as memory:
        before_bytes = memory.current_bytes
        optimizer.step()
    return memory.peak_bytes - before_bytes


def test_a_step_takes_at_most_the_memory_that_plans_count(two_ranks):
    matrices = [
        Parameter(f"w{i}", (256, 256), "float32", 1 << 16, 4, True, 0, orthogonalized=True)
        for i in range(8)
    ]
    with mock.patch("passes.annotate.owner_ranks.ROUND_BYTES", 2 << 17):
        counted_bytes = orthogonal_bytes(matrices, 2)
    shards_bytes = 2 * 4 << 15
    for found_bytes in two_ranks.run(memory_of_a_step):
        assert 0.5 * counted_bytes < found_bytes <= counted_bytes + shards_bytes


def own_optimizer(rank, world_size):
    """Whitened by a covariance that its owner keeps, as Shampoo does; in float32."""
    model = linears()
    options = plan_options(model, PLAN, Recipe(), world_size) | {"hardware": SLOW_COMPUTE}
    compiled_once(model, options, rank)
    states: dict[nn.Parameter, torch.Tensor] = {}
    parameters = list(model.parameters())
    reference, found = [], []
    for step in range(2):
        gradients = {}
        for index, one in enumerate(parameters):
            torch.manual_seed(10 * step + index)
            gradient = torch.randn(one.shape)
            reference.append((index, gradient @ gradient.T))
            if isinstance(one, DTensor):
                gradient = distribute_tensor(gradient, one.device_mesh, one.placements)
            gradients[one] = gradient.to_local() if isinstance(one, DTensor) else gradient

        def compute(parameter, update):
            states[parameter] = states.get(parameter, 0) + update @ update.T
            return states[parameter] @ update

        update_by_owners(
            parameters,
            gradients.__getitem__,
            compute,
            lambda parameter, part: found.append(part.shape == parameter.to_local().shape),
            dtype=torch.float32,
        )
    kept = [index for index, one in enumerate(parameters) if one in states]
    far = max(
        (states[parameters[i]] - sum(c for j, c in reference if j == i)).abs().max().item()
        for i in kept
    )
    return kept, far, found


def test_other_optimizers_keep_state_with_the_owner(two_ranks):
    kept, far, applied = zip(*two_ranks.run(own_optimizer), strict=True)
    assert sorted(kept[0] + kept[1]) == [0, 1, 2, 3]
    assert max(far) < 1e-4
    assert all(len(one) == 8 and all(one) for one in applied)


def test_a_parameter_of_no_model_of_ours_is_refused():
    free = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(OsdpError, match=r"parameter 0 of update_by_owners, of shape \(2, 3\)"):
        update_by_owners([free], lambda p: p, lambda p, u: u, lambda p, u: None)
    muon = torch.optim.Muon([free])
    free.grad = torch.ones(2, 3)
    muon.step()  # torch's own
    assert free.abs().max() > 0


def options_say(rank, world_size):
    model = linears()
    seconds = {}
    for name in ("adamw", "muon"):
        torch._dynamo.reset()
        one = copy.deepcopy(model)
        compiled = torch.compile(
            one, backend="osdp", options={"plan": plan_by_hand(one, world_size), "optimizer": name}
        )
        compiled(normal_batch(0, 0, rank)[:, :8]).sum().backward()
        import osdp_compile

        seconds[name] = osdp_compile.plan_of(one).prediction.step_seconds
    return seconds


def plan_by_hand(model, world_size):
    return Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)


@pytest.mark.thorough
def test_the_prediction_counts_it(two_ranks):
    for seconds in two_ranks.run(options_say):
        assert seconds["muon"] > seconds["adamw"]

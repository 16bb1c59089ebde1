"""Models that ``parallelize_module`` distributed on the meta device, and ``osdp_compile.shard``."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import osdp_compile
from osdp_compile import OsdpError, Plan, PlanMismatch, RanksDiffer, plan_of
from passes.types.decision import FLAT_DECISIONS
from tests.chosen import thorough
from tests.end_to_end.test_other_data import mixture, rows_of, trained_experts
from tests.end_to_end.test_parallelized import (
    WIDTH,
    Broken,
    Language,
    by_sequence,
    distance,
    local_parameters,
    loss_of,
    made,
    new_world,
    placements,
    reference_step,
    step_of,
    tokens,
    two_by_two,
    with_fsdp2,
)
from tests.training import SLOW, mixed_plan, reset


class Tied(Language):
    """The head is the embedding, a norm is frozen, and a buffer scales the logits."""

    def __init__(self):
        super().__init__(WIDTH, 1)
        self.register_buffer("scale", torch.ones(()))
        self.finish()

    def finish(self):
        """Once more after parallelize_module, which makes new parameters."""
        self.head.weight = self.words.weight
        self.norm.weight.requires_grad_(False)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Small(Tied):
    """An MLP in place of the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )


def in_two_halves(model, mesh):
    """Norm and embedding stay plain parameters."""
    parallelize_module(model.blocks, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def distributed(make, distribute, mesh, device="meta"):
    with torch.device(device):
        model = make().double()
    distribute(model, mesh)
    model.finish()
    return model


def initialise(model):
    """What scripts do after to_empty."""
    reset(model)
    nn.init.trunc_normal_(model.words.weight, std=0.5)
    with torch.no_grad():
        model.words.weight[13].zero_()
        model.scale.fill_(0.5)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def plan_for(model):
    return mixed_plan(model, list(FLAT_DECISIONS), bucket_bytes=1 << 10, world_size=2)


def compiled(model, **options):
    return torch.compile(model, backend="osdp", options={"hardware": SLOW, **options})


def as_after_a_usual_first_call(model, make, distribute, mesh):
    """Whether a model that had values when it was compiled has this model's plan and layout."""
    torch._dynamo.reset()
    usual = distributed(make, distribute, mesh["tp"], "cpu")
    options = {"mesh": mesh["dp"], "plan": plan_for(usual)}
    # Only its plan and layout are compared: the graph is not lowered.
    with mock.patch("osdp_compile.engine.backend.lower", lambda gm, *rest: gm):
        loss_of(compiled(usual, **options), tokens(0, 0))
    shapes = [[one.to_local().shape for one in m.parameters()] for m in (model, usual)]
    is_placed = placements(model) == placements(usual) and len(placements(model)) > 4
    return is_placed and plan_of(model) == plan_of(usual) and shapes[0] == shapes[1]


def train(rank, world_size, make, distribute, compared):
    """The distances to one process, and what is wrong.

    ``compared``: with a usual first call; it is evaluated first then, and has gradients inside
    ``no_sync`` last.
    """
    mesh, place = two_by_two(), rank // 2
    model = distributed(make, distribute, mesh["tp"])
    early = adamw(model)
    osdp_compile.shard(model, plan_for(model), mesh=mesh["dp"])
    empty = all(one.to_local().is_meta for one in model.parameters())
    initialise(model.to_empty(device="cpu"))
    reference = initialise(make().double())
    apart = [distance(model, reference)]
    called, optimizers = compiled(model, mesh=mesh["dp"]), (early, adamw(reference))
    if compared:
        with torch.no_grad():
            batch = tokens(0, 0)
            apart.append((loss_of(called, batch) - loss_of(reference, batch)).abs().item())
    for step in range(3):
        ours = step_of(called, model, early, tokens(step, place))
        apart.append(abs(ours - reference_step(reference, optimizers[1], step)))
    checks = {
        "empty": empty,
        "usual": not compared or as_after_a_usual_first_call(model, make, distribute, mesh),
        "names": list(model.state_dict()) == list(reference.state_dict()),
        "tied": model.head.weight is model.words.weight,
        "frozen": not model.norm.weight.requires_grad,
    }
    apart += [distance(model, reference), abs((model.scale - reference.scale).item())]
    if compared:
        apart += inside_no_sync(called, model, reference, place)
    return apart, [name for name, is_right in checks.items() if not is_right]


def inside_no_sync(called, model, reference, place):
    """The distances of gradients of two backwards to those of one process."""
    with osdp_compile.no_sync(called):
        loss_of(called, tokens(4, place)).backward()
    loss_of(called, tokens(5, place)).backward()
    batches = [tokens(step, other) for step in (4, 5) for other in range(2)]
    (sum(loss_of(reference, one) for one in batches) / 2).backward()
    apart = []
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            apart.append((one.grad.full_tensor() - other.grad).abs().max().item())
    assert len(apart) > 10
    return apart


@pytest.mark.parametrize(
    ("make", "distribute", "compared"),
    [
        (Small, in_two_halves, False),
        *thorough((Tied, by_sequence, True)),
    ],
)
def test_trains_like_one_process(four_ranks, make, distribute, compared):
    for apart, wrong in four_ranks.run(train, make, distribute, compared):
        assert apart[0] == 0.0  # the values of one process, to the bit
        assert max(apart) < 1e-11
        assert not wrong


def checkpoints(rank, world_size, folder):
    """The distances to one process after each way of a checkpoint."""
    mesh, place = two_by_two(), rank // 2
    theirs, reference = with_fsdp2(mesh), made()
    optimizers = adamw(theirs), adamw(reference)
    step_of(theirs, theirs, optimizers[0], tokens(0, place))
    reference_step(reference, optimizers[1], 0)
    state = dict(zip(("model", "optimizer"), get_state_dict(theirs, optimizers[0]), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/theirs")

    with torch.device("meta"):
        model = Language(WIDTH, 1).double()
    by_sequence(model, mesh["tp"])
    plan = Plan.uniform(local_parameters(model), "shard_regather", world_size=2)
    osdp_compile.shard(model, plan, mesh=mesh["dp"]).to_empty(device="cpu")
    optimizer = adamw(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/theirs")
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    apart = [distance(model, reference)]
    step_of(compiled(model), model, optimizer, tokens(1, place))
    reference_step(reference, optimizers[1], 1)
    apart.append(distance(model, reference))

    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/meta")
    state = {"model": theirs.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/meta")
    theirs.load_state_dict(state["model"])
    apart.append(distance(theirs, reference))
    model.load_state_dict(made().state_dict())  # whole tensors
    return [*apart, distance(model, made())]


@pytest.mark.thorough
def test_checkpoints_come_from_fsdp2_and_go_back(four_ranks, tmp_path):
    for apart in four_ranks.run(checkpoints, str(tmp_path)):
        assert max(apart) < 1e-11


def with_values(rank, world_size):
    """The distance of a model with values, other ones on each data-parallel rank."""
    mesh = two_by_two()
    torch.manual_seed(rank // 2)
    model = distributed(Tied, by_sequence, mesh["tp"], "cpu")
    osdp_compile.shard(model, plan_for(model), mesh=mesh["dp"])
    torch.manual_seed(0)
    reference = Tied().double()
    return distance(model, reference)


def test_a_model_with_values_gets_those_of_the_first_rank(four_ranks):
    assert four_ranks.run(with_values) == [0.0] * 4


def with_experts(rank, world_size, same=False):
    """``same``: the ranks of ``ep`` have one batch. The distance to one process, or the error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    reference = mixture()
    with torch.device("meta"):
        model = mixture(mesh["ep"])
    plan = Plan.uniform(local_parameters(model), "shard_regather", world_size=2)
    osdp_compile.shard(model, plan, mesh=mesh["dp", "ep"]).to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    called = compiled(model, mesh=mesh["dp", "ep"])
    with torch.no_grad():
        called(rows_of(0, rank))
    place = mesh["dp"].get_local_rank() if same else rank
    return trained_experts(called, model, reference, place, adamw)


@pytest.mark.thorough
def test_experts_train_like_one_process(four_ranks):
    assert max(four_ranks.run(with_experts)) < 1e-11
    for said in four_ranks.run(with_experts, same=True):
        assert "the ranks along 'ep' have the same batch" in said


def refused(model, plan, **options):
    """The error of osdp_compile.shard; the model is as it was."""
    before = dict(model.named_parameters())
    with pytest.raises((OsdpError, ValueError)) as error:
        osdp_compile.shard(model, plan, **options)
    assert all(one is before[name] for name, one in model.named_parameters())
    assert plan_of(model) is None
    return error


def test_what_cannot_be_sharded_is_refused_and_named():
    with new_world(4):
        mesh = two_by_two()
        model = distributed(Tied, by_sequence, mesh["tp"])
        plan = plan_for(model)
        for wrong in (None, mesh, mesh["tp"]):
            assert "mesh['dp']" in str(refused(model, plan, mesh=wrong).value)
        ours = {"mesh": mesh["dp"]}

        whole = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
        error = refused(model, whole, **ours)
        assert error.type is PlanMismatch
        assert "'words.weight' has shape (12, 16) here and (24, 16) in the plan" in str(error.value)
        assert "shapes of local tensors" in str(error.value)
        stays = plan.tensor_parallel({"blocks.0.up.weight": 0})
        assert "activations cannot move" in str(refused(model, stays, **ours).value)

        hook = model.norm.bias.register_hook(lambda grad: grad)
        assert "'norm.bias' has a gradient hook" in str(refused(model, plan, **ours).value)
        hook.remove()
        bias = model.norm.bias
        model.norm.bias = placed(torch.zeros(17), mesh["tp"], Shard(0))
        said = str(refused(model, plan, **ours).value)
        assert "'norm.bias' of shape (17,)" in said and "multiple" in said
        model.norm.bias = placed(bias.detach().to_local(), mesh["dp"], Shard(0))
        assert "several meshes, 'norm.bias' on" in str(refused(model, plan, **ours).value)
        model.norm.bias = bias

        osdp_compile.shard(model, plan, **ours)
        with pytest.raises(OsdpError, match="sharded already"):
            osdp_compile.shard(model, plan, **ours)
        with pytest.raises(OsdpError, match="export parameter by parameter"):  # noqa: SIM117
            with osdp_compile.full_parameters(model):
                pass
        model.to_empty(device="cpu")
        with pytest.raises(OsdpError, match="fullgraph=True"):
            loss_of(compiled(Broken(model)), tokens(0, 0))


def placed(tensor, mesh, placement):
    return nn.Parameter(distribute_tensor(tensor.to("meta"), mesh, [placement]))


def distributed_in_other_ways(rank, world_size):
    """The last rank has rows of a matrix where the others have columns."""
    mesh = two_by_two()
    model = distributed(Tied, by_sequence, mesh["tp"])
    plan = plan_for(model)
    if rank == 3:
        down = model.blocks[0].down
        down.weight = placed(torch.zeros(down.weight.shape), mesh["tp"], Shard(0))
        assert isinstance(down.weight, DTensor)
    error = refused(model, plan, mesh=mesh["dp"])
    return error.type is RanksDiffer and "blocks.0.down.weight" in str(error.value)


def test_ranks_that_distributed_in_other_ways_are_refused_on_every_rank(four_ranks):
    assert all(four_ranks.run(distributed_in_other_ways))

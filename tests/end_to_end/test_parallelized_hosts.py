"""Models that ``parallelize_module`` distributed, with osdp over hosts and the ranks of each."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from functorch.compile import make_boxed_func
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import osdp_compile
from osdp_compile import Decision, Plan, _torch, plan_of
from osdp_compile.engine.backend import compile_graph
from osdp_compile.errors import OsdpError
from osdp_compile.optim.adafactor import step_on_rows
from osdp_compile.options import CheckedOptions
from osdp_compile.trace import fake_world
from passes.ops.model_collectives import kind_and_group, kind_of
from passes.types.decision import DECISIONS
from passes.types.hardware import LinkRate
from tests.chosen import more
from tests.end_to_end.test_hosts import QUICK
from tests.end_to_end.test_other_data import by_functions, cut_sequences
from tests.end_to_end.test_parallelized import (
    adamw,
    assert_within,
    by_sequence,
    distance,
    kept_beside,
    local_parameters,
    loss_of,
    made,
    new_world,
    placements,
    reference_step,
    step_of,
    tokens,
)
from tests.osdp_compile.test_shard import write_both
from tests.ranks import Ranks
from tests.training import SLOW

NAMES = ("dp_replicate", "dp_shard", "tp")
#: Every host has 10 rows of most weights, which its two ranks divide as 5 and 5, or 3 and 2.
WIDTH = 20
PLACES = 4
#: Not far above the least limit of what is measured.
LIMIT_BYTES = 738_355


def three_dimensions():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)


def hardware(between=QUICK.dimensions["gpu"]):
    """A profile with quick links within hosts; ``between``: rates between them.

    If these are quick, too, hierarchical collectives are the faster ones whatever their size.
    """
    within = QUICK.dimensions["gpu"]
    return dataclasses.replace(
        QUICK, dimensions=dict(zip(NAMES[:2], (between, within), strict=True))
    )


def options_for(decisions, model, mesh):
    """``decisions``: given to the parameters in turn."""
    local = local_parameters(model)
    plan = Plan.uniform(local, "replicate", world_size=PLACES)
    rows = [
        dataclasses.replace(row, decision=decisions[index % len(decisions)])
        for index, row in enumerate(plan.parameters)
    ]
    plan = plan.replace(parameters=tuple(rows), bucket_bytes=2000, ranks_of_a_host=2)
    return {"mesh": mesh[NAMES[:2]], "hardware": hardware(), "plan": plan}


def with_slow_links_between_hosts():
    slow = dict.fromkeys(SLOW.collectives, LinkRate(1e-5, 1e-6))
    return dataclasses.replace(hardware(between=slow), collectives=slow)


def under_a_limit(model, mesh):
    """The planner shards weights over all ranks or within hosts."""
    return {
        "mesh": mesh[NAMES[:2]],
        "hardware": with_slow_links_between_hosts(),
        "memory_limit": "160KiB",
    }


def distributed(mesh):
    model = made(WIDTH)
    by_sequence(model, mesh["tp"])
    return model


@pytest.fixture(scope="module")
def eight_ranks(inductor_cache):
    with Ranks(8, inductor_cache) as ranks:
        yield ranks


@dataclasses.dataclass
class Found:
    apart: float
    plan: str


def train(rank, world_size, decisions, from_meta=False):
    """``decisions``: None: the planner's, under a limit."""
    mesh = three_dimensions()
    reference, place = made(WIDTH), rank // 2
    with torch.device("meta" if from_meta else "cpu"):
        model = distributed(mesh)
    if decisions is None:
        options = under_a_limit(model, mesh)
    else:
        options = options_for(decisions, model, mesh)
    if from_meta:
        osdp_compile.shard(model, options["plan"], mesh=options["mesh"]).to_empty(device="cpu")
        model.load_state_dict(reference.state_dict())
    compiled = torch.compile(model, backend="osdp", options=options)
    optimizers = adamw(model), adamw(reference)
    apart = 0.0
    for step in range(3):
        ours = step_of(compiled, model, optimizers[0], tokens(step, place))
        norm = reference_step(reference, optimizers[1], step, PLACES)
        apart = max(apart, abs(ours - norm))
    with torch.no_grad():
        eager = loss_of(model, tokens(9, 0)) - loss_of(reference, tokens(9, 0))
    return Found(max(apart, distance(model, reference), abs(eager.item())), str(plan_of(model)))


HYBRID = [Decision.SHARD_HOST_REGATHER]
EVERY_KIND = list(DECISIONS)
OVER_ALL = [Decision.SHARD_REGATHER, Decision.SHARD_KEEP]


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("decisions", more(None, EVERY_KIND, OVER_ALL))
def test_trains_like_one_process(eight_ranks, decisions):
    """The checkpoints' test trains with values at the first call, too."""
    found = eight_ranks.run(train, decisions, timeout_seconds=800)
    assert max(one.apart for one in found) < 1e-11
    assert len({one.plan for one in found}) == 1


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_from_the_meta_device(eight_ranks):
    """Under every kind of decision."""
    found = eight_ranks.run(train, EVERY_KIND, from_meta=True, timeout_seconds=800)
    assert max(one.apart for one in found) < 1e-11
    assert len({one.plan for one in found}) == 1
    for differ, _ in eight_ranks.run(write_both, hosts=2, tp=2):
        assert not differ


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dims", more("dp_cp", ("dp", "cp")))
def test_sequences_that_ranks_share(eight_ranks, dims):
    """``test_other_data.py`` has the same on four ranks."""
    found = eight_ranks.run(cut_sequences, dims, "shard_regather", by_functions, tp=2)
    assert max(found) < 1e-11


def measured(rank, world_size):
    mesh = three_dimensions()
    given = {"mesh": mesh[NAMES[:2]], "hardware": with_slow_links_between_hosts()}
    return kept_beside(mesh["tp"], rank // 2, PLACES, LIMIT_BYTES, **given)


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_the_measured_peak_is_within_the_limit(eight_ranks):
    assert_within(eight_ranks.run(measured, timeout_seconds=800))


def checkpoints(rank, world_size, decisions, folder):
    """From osdp to FSDP2's hybrid sharding and back; the placements of both."""
    mesh = three_dimensions()
    model, reference = distributed(mesh), made(WIDTH)
    compiled = torch.compile(model, backend="osdp", options=options_for(decisions, model, mesh))
    optimizers = adamw(model), adamw(reference)
    ours = step_of(compiled, model, optimizers[0], tokens(0, rank // 2))
    norm = reference_step(reference, optimizers[1], 0, PLACES)
    trained = max(abs(ours - norm), distance(model, reference))
    state = get_state_dict(model, optimizers[0])
    dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=folder)

    theirs = distributed(mesh)
    fully_shard(theirs, mesh=mesh[NAMES[:2]])
    optimizer = adamw(theirs)
    model_state, optimizer_state = get_state_dict(theirs, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        theirs, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    step_of(theirs, theirs, optimizer, tokens(1, rank // 2))
    reference_step(reference, optimizers[1], 1, PLACES)
    loaded = distance(theirs, reference)

    dcp.save({"model": theirs.state_dict()}, checkpoint_id=f"{folder}/theirs")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/theirs")
    model.load_state_dict(state["model"])
    back = distance(model, reference)
    model.load_state_dict(made(WIDTH).state_dict())  # whole tensors
    apart = max(trained, loaded, back, distance(model, made(WIDTH)))
    return apart, placements(model), placements(theirs)


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("decisions", [HYBRID, *more(EVERY_KIND)])
def test_checkpoints_go_to_hybrid_sharding_of_fsdp2_and_back(eight_ranks, decisions, tmp_path):
    found = eight_ranks.run(checkpoints, decisions, str(tmp_path), timeout_seconds=800)
    for apart, ours, theirs in found:
        assert apart < 1e-11
        if decisions is HYBRID:  # what FSDP2 leaves on two dimensions is replicated over tp here
            assert ours == {n: p if len(p) == 3 else (*p, Replicate()) for n, p in theirs.items()}


#: Ranks of the groups of rank 5, which is (1, 0, 1) on the mesh.
REPLICATE, SHARD, TENSOR, BOTH = (1, 5), (5, 7), (4, 5), (1, 3, 5, 7)
COLLECTIVES = {
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
    torch.ops._c10d_functional.all_reduce.default: "all_reduce",
}


def traced(rank, options_of):
    """A rank's collectives on a fake group, (kind, ranks), and the model's own; and the plan."""
    ours, own = set(), set()

    def ranks_of(name):
        return tuple(dist.get_process_group_ranks(_torch.distributed.process_group(name)))

    def observe(one, gm, ctx):
        if one.name != "reorder":
            return
        for node in gm.graph.nodes:
            if node.target in COLLECTIVES:
                ours.add((COLLECTIVES[node.target], ranks_of(node.args[-1])))
            elif kind_of(node.target) is not None:
                own.add(ranks_of(kind_and_group(node)[1]))

    def uncompiled(gm, inputs, **_):
        return make_boxed_func(gm.forward)

    with new_world(8, rank):
        mesh = three_dimensions()
        model = distributed(mesh)
        options = CheckedOptions.parse({**options_of(model, mesh), "debug": True})

        def backend(gm, inputs):
            return compile_graph(gm, inputs, options, uncompiled, observe)

        loss_of(torch.compile(model, backend=backend), tokens(0, 0)).backward()
        return ours, own, plan_of(model)


GROUPS = [
    (HYBRID, {("all_gather", SHARD), ("reduce_scatter", SHARD), ("all_reduce", REPLICATE)}),
    (
        OVER_ALL,
        {(kind, of) for kind in ("all_gather", "reduce_scatter") for of in (SHARD, REPLICATE)},
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("decisions", "groups"), GROUPS)
def test_collectives_go_to_the_groups_of_their_dimensions(decisions, groups):
    ours, own, _ = traced(5, functools.partial(options_for, decisions))
    assert ours == groups
    assert own == {TENSOR}


@pytest.mark.thorough
def test_flat_collectives_go_to_both_data_parallel_dimensions():
    def options_of(model, mesh):
        """Without rates along the dimensions no collective is hierarchical."""
        return options_for(OVER_ALL, model, mesh) | {"hardware": SLOW}

    ours, own, _ = traced(5, options_of)
    assert ours == {("all_gather", BOTH), ("reduce_scatter", BOTH)}
    assert own == {TENSOR}


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [7, *more(1, 2, 4)])
def test_the_plan_is_equal_on_all_ranks(rank, short_search):
    """Each rank plans for itself here. On real ranks rank 0 plans for all.

    Rank 7 is at another place than rank 0 along every dimension, the others along one.
    """
    *_, first = traced(0, under_a_limit)
    *_, plan = traced(rank, under_a_limit)
    assert first.within_hosts
    # Some ranks have fewer rows of a weight, whose copies take less time.
    assert plan.replace(prediction=None) == first.replace(prediction=None)


def test_adafactor_is_refused_for_rows_that_three_dimensions_shard():
    with fake_world(8):
        mesh = three_dimensions()
        strided = _torch.dtensor.strided_shard(0, 2)
        row = DTensor.from_local(torch.ones(2, 4), mesh, [strided, strided, Shard(0)])
        with pytest.raises(OsdpError, match="another optimizer, such as AdamW"):
            step_on_rows(
                row, row, *[None] * 3, torch.zeros(()),
                d=1.0, lr=1e-2, beta2_decay=-0.8, weight_decay=0.0, eps1=None, eps2=1e-3,
                maximize=False,
            )  # fmt: skip

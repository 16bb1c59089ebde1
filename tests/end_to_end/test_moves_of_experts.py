"""Experts that stay while tokens move, by expert and by hidden size: like one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from osdp_compile import Plan
from passes.candidates.move_groups import find_move_groups
from tests.chosen import more, thorough
from tests.end_to_end.moving import WithLoss, its_loss, mean_square
from tests.end_to_end.test_moves_within_hosts import EVEN
from tests.passes.captures import capture_step
from tests.passes.move.test_experts import BY_EXPERT, BY_HIDDEN, Experts
from tests.training import SLOW, Recipe, Reference, adamw, plan_in_force, train_osdp, whole

WAYS = {"by expert": {**BY_EXPERT, "gate": 0}, "by hidden size": {**BY_HIDDEN, "gate": 2}}
#: Models with two first weights, and with biases of both products.
KINDS = {"by expert": "gated", "by hidden size": "gated", "with biases": "plain"}


def _tokens(step: int, micro: int, rank: int, differs: bool = True) -> Tensor:
    rows = 5 + (rank if differs and step in (3, 6) else 0)
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(4, rows, 6, generator=generator, dtype=torch.float64)


def _equal_tokens(step: int, micro: int, rank: int) -> Tensor:
    return _tokens(step, micro, rank, differs=False)


def _plan(model: nn.Module, way: str, world_size: int, hosts: bool = False) -> Plan:
    dims = {**BY_EXPERT, "first": 0} if way == "with biases" else WAYS[way]
    parameters, ranks = model.named_parameters(), 2 if hosts else None
    plan = Plan.uniform(parameters, "replicate", world_size=world_size, ranks_of_a_host=ranks)
    return plan.tensor_parallel(dims, within_hosts=hosts)


def _train(rank, world_size, way, hosts, optimizer, batch):
    """Distances from one process, of parameters and norms; the placements of the weights."""
    torch.manual_seed(0)
    model = Experts(KINDS[way], bias=way == "with biases").double()
    recipe = Recipe(step=mean_square, optimizer=optimizer, steps=10, batch=batch, max_norm=0.05)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "plan": _plan(model, way, world_size, hosts), "debug": True}
    if hosts:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "gpu"))
        options["hardware"] = EVEN
    ours, wanted = train_osdp(model, options, recipe, rank), reference.train(rank)
    norms = max(abs(a / b - 1) for a, b in zip(ours.norms, wanted.norms, strict=True))
    placed = {n: p.placements[-1] for n, p in model.named_parameters() if n in ("up", "down")}
    return ours.distance(wanted), norms, {name: f"S({one.dim})" for name, one in placed.items()}


def _adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=1e-2)


def check(found, way):
    dims = (2, 1) if way == "by hidden size" else (0, 0)
    for apart, norm, placed in found:
        assert apart < 1e-11 and norm < 1e-9
        assert placed == {"up": f"S({dims[0]})", "down": f"S({dims[1]})"}


@pytest.mark.parametrize(
    "way",
    [
        "by expert",
        *thorough("with biases"),
        *more("by hidden size"),
    ],
)
def test_experts_train_like_one_process(two_ranks, way):
    check(two_ranks.run(_train, way, False, adamw, _equal_tokens), way)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "hosts"),
    [
        ("by expert", True),
        ("by hidden size", False),
        *more(("by expert", False), ("by hidden size", True)),
    ],
)
def test_four_ranks_with_other_batches(four_ranks, way, hosts):
    check(four_ranks.run(_train, way, hosts, adamw, _tokens), way)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["by hidden size", *more("by expert")])
def test_adafactor(two_ranks, way):
    check(two_ranks.run(_train, way, False, _adafactor, _equal_tokens), way)


def _checkpoint(rank, world_size, folder):
    """By way, whether a checkpoint of experts by expert has the same values under other plans."""
    torch.manual_seed(0)
    found = {}
    for way in ("by expert", "by hidden size", "replicated"):
        model = Experts("gated").double()
        replicated = Plan.uniform(model.named_parameters(), "replicate", world_size=world_size)
        plan = replicated if way == "replicated" else _plan(model, way, world_size)
        compiled = torch.compile(model, backend="osdp", options={"hardware": SLOW, "plan": plan})
        mean_square(compiled, _equal_tokens(0, 0, rank)).backward()
        state = {"model": get_model_state_dict(model)}
        if way == "by expert":
            dcp.save(state, checkpoint_id=folder)
            wanted = {name: whole(p).clone() for name, p in model.named_parameters()}
            continue
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        found[way] = all(torch.equal(whole(p), wanted[n]) for n, p in model.named_parameters())
    return found


@pytest.mark.thorough
def test_checkpoints(two_ranks, tmp_path):
    for found in two_ranks.run(_checkpoint, str(tmp_path)):
        assert found == {"by hidden size": True, "replicated": True}


#: Of a small model of Hugging Face with experts.
SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}


def _of_hugging_face(rank, world_size):
    """Distance from one process in float32; how many stacks stay, and along what."""
    torch.manual_seed(0)
    model = WithLoss("Llama4", "Llama4TextConfig", interleave_moe_layer_step=1, **SIZES)

    def ids(step, micro, number):
        generator = torch.Generator().manual_seed(100 * step + number)
        return torch.randint(1, 64, (2, 12), generator=generator)

    recipe = Recipe(step=its_loss, optimizer=adamw, steps=5, batch=ids, max_norm=1.0)
    reference = Reference(copy.deepcopy(model), recipe, world_size)
    options = {"hardware": SLOW, "tensor_parallel": ["*experts.gate_up_proj"], "debug": True}
    apart = train_osdp(model, options, recipe, rank).distance(reference.train(rank))
    plan = plan_in_force(model)
    return apart, sorted((name.rsplit(".", 1)[-1], plan[name].dim) for name in plan.moved)


@pytest.mark.thorough
def test_llama_4_of_hugging_face_by_expert(two_ranks):
    pytest.importorskip("transformers")
    for apart, moved in two_ranks.run(_of_hugging_face):
        assert apart < 1e-5
        assert moved == [("down_proj", 0), ("gate_up_proj", 0)]


@pytest.mark.thorough
def test_the_reason_for_mixtral_of_hugging_face():
    """Its tokens are sorted by expert, for one product of all experts."""
    model, ids = WithLoss("Mixtral", **SIZES), torch.randint(1, 64, (2, 12))
    captured, ctx = capture_step(model, ids, world_size=2)
    found = find_move_groups(captured, ctx)
    stacks = [name for name in found.refused if ".experts." in name]
    assert len(stacks) == 2 and not any(name in one.dims for one in found.groups for name in stacks)
    assert all("grouped_mm" in found.refused[name] for name in stacks)

"""The graphs of a training step, pinned at 8 and at 1024 ranks; and the fixture that pins them.

``pytest --snapshot-update tests/end_to_end/test_snapshots.py`` writes what changed: read the
difference.
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from osdp_compile import Plan
from osdp_compile.trace import trace_graphs
from tests.chosen import thorough
from tests.hashes import printed_with_another_hash_seed
from tests.training import SLOW

pytest_plugins = ["pytester"]
WORLDS = [8, *thorough(1024)]
STEP = ["joint/tag", "forward/reorder", "backward/reorder"]


class Words(nn.Module):
    """A tied table of 2050 words, which neither world divides, and a tiny parameter.

    All of it is operators that torch 2.11 to 2.15 trace alike, so the stored graphs are of no one
    version: the backwards of ``nn.Embedding`` and ``cross_entropy`` differ between them.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(2050, 4)
        self.mix = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens, targets):
        hidden = self.scale * torch.relu(self.mix(self.words.weight[tokens]))
        scores = hidden @ self.words.weight.t()
        return (scores.logsumexp(-1) - targets).square().mean()


class Wide(nn.Module):
    """Layers that both worlds divide, one of them much larger than the bucket."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 2048, bias=False)
        self.across = nn.Linear(2048, 1024)

    def forward(self, x):
        return self.across(F.gelu(self.up(x))).square().mean()


class Deep(nn.Module):
    """A narrow layer, then three large ones."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 1024, bias=False)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x):
        x = self.up(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


def words():
    return Words(), torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long)


def wide():
    return Wide(), torch.zeros(4, 8)


def deep():
    return Deep(), torch.zeros(64, 8)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("plan", ["replicate", "shard_keep", "shard_regather"])
def test_a_step_with_tied_and_tiny_parameters(osdp_graphs, plan, world_size):
    osdp_graphs(*words(), world_size=world_size, plan=plan, after=STEP)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("plan", ["shard_keep", "shard_regather"])
def test_a_step_with_a_large_layer(osdp_graphs, plan, world_size):
    osdp_graphs(*wide(), world_size=world_size, plan=plan, after=STEP)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_in_slices(osdp_graphs, world_size):
    model, batch = wide()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    plan = plan.split("up.weight", 2).split("across.weight", 2, along=1, like="up.weight")
    after = ["forward/split", "backward/split", "backward/reorder"]
    texts = osdp_graphs(model, batch, world_size=world_size, plan=plan, after=after)
    # Nothing has all of the wide layer's 2048 columns, but this rank's rows of the second one.
    whole = [line for line in texts["forward/split"].splitlines() if "2048] =" in line]
    rows = 1024 // world_size
    assert [line.split(": ")[1] for line in whole] == [f"f32[{rows},2048] = input[across.weight]"]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_in_slices_of_which_some_are_kept(osdp_graphs, world_size):
    model, batch = wide()
    plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=world_size)
    plan = plan.split("up.weight", 2, kept_slices=1)
    plan = plan.split("across.weight", 2, along=1, like="up.weight", kept_slices=1)
    texts = osdp_graphs(model, batch, world_size=world_size, plan=plan, after=["backward/split"])
    gathered = re.findall(r"unshard\(%\d+, '([^']+)'", texts["backward/split"])
    assert gathered == ["across.weight#1"]  # of the first layer nothing reads the weight


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_pass_on_the_way(osdp_graphs, world_size):
    after = [
        f"{graph}/{name}"
        for graph, names in {
            "joint": ("dedupe", "narrow", "tag"),
            "forward": ("shard", "bucket", "annotate", "reorder"),
            "backward": ("hoist", "shard", "bucket", "annotate", "reorder"),
        }.items()
        for name in names
    ]
    texts = osdp_graphs(*words(), world_size=world_size, plan="shard_regather", after=after)
    # On a flat mesh, that pass leaves all as it is; a forward has no gradients to hoist.
    idle = ["forward/hoist", "forward/hierarchical", "backward/hierarchical"]
    idle += ["forward/split", "backward/split"]
    idle += ["forward/move_inference", "backward/move_inference"]
    idle += ["forward/chunk_inference", "backward/chunk_inference"]
    idle += ["joint/settle"]  # the model has no collectives of its own
    # Nothing is recomputed, moved or saved by slices, and marks are no text.
    step = ("recompute", "chunk", "move", "save_slices", "lend")
    idle += [f"{graph}/{name}" for graph in ("forward", "backward") for name in step]
    assert sorted(texts) == sorted([*after, *idle])
    assert texts["joint/settle"] == texts["joint/tag"]
    assert texts["forward/hierarchical"] == texts["forward/bucket"]
    assert texts["backward/recompute"] == texts["backward/lend"] == texts["backward/split"]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("plan", ["replicate", "shard_regather"])
def test_a_step_on_hosts_of_four_ranks(osdp_graphs, plan, world_size):
    model = wide() if plan == "replicate" else words()
    mesh = {"host": world_size // 4, "gpu": 4}
    after = ["forward/reorder", "backward/reorder"]
    texts = osdp_graphs(*model, world_size=world_size, plan=plan, mesh=mesh, after=after)
    backward = texts["backward/reorder"]
    assert "stage 2" in backward and "<host group>" in backward
    # The words' scale is one number: it goes all at once.
    assert ("<data-parallel group>" in backward) == (plan == "shard_regather")


def test_a_step_sharded_within_hosts_of_eight(osdp_graphs):
    mesh = {"host": 128, "gpu": 8}
    after = ["forward/reorder", "backward/reorder"]
    texts = osdp_graphs(
        *wide(), world_size=1024, plan="shard_host_regather", mesh=mesh, after=after
    )
    forward, backward = (texts[name] for name in after)
    assert "<data-parallel group>" not in forward + backward
    assert "8, <gpu group>)" in forward and "<host group>" not in forward
    assert "8, <gpu group>)" in backward and "'sum', <host group>)" in backward


@pytest.mark.thorough
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("world_size", WORLDS)
def test_the_planners_own_mix_under_a_limit(osdp_graphs, world_size):
    # A slow network and fast memory: sharding does not pay for small parameters.
    hardware = dataclasses.replace(SLOW, memory_bytes_per_second=1e13)
    options = {"memory_limit": "20MiB", "hardware": hardware}
    texts = osdp_graphs(*deep(), world_size=world_size, options=options, after=STEP)
    assert "all_reduce" in texts["backward/reorder"], "nothing is replicated"
    assert "gather" in texts["forward/reorder"], "nothing is sharded"


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("plan", "on_hosts"),
    [("shard_regather", False), ("shard_regather", True), ("shard_host_regather", True)],
    ids=["flat", "hosts", "within hosts"],
)
def test_the_text_is_the_same_on_every_rank(world_size, plan, on_hosts):
    model, *args = wide() if on_hosts else words()
    mesh = {"host": world_size // 4, "gpu": 4} if on_hosts else None
    texts = [
        trace_graphs(model, args, world_size=world_size, rank=rank, plan=plan, mesh=mesh)
        for rank in (0, 1 if world_size == 8 else world_size - 1)
    ]
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_the_text_is_the_same_in_every_process():
    code = (
        "import json; from osdp_compile.trace import trace_graphs\n"
        "from tests.end_to_end.test_snapshots import words\n"
        "model, *args = words()\n"
        "print(json.dumps(trace_graphs(model, args, world_size=8, plan='shard_keep')))"
    )
    model, *args = words()
    own = trace_graphs(model, args, world_size=8, plan="shard_keep")
    assert json.loads(printed_with_another_hash_seed(code)) == own


ONE_TEST = """
def test_{name}(osdp_graphs):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.{activation}())
    osdp_graphs(model, torch.zeros(2, 8), world_size=8, plan="shard_regather", after=["{after}"])
"""


@pytest.mark.thorough
def test_the_fixture_fails_until_written_and_on_every_change(pytester):
    def run(tests, *flags):
        written = [
            ONE_TEST.format(name=name, activation=activation, after=after)
            for name, (activation, after) in tests.items()
        ]
        pytester.makepyfile(test_it="import torch\n" + "".join(written))
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *flags)

    after = "backward/reorder"
    tests = {"same": ("ReLU", after), "changed": ("ReLU", after)}
    run(tests, "--snapshot-update").assert_outcomes(passed=2)
    first, second = pytester.path.glob("__snapshots__/**/*.txt")
    assert "reduce_scatter_tensor" in first.read_text() == second.read_text()

    tests["changed"] = ("Tanh", after)
    tests["never_written"] = ("ReLU", after)
    tests["wrong_name"] = ("ReLU", "backward/nothing")
    result = run(tests)
    result.assert_outcomes(passed=1, failed=3)
    said = result.stdout.str()
    assert said.count("the graph backward/reorder is not the stored one, or none is") >= 2
    assert "= where.self(" in said, "the difference is not shown"
    assert "no graph is named 'backward/nothing'" in said
    assert "torch.__trace" not in said, "torch's own records hide the difference"

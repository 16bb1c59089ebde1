"""Messages from rank to rank as collectives; and that Inductor keeps their order."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.gpt import GPT, GPTConfig
from osdp_compile import Decision
from osdp_compile.runtime.collectives import GLOO_STAGES
from osdp_compile.runtime.eager_markers import register_group
from osdp_compile.runtime.p2p import group_uses_p2p, staged_kinds
from tests.training import SLOW, mixed_plan

WAIT = torch.ops._c10d_functional.wait_tensor


def many_in_flight(rank, world_size):
    """Gathers and exchanges of all sizes at once, waited for from the last to the first."""
    group = register_group(dist.group.WORLD)
    started = []
    for size in [1, 7, 100_000, 3, 50_000, 0, 12, 300_000] * 3:
        part = torch.arange(size, dtype=torch.float64) + 1000 * rank
        started.append((torch.ops.osdp.gather_parts(part, world_size, group), part, "gather"))
        packed = torch.stack([part * 10**target for target in range(world_size)]).view(-1)
        started.append((torch.ops.osdp.exchange(packed, world_size, group), part, "exchange"))
    wrong = []
    for result, part, kind in reversed(started):
        expected = [part + 1000 * (other - rank) for other in range(world_size)]
        if kind == "exchange":
            expected = [row * 10**rank for row in expected]
        if not torch.equal(WAIT(result), torch.cat(expected)):
            wrong.append((kind, len(part)))
    return wrong


def beside_a_scripts_own_messages(rank, world_size):
    """Someone's send and recv between the start and the wait get their own messages."""
    group = register_group(dist.group.WORLD)
    gathered = torch.ops.osdp.gather_parts(torch.full((5,), float(rank)), world_size, group)
    other = torch.empty(5)
    if rank == 0:
        dist.send(torch.full((5,), 70.0), 1)
        dist.recv(other, 1)
    else:
        dist.recv(other, 0)
        dist.send(torch.full((5,), 71.0), 0)
    return other[0].item(), WAIT(gathered).tolist()


def test_many_messages_in_flight(two_ranks, four_ranks):
    assert two_ranks.run(many_in_flight) == [[]] * 2
    assert four_ranks.run(many_in_flight) == [[]] * 4


def test_messages_of_the_script_do_not_meet_ours(two_ranks):
    gathered = [0.0] * 5 + [1.0] * 5
    assert two_ranks.run(beside_a_scripts_own_messages) == [(71.0, gathered), (70.0, gathered)]


CALL = re.compile(
    r"(?:torch\.ops\.)?"
    r"(osdp\.gather_parts|osdp\.exchange|_c10d_functional\.(?:all_reduce|all_gather_into_tensor"
    r"|reduce_scatter_tensor|all_to_all_single|wait_tensor))(?:_|_out)?(?:\.default)?\("
)


def order_in_code(rank, world_size, device="cpu"):
    """The collectives in the scheduled graphs, and in the code that Inductor made of them."""
    config = GPTConfig(vocab=61, layers=1, width=64, heads=2, context=12)
    model = GPT(config).to(device)
    decisions = [Decision.SHARD_REGATHER, Decision.REPLICATE, Decision.SHARD_KEEP]
    plan = mixed_plan(model, decisions, bucket_bytes=4096, world_size=world_size)
    tokens = torch.zeros(2, 12, dtype=torch.long, device=device)
    with tempfile.TemporaryDirectory() as folder:
        options = {"plan": plan, "hardware": SLOW, "debug": folder}
        compiled = torch.compile(model, backend="osdp", options=options)
        # Code from the cache of graphs would not be seen; compiled kernels may come from theirs.
        with torch._inductor.config.patch(fx_graph_cache=False):
            _, codes = run_and_get_code(lambda: compiled(tokens, tokens).backward())
        texts = [path.read_text() for path in sorted(Path(folder).glob("*-reorder.txt"))]
    return [CALL.findall(text) for text in texts], [
        CALL.findall(code.split("def call(")[-1]) for code in codes
    ]


@pytest.mark.inductor
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_generated_code_keeps_the_order(two_ranks):
    in_graphs, in_code = two_ranks.run(order_in_code)[0]
    assert len(in_graphs) == 2  # forward and backward
    on_the_spot = 0
    for calls in in_graphs:
        assert {"osdp.gather_parts", "_c10d_functional.wait_tensor"} <= set(calls)
        starts = [not call.endswith("wait_tensor") for call in calls]
        on_the_spot += starts == [True, False] * (len(starts) // 2)
    assert on_the_spot < 2, "nothing is started ahead: the order shows nothing"
    assert in_code == in_graphs


@pytest.mark.parametrize(("backend", "wanted"), [(None, True), ("gloo", True), ("fake", False)])
def test_gloo_is_known_also_where_nobody_named_it(tmp_path, backend, wanted):
    store = FakeStore() if backend == "fake" else dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        assert group_uses_p2p(dist.group.WORLD, torch.device("cpu")) == wanted
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("native", "kinds"), [("0", frozenset()), ("1", GLOO_STAGES)])
def test_only_gloos_own_collectives_copy_the_whole_tensor(monkeypatch, native, kinds):
    monkeypatch.setenv("OSDP_NATIVE_COLLECTIVES", native)
    monkeypatch.setattr("osdp_compile.runtime.p2p.backend_of", lambda group, device_type: "gloo")
    assert staged_kinds(None, torch.device("cpu")) == kinds
    assert group_uses_p2p(None, torch.device("cuda")), "its own gather reads GPU memory as a CPU's"
    assert staged_kinds(None, torch.device("cuda")) == frozenset()
    monkeypatch.setattr("osdp_compile.runtime.p2p.backend_of", lambda group, device_type: "nccl")
    assert staged_kinds(None, torch.device("cuda")) == frozenset()

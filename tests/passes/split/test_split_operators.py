"""Split: slices of operators compute what the whole ones do, on any number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.capture.captured_step import lay_out
from passes.graph.fx_utils import is_collective
from passes.graph.metadata import COLLECTIVE, GRADIENT_OF
from passes.ops.slicing import JOIN_SLICES, PAD_SLICE, TAKE_SLICE, TRIM_SLICE, cut_into
from passes.pipeline import Stage, default_passes, run
from passes.pricing.predict import predict
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Phase
from passes.types.decision import Decision
from passes.types.plan import OF_INPUT, Plan
from tests.chosen import more
from tests.passes.capture.test_captured_step import Training, decided
from tests.passes.captures import capture_step

AGAIN = Decision.SHARD_REGATHER


class Mlp(nn.Module):
    """Two linears with an activation between them; x: [batch, 6]."""

    def __init__(self, hidden: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up = nn.Linear(6, hidden, bias=bias)
        self.down = nn.Linear(hidden, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(torch.tanh(self.first(x)))))


class Gated(nn.Module):
    """A gated MLP with a residual; x: [batch, tokens, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up = nn.Linear(6, 16, bias=False)
        self.gate = nn.Linear(6, 16, bias=False)
        self.down = nn.Linear(16, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Words(nn.Module):
    """An embedding and a head; tokens: [batch, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.words(tokens))))


class Guessing(nn.Module):
    """An embedding, a head, and the loss of guessing the tokens; tokens: [batch, tokens]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(torch.tanh(self.mix(self.words(tokens)))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Experts(nn.Module):
    """A batched weight, of which each expert takes its own rows; x: [experts, rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(5, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.tanh(self.mix(x)), self.weight)


def sliced(
    plan: Plan, rows: Mapping[str, tuple[int, int, str | None]], kept_slices: int = 0
) -> Plan:
    """The plan with some parameters in slices: how many, along what, like whose rows.

    ``kept_slices``: how many of each are kept.
    """
    found = []
    for row in plan.parameters:
        if row.name in rows:
            slices, along, like = rows[row.name]
            row = dataclasses.replace(
                row, slices=slices, along=along, like=like, kept_slices=kept_slices
            )
        found.append(row)
    return plan.replace(parameters=tuple(found))


def trained(model: nn.Module, batches: list[Tensor]) -> Training:
    return Training(model, batches, [torch.randn_like(model(batch)) for batch in batches])


def check_step(
    training: Training,
    rows: Mapping[str, tuple[int, int, str | None]],
    decision: Decision = AGAIN,
    recompute: tuple[str, ...] = (),
    kept_slices: int = 0,
    **changes: object,
) -> None:
    """Every rank's output, and its part of the mean gradients, are those of eager PyTorch."""
    world_size = len(training.batches)
    captured, ctx = capture_step(
        training.model, training.batches[0], world_size=world_size, **changes
    )
    plan = sliced(decided(ctx, decision, bucket_bytes=0), rows, kept_slices)
    plan = plan.replace(recompute=recompute)
    contexts = [ctx.replace(rank=rank) for rank in range(world_size)]
    training.check(captured, contexts, plan)


@pytest.mark.parametrize(
    ("world_size", "slices", "hidden", "uses_p2p"),
    [
        (2, 2, 48, False),
        (2, 3, 48, True),
        (2, 8, 23, False),
        (4, 2, 23, True),
        (4, 4, 48, True),
        (4, 4, 23, False),
        (3, 3, 23, False),
    ],
)
def test_the_two_linears_of_an_mlp(world_size: int, slices: int, hidden: int, uses_p2p: bool):
    torch.manual_seed(0)
    model = Mlp(hidden, bias=True)
    batches = [torch.randn(3, 6) for _ in range(world_size)]
    rows = {"up.weight": (slices, 0, None), "down.weight": (slices, 1, "up.weight")}
    check_step(trained(model, batches), rows, uses_p2p=uses_p2p)


UP_AND_DOWN = ("up.weight", "down.weight")


def in_slices(slices: int) -> dict[str, tuple[int, int, str | None]]:
    """The two linears of an MLP."""
    return {"up.weight": (slices, 0, None), "down.weight": (slices, 1, "up.weight")}


@pytest.mark.parametrize("decision", [Decision.SHARD_KEEP, Decision.REPLICATE])
@pytest.mark.parametrize(("slices", "hidden"), [(2, 48), (4, 23), (3, 23)])
def test_the_two_linears_of_an_mlp_kept_or_replicated(slices: int, hidden: int, decision: Decision):
    torch.manual_seed(0)
    batches = [torch.randn(3, 6) for _ in range(2)]
    training = trained(Mlp(hidden, bias=True), batches)
    check_step(training, in_slices(slices), decision)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("name", ["up.weight", "down.weight"])
def test_a_linear_by_itself(name: str, slices: int, along: int):
    torch.manual_seed(0)
    batches = [torch.randn(3, 6) for _ in range(2)]
    check_step(trained(Mlp(23, bias=True), batches), {name: (slices, along, None)})


def test_operators_in_slices_right_behind_one_another():
    """The first slice of the third linear reads what the last slice of the second has added."""
    torch.manual_seed(0)
    sizes = (6, 16, 8, 12, 6)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    batches = [torch.randn(3, 6) for _ in range(2)]
    rows = {
        "0.weight": (2, 0, None),
        "1.weight": (2, 1, "0.weight"),
        "2.weight": (3, 0, None),
        "3.weight": (3, 1, "2.weight"),
    }
    check_step(trained(model, batches), rows)


@pytest.mark.parametrize("slices", [2, 3])
def test_a_gated_mlp(slices: int):
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 6) for _ in range(2)]
    rows = {
        "up.weight": (slices, 0, None),
        "gate.weight": (slices, 0, None),
        "down.weight": (slices, 1, "up.weight"),
    }
    check_step(trained(Gated(), batches), rows)


@pytest.mark.parametrize("decision", [AGAIN, Decision.SHARD_KEEP, Decision.REPLICATE])
@pytest.mark.parametrize(("slices", "again"), [(2, False), (3, True), *more((2, True), (3, False))])
def test_a_head_and_its_loss_by_tokens(slices: int, again: bool, decision: Decision):
    torch.manual_seed(0)
    batches = [torch.randint(0, 64, (2, 5)) for _ in range(2)]
    training = trained(Guessing(), batches)
    recompute = logits_of(training.model, batches[0]) if again else ()
    check_step(training, {"head.weight": (slices, OF_INPUT, None)}, decision, recompute)


def logits_of(model: nn.Module, batch: Tensor) -> tuple[str, ...]:
    """Keys of what the forward saves of the size of the logits."""
    captured, _ = capture_step(model, batch, world_size=2)
    cut = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    keys = keys_of(captured.forward.graph)
    found = tuple(keys[node] for node in cut.saved if 64 in node.meta["val"].shape and node in keys)
    assert found
    return found


@pytest.mark.parametrize(("ranks", "hosts"), [(1, 1), (2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 5, 12, 16, 23])
def test_slices_of_a_dimension_are_put_together_again(
    size: int, count: int, ranks: int, hosts: int
):
    whole = torch.randn(2, size, 3)
    cut = cut_into(size, count, ranks, hosts)
    parts = [TAKE_SLICE(whole, 1, cut.count, i, ranks, hosts) for i in range(cut.count)]
    assert [part.shape[1] for part in parts] == [cut.part(i) for i in range(cut.count)]
    assert all(part.shape[1] for part in parts)
    assert torch.equal(JOIN_SLICES(parts, 1, size, ranks, hosts), whole)
    for index, part in enumerate(parts):
        rows = part.transpose(0, 1)
        padded = PAD_SLICE(rows, size, cut.count, index, ranks, hosts)
        assert padded.shape[0] == ranks * cut.strip
        assert torch.equal(TRIM_SLICE(padded, size, cut.count, index, ranks, hosts), rows)


def test_nothing_of_an_mlp_is_there_in_one_piece():
    captured, ctx = capture_step(Mlp(48, bias=False), torch.randn(3, 6), world_size=2)
    rows = {"up.weight": (4, 0, None), "down.weight": (4, 1, "up.weight")}
    plan = sliced(decided(ctx, AGAIN, bucket_bytes=0), rows)
    laid = lay_out(captured, plan, ctx, default_passes())
    names: list[str] = []
    for gm, phase in ((laid.forward, Phase.FORWARD), (laid.backward, Phase.BACKWARD)):
        lowered = run(default_passes(), Stage.PARTS, gm, ctx.replace(plan=plan, phase=phase))
        for node in lowered.graph.nodes:
            value = node.meta.get("val")
            if is_collective(node):
                names.extend(one for one in COLLECTIVE.of(node).names if "#" in one)
            if isinstance(value, Tensor) and not GRADIENT_OF.is_set(node):
                local = node.op == "placeholder" and value.shape[0] in (24, 6, 3)
                assert local or 48 not in value.shape, node
    # Each is gathered twice and reduced once.
    assert len(names) == 2 * 4 * 3


@pytest.mark.parametrize("limited", [False, True])
def test_the_more_slices_the_less_memory(limited: bool):
    captured, ctx = capture_step(Mlp(512, bias=False), torch.randn(3, 6), world_size=2)
    ctx = ctx.replace(deciding=True, limit_bytes=1 if limited else None)
    peaks = []
    for slices in (1, 2, 4, 8):
        rows = {"up.weight": (slices, 0, None), "down.weight": (slices, 1, "up.weight")}
        plan = sliced(decided(ctx, AGAIN, bucket_bytes=0), rows)
        step = predict(captured, plan, ctx, default_passes())
        peaks.append(max(one.peak_bytes for one in step.simulations))
    if limited:  # with nothing in flight
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[0] > peaks[1] > peaks[2]
    else:
        assert peaks[-1] < peaks[0]

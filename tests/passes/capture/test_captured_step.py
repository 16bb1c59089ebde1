"""Captured steps, laid out by a plan and lowered, train as one process does: no real ranks.

Every rank runs its own forward and backward graphs on its own batch; the gradients must be
the mean of what eager PyTorch gives for each batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, fx, nn

from passes.capture.captured_step import lay_out
from passes.graph.captured import Captured
from passes.graph.metadata import GRADIENT_OF, PARAMETER
from passes.graph.step_module import step_module
from passes.graph.verifier import check, check_step
from passes.pipeline import Stage, default_passes, run
from passes.types.context import Context, Phase
from passes.types.decision import FLAT_DECISIONS, Decision
from passes.types.plan import Plan, shardable
from tests.passes.captures import capture_step
from tests.passes.graphs import plan_of, ranks_along
from tests.passes.ranks_interpreter import run_ranks

KEEP, AGAIN, REPLICATE = Decision.SHARD_KEEP, Decision.SHARD_REGATHER, Decision.REPLICATE


class Tied(nn.Module):
    """An embedding used again as the head, a weight used twice, a norm, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.twice.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = self.norm(torch.tanh(self.twice(torch.tanh(self.twice(hidden)))))
        return hidden @ self.embedding.weight.t()


@dataclasses.dataclass
class Training:
    """A model, a batch for each rank, and a gradient of each rank's output."""

    model: nn.Module
    batches: list[Tensor]
    tangents: list[Tensor]

    @classmethod
    def tied(cls, world_size: int) -> Training:
        torch.manual_seed(0)
        model = Tied()
        batches = [torch.randint(0, 11, (2, 5)) for _ in range(world_size)]
        return cls(model, batches, [torch.randn(2, 5, 11) for _ in range(world_size)])

    def wanted(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Each rank's output, and the mean gradients, by eager PyTorch."""
        world_size = len(self.batches)
        outputs = [self.model(batch) for batch in self.batches]
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        loss = sum(
            (output * tangent).sum() / world_size
            for output, tangent in zip(outputs, self.tangents, strict=True)
        )
        gradients = torch.autograd.grad(loss, list(trained.values()))  # type: ignore[arg-type]
        return [o.detach() for o in outputs], dict(zip(trained, gradients, strict=True))

    def found(
        self, captured: Captured, contexts: list[Context], plan: Plan
    ) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """Each rank's output and its gradients, by the lowered graphs."""
        laid = [lay_out(captured, plan, ctx, default_passes()) for ctx in contexts]
        for one in laid:
            check_step(step_module(one.forward, one.backward), "lay_out")
        lowered: dict[Phase, list[fx.GraphModule]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        for rank, ctx in enumerate(contexts):
            for phase, gm in zip(lowered, (laid[rank].forward, laid[rank].backward), strict=True):
                local = ctx.replace(plan=plan, phase=phase)
                lowered[phase].append(
                    run(default_passes(), Stage.PARTS, gm, local, lambda p, g, _: check(g, p.name))
                )
        whole = dict(self.model.named_parameters())
        inputs = []
        for rank, gm in enumerate(lowered[Phase.FORWARD]):
            values: list[Tensor] = []
            for node in gm.graph.find_nodes(op="placeholder"):
                name = PARAMETER.get(node)
                if name is None:
                    values.append(self.batches[rank])
                    continue
                value = whole[name].detach()
                if plan.decision(name).sharded:
                    cut = contexts[rank].replace(plan=plan).layout_of(name)
                    first, last = cut.rows(value.shape[cut.dim])
                    value = value.narrow(cut.dim, first, last - first).clone()
                values.append(value)
            inputs.append(values)
        dims = contexts[0].mesh_dims
        groups = None if dims is None else ranks_along(dims[0].size, len(contexts))
        outputs = run_ranks(lowered[Phase.FORWARD], inputs, groups)
        # The forward returns its output, then what is saved, then weights kept by the plan.
        backward_inputs = []
        for rank, gm in enumerate(lowered[Phase.BACKWARD]):
            saved = iter(outputs[rank][1:])
            given = [
                self.tangents[rank] if node.name.startswith("tangents") else next(saved)
                for node in gm.graph.find_nodes(op="placeholder")
            ]
            assert not list(saved)
            backward_inputs.append(given)
        returned = run_ranks(lowered[Phase.BACKWARD], backward_inputs, groups)
        return [output[0] for output in outputs], [
            _by_name(gm, values)
            for gm, values in zip(lowered[Phase.BACKWARD], returned, strict=True)
        ]

    def check(self, captured: Captured, contexts: list[Context], plan: Plan) -> None:
        """Every rank's output, and its part of the mean gradients, are those of eager PyTorch."""
        outputs, gradients = self.found(captured, contexts, plan)
        wanted_outputs, wanted_gradients = self.wanted()
        torch.testing.assert_close(outputs, wanted_outputs)
        for rank, found in enumerate(gradients):
            assert set(found) == set(wanted_gradients)
            for name, gradient in wanted_gradients.items():
                if plan.decision(name).sharded:
                    cut = contexts[rank].replace(plan=plan).layout_of(name)
                    first, last = cut.rows(gradient.shape[cut.dim])
                    gradient = gradient.narrow(cut.dim, first, last - first)
                torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


def _by_name(gm: fx.GraphModule, values: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    nodes = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    return {
        GRADIENT_OF.of(node): value
        for node, value in zip(nodes, values, strict=True)
        if value is not None
    }


def decided(ctx: Context, decisions: Mapping[str, Decision] | Decision, **changes: int) -> Plan:
    """A plan; what cannot be sharded is replicated."""
    chosen = {}
    for p in ctx.parameters:
        wanted = decisions if isinstance(decisions, Decision) else decisions[p.name]
        chosen[p.name] = wanted if shardable(p.shape, ctx.world_size) else REPLICATE
    return plan_of(ctx.parameters, chosen, ctx.world_size, **changes)


MIXED = {
    "embedding.weight": AGAIN,
    "twice.weight": KEEP,
    "twice.bias": AGAIN,
    "norm.weight": REPLICATE,
    "norm.bias": KEEP,
}


CASES = [
    *[(world_size, MIXED, size, False) for world_size in (2, 3, 4) for size in (0, 1 << 20)],
    *[(world_size, MIXED, 1 << 20, True) for world_size in (2, 3, 4)],
    *[(3, decision, 100, exchange) for decision in FLAT_DECISIONS for exchange in (False, True)],
]


@pytest.mark.parametrize(("world_size", "decisions", "bucket_bytes", "uses_p2p"), CASES)
def test_a_lowered_step_gives_eager_outputs_and_mean_gradients(
    world_size: int,
    decisions: Mapping[str, Decision] | Decision,
    bucket_bytes: int,
    uses_p2p: bool,
):
    training = Training.tied(world_size)
    captured, ctx = capture_step(
        training.model, training.batches[0], world_size=world_size, uses_p2p=uses_p2p
    )
    plan = decided(ctx, decisions, bucket_bytes=bucket_bytes)
    contexts = [ctx.replace(rank=rank) for rank in range(world_size)]
    training.check(captured, contexts, plan)

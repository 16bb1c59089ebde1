"""Recompute: a plan that is made on a CPU recomputes attention on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from passes.graph.captured import Captured
from passes.pipeline import default_passes
from passes.pricing.predict import predict
from passes.recompute.recompute_activations import PartitionBoundary, keys_of
from passes.types.context import Context
from passes.types.decision import Decision
from passes.types.plan import Plan
from tests.passes.captures import capture_step
from tests.passes.graphs import plan_of
from tests.passes.move import gpu_attention
from tests.passes.move.test_heads import SIZE, WIDTH, Attention, OnGpu


class OnCpu(Attention):
    """Causal attention by the operator of the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, -1, SIZE).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return out


def recomputing(captured: Captured, ctx: Context) -> Plan:
    """A plan that recomputes all that can be."""
    cut = PartitionBoundary(captured.forward.graph, captured.backward.graph)
    keys = keys_of(captured.forward.graph)
    again = (keys[one] for one in sorted(cut.saved) if one in keys and cut.chain(one) is not None)
    decisions = {one.name: Decision.SHARD_REGATHER for one in ctx.parameters}
    return plan_of(ctx.parameters, decisions, ctx.world_size).replace(recompute=tuple(again))


@pytest.mark.parametrize("kind", gpu_attention.KINDS)
def test_a_plan_made_on_a_cpu_recomputes_attention_on_a_gpu(kind: str) -> None:
    kept = gpu_attention.register()
    batch = torch.randn(3, 5, WIDTH)
    plan = recomputing(*capture_step(OnCpu(), batch, world_size=2))
    assert len([key for key in plan.recompute if ":getitem:" in key]) == 2  # of the attention
    captured, ctx = capture_step(OnGpu(kind), batch, world_size=2)
    found = predict(captured, plan, ctx.replace(deciding=True), default_passes()).prediction
    assert found.recomputed_bytes > 0
    del kept

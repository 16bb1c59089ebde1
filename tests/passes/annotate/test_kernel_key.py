"""Kernel key: equal for what takes equal time and memory, different for anything else."""

from __future__ import annotations

import torch

from passes.annotate.kernel_key import kernel_key
from tests.passes.graphs import GraphBuilder

aten = torch.ops.aten


def pooled(shape, stride=2, dtype=torch.float32, transposed=False):
    b = GraphBuilder()
    x = b.input("x", shape, dtype)
    if transposed:
        x = b.call(aten.transpose.int, x, 2, 3)
    return kernel_key(b.call(aten.avg_pool2d.default, x, [2, 2], [stride, stride]))


def test_names_of_nodes_do_not_matter_and_all_else_does():
    usual = pooled([1, 2, 8, 8])
    assert usual == pooled([1, 2, 8, 8])
    assert usual.startswith("aten.avg_pool2d.default ")
    others = [
        pooled([1, 2, 8, 4]),
        pooled([1, 2, 8, 8], stride=1),
        pooled([1, 2, 8, 8], dtype=torch.bfloat16),
        pooled([1, 2, 8, 8], transposed=True),
    ]
    assert len({usual, *others}) == 5

"""Realized tensors: the buffers that the model counts are those that Inductor allocates."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from passes.annotate.fusion_regions import materialized, regions
from passes.graph.dataflow import Dataflow
from tests.passes.inductor_code import code_of

pytestmark = pytest.mark.inductor

SMALL, LARGE = (32, 1, 16), (32, 24, 16)


def many_reads(s, x):
    """Five tensors are read, and two readers need the result in loops of other sizes."""
    both = s[0] + s[1] * s[2] - s[3] * s[4]
    return x * both, (x + both).sum(0)


def few_reads(s, x):
    both = s[0] + s[1]
    return x * both, (x + both).sum(0)


def many_reads_same_size(s, x):
    both = s[0] + s[1] * s[2] - s[3] * s[4]
    return both * 2, both.sum(0)


def one_user(s, x):
    return (x * (s[0] + s[1] * s[2] - s[3] * s[4]),)


def users_of_a_view(s, x):
    """The result has one user, its view; the view has two."""
    both = (s[0] + s[1] * s[2] - s[3] * s[4]).view(32, 16, 1).transpose(1, 2)
    return x * both, (x + both).sum(0)


def heavy_and_broadcast(s, x):
    return (x * s[0].exp(),)


def light_and_broadcast(s, x):
    return (x * s[0].abs(),)


def heavy_with_two_users(s, x):
    root = s[0].sigmoid()
    return x * root, (x + root).sum(0)


def reads_of_more_than_one_loop(s, x):
    """Thirteen tensors are read: more than a loop accumulates."""
    total = s[0]
    for other in s[1:14]:
        total = total * other
    return (x * total,)


def inlined_in_between(s, x):
    """The loop that reads the result is that of its reader's reader."""
    both = s[0] + s[1] * s[2] - s[3] * s[4]
    return x * (both + 1), x - (both * 3)


def norm(s, x):
    mean = x.mean(-1, keepdim=True)
    return ((x - mean) * (x.var(-1, keepdim=True) + 1e-5).rsqrt(),)


def norm_of_two_results(s, x):
    var, mean = torch.var_mean(x, -1, keepdim=True)
    return ((x - mean) * (var + 1e-5).rsqrt(),)


def light_on_both_sides_of_a_product(s, x):
    root = s[0].view(32, 16).abs()
    return ((root * ((root * 2) @ s[1].view(32, 16).t() @ s[2].view(32, 16))).sum(0),)


def heavy_on_both_sides_of_a_product(s, x):
    root = s[0].view(32, 16).exp()
    return ((root * ((root * 2) @ s[1].view(32, 16).t() @ s[2].view(32, 16))).sum(0),)


def read_by_a_product_and_later(s, x):
    root = s[0].view(32, 16).abs()
    return ((root * (root @ s[1].view(32, 16).t() @ s[2].view(32, 16))).sum(0),)


def returned_and_read_later(s, x):
    """Of the sum, two loads are left: the returned tensor is loaded as one."""
    root = s[0] + s[1] + s[2] + s[3]
    both = root + s[4]
    return root, x * both, (x + both).sum(0)


def concatenated(s, x):
    """A pointwise result reads a concatenation, which is a buffer nevertheless."""
    return (torch.cat([s[0], s[1] + s[2]], 1) * 2,)


def concatenated_views(s, x):
    """As rotary embeddings do."""
    both = torch.cat([-s[0][..., 8:], s[0][..., :8]], -1)
    return (s[0] * s[1] + both * s[2],)


def concatenated_and_reduced(s, x):
    return (torch.softmax(torch.cat([s[0], x], 1).sum(1), -1),)


def heavy_part_of_a_concatenation(s, x):
    """The part is written once, into the concatenation."""
    root = s[0].sigmoid()
    return torch.cat([root, s[1]], 1) * 2, root * 2


def concatenation_of_one(s, x):
    return (torch.cat([s[0] + s[1]], 1) * 2,)


def concatenation_with_an_empty_part(s, x):
    return (torch.cat([s[0] + s[1], s[2].view(-1)[:0]], 1) * 2,)


FUNCTIONS = (
    many_reads,
    few_reads,
    many_reads_same_size,
    one_user,
    users_of_a_view,
    heavy_and_broadcast,
    light_and_broadcast,
    heavy_with_two_users,
    reads_of_more_than_one_loop,
    inlined_in_between,
    norm,
    norm_of_two_results,
    light_on_both_sides_of_a_product,
    heavy_on_both_sides_of_a_product,
    read_by_a_product_and_later,
    returned_and_read_later,
    concatenated,
    concatenated_views,
    concatenated_and_reduced,
    heavy_part_of_a_concatenation,
    concatenation_of_one,
    concatenation_with_an_empty_part,
)


def inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    return [torch.rand(SMALL) for _ in range(14)], torch.rand(LARGE)


def predicted(function) -> list[int]:
    """Elements of the buffers that the model counts."""
    gm = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs())
    dataflow = Dataflow(gm.graph)
    real = materialized(dataflow, regions(dataflow))
    return sorted(
        node.meta["val"].numel()
        for node, there in zip(dataflow.nodes, real, strict=True)
        if there and node.op == "call_function"
    )


def allocated(function) -> list[int]:
    """Elements of the buffers in Inductor's code."""
    torch._dynamo.reset()
    with config.patch(allow_buffer_reuse=False):
        code = code_of(torch.compile(function), *inputs())
    shapes = re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code)
    return sorted(
        math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes
    )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_buffers_are_inductors(function) -> None:
    assert predicted(function) == allocated(function)

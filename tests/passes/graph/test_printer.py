"""The canonical text: what it says of each node, and that all ranks print the same."""

from __future__ import annotations

import pytest
import torch

from passes.graph.fx_utils import ALL_REDUCE, WAIT
from passes.graph.printer import graph_text
from passes.shard.dedupe_markers import dedupe
from tests.passes.graphs import GROUP, GraphBuilder, context
from tests.passes.steps import LOWERING, Step, Weight

aten = torch.ops.aten


def text_of(builder: GraphBuilder, *outputs: torch.fx.Node | None) -> list[str]:
    return graph_text(builder.finish(*outputs), context()).splitlines()


def test_a_node_is_a_line_of_type_operator_and_arguments():
    b = GraphBuilder()
    x = b.input("x", [3, 4], torch.bfloat16)
    added = b.call(aten.add.Tensor, x, 1.5, alpha=2)
    joined = b.call(aten.cat.default, [x, added], 1)
    assert text_of(b, joined, None) == [
        "%0: bf16[3,4] = input[saved]",
        "%1: bf16[3,4] = add.Tensor(%0, 1.5, alpha=2)",
        "%2: bf16[3,8] = cat([%0, %1], 1)",
        "return [%2, None]",
    ]


def test_inputs_are_told_by_what_they_are():
    b = GraphBuilder()
    b.input("primals_1", [2], parameter="layer.weight")
    b.input("primals_2", [2], input="running_mean")
    b.input("mm", [2])
    assert [line.split("= ")[1] for line in text_of(b)[:3]] == [
        "input[layer.weight]",
        "input[running_mean]",
        "input[saved]",
    ]


def test_types_and_devices_are_printed_short():
    b = GraphBuilder()
    x = b.input("x", [2])
    full = b.call(aten.full.default, [2], 0, dtype=torch.int64, device=torch.device("cpu"))
    cast = b.call(aten._to_copy.default, x, dtype=torch.float16)
    lines = text_of(b, full, cast)
    assert lines[1] == "%1: i64[2] = full([2], 0, device=cpu, dtype=i64)"
    assert lines[2] == "%2: f16[2] = _to_copy(%0, dtype=f16)"


def test_several_results_are_counted():
    b = GraphBuilder()
    both = b.call(aten.sort.default, b.input("x", [2]))
    assert text_of(b, both)[1] == "%1: (2 values) = sort(%0)"


def test_a_process_group_is_named_by_its_role():
    b = GraphBuilder()
    wait = b.call(WAIT, b.call(ALL_REDUCE, b.input("x", [2]), "sum", GROUP))
    lines = text_of(b, wait)
    assert lines[1].endswith("all_reduce(%0, 'sum', <data-parallel group>)")
    assert GROUP not in "\n".join(lines)


def test_names_of_nodes_do_not_show():
    def text(name: str) -> list[str]:
        b = GraphBuilder()
        return text_of(b, b.call(aten.sin.default, b.input(name, [2])))

    assert text("x") == text("primals_17")


def test_a_collective_says_what_it_is_for():
    step = Step((Weight((4,)), Weight((6,))), bucket_bytes=1000)
    text = graph_text(step.lower(0, *LOWERING), step.context(0))
    assert "# gather w0+w1" in text
    assert "# reduce w1+w0" in text


@pytest.mark.parametrize("bucket_bytes", [0, 1000])
@pytest.mark.parametrize("passes", [(), (dedupe,), LOWERING], ids=["markers", "dedupe", "lowered"])
def test_every_rank_prints_the_same_though_their_shards_differ(
    passes: tuple[object, ...], bucket_bytes: int
):
    # Five rows on four ranks: two, two, one and none.
    weights = (Weight((5, 2)), Weight((8,)), Weight((6, 3), transposed=True))
    step = Step(weights, world_size=4, bucket_bytes=bucket_bytes)
    texts = [graph_text(gm, step.context(rank)) for rank, gm in enumerate(step.lowered(*passes))]
    assert "f32[?,2] = input[w0]" in texts[0]
    assert "f32[2] = input[w1]" in texts[0]
    for rank, text in enumerate(texts):
        assert text == texts[0], f"rank {rank}"

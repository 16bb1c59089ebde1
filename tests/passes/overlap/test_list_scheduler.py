"""When collectives start, worked out by hand: what fills a queue, and what keeps one waiting."""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.graph.fx_utils import is_collective
from passes.graph.metadata import COLLECTIVE, COST
from passes.simulate.memory import memory_of
from passes.simulate.simulator import simulate
from passes.types.plan import Collective
from tests.passes.graphs import GROUP, price
from tests.passes.overlap import test_stage_schedule
from tests.passes.simulate.test_simulator import Priced


class Flat(Priced):
    """Collectives in one stage."""

    def collective(
        self, source: fx.Node, name: str, seconds: float, *, gathers: bool, memory_bytes: int = 0
    ) -> fx.Node:
        """Started and waited for on the spot; the wait."""
        start = self.gather(source, seconds, memory_bytes)
        COLLECTIVE.set(start, Collective((name,), gathers))
        return self.wait(start)


def scheduled(gm: fx.GraphModule, **changes: Any) -> str:
    """The order after ``reorder``: ``a`` starts a's collective, ``-a`` waits for it, ``k`` runs."""
    return test_stage_schedule.scheduled(gm, **changes).replace("0", "")


def gathers(kernel_seconds: float) -> fx.GraphModule:
    """Four kernels that use a, b, c and d; a gather takes 4 s."""
    b = Flat()
    weights = [b.tensor(name, static=True) for name in "abcd"]
    state = b.tensor("x")
    for name, weight in zip("abcd", weights, strict=True):
        whole = b.collective(weight, name, 4.0, gathers=True)
        state = b.kernel(state, whole, seconds=kernel_seconds)
    return b.finish(state)


def gradients(memory_bytes: int = 0) -> fx.GraphModule:
    """Four kernels of 1 s, each of which gives a gradient that takes 10 s to reduce.

    Each gradient, and what it is received into, has so many bytes.
    """
    b = Flat()
    state = b.tensor("x")
    reduced = []
    for name in "abcd":
        state = b.kernel(state, seconds=1.0)
        gradient = b.kernel(state, memory_bytes=memory_bytes)
        received = b.collective(gradient, name, 10.0, gathers=False, memory_bytes=memory_bytes)
        reduced.append(b.kernel(received))
    return b.finish(*reduced)


def test_a_queue_has_one_collective_more_than_it_needs():
    # When a is waited for, b is in line for when it has come, and c is one more.
    gm = gathers(1.0)
    assert scheduled(gm) == "a b c -a k d -b k -c k -d k"
    assert simulate(gm.graph).step_seconds == 17.0  # 4 gathers, and the last kernel


def test_a_queue_stays_filled_if_the_computing_is_slower_than_was_thought():
    gm = gathers(1.0)
    scheduled(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_collective(node) and COST.of(node).seconds:
            price(node, 1.5 * 4.0)  # each takes longer than a gather
    found = simulate(gm.graph)
    starts = sorted(found.start[node] for node in found.exposed)
    # Each begins as the one before ends; were b the last in line, c would at the kernel's end.
    assert starts == [0.0, 4.0, 8.0, 12.0]


def test_gradients_start_when_they_are_ready_if_no_gather_is_left():
    gm = gradients()
    order = scheduled(gm)
    for name in "abcd":
        ready = 2 * ("abcd".index(name) + 1)
        assert order.split(f" {name} ")[0].count("k") == ready, order


def test_a_gradient_starts_later_where_there_is_no_room_to_receive_it():
    free_bytes = memory_of(gradients(10).graph).peak_bytes
    plenty, tight = gradients(10), gradients(10)
    early = scheduled(plenty, limit_bytes=10 * free_bytes)
    late = scheduled(tight, limit_bytes=free_bytes)
    assert simulate(plenty.graph).peak_bytes > free_bytes
    assert simulate(tight.graph).peak_bytes <= free_bytes
    assert early == scheduled(gradients(10))
    assert late.index("-a") < late.index(" b ") < early.index("-a")


def beside_model(links: tuple[str, ...]) -> fx.GraphModule:
    """Kernels that use a, b, c and d, each after a model's own collective; all take 4 s."""
    b = Flat()
    weights = [b.tensor(name, static=True) for name in "abcd"]
    state = b.tensor("x")
    for name, weight in zip("abcd", weights, strict=True):
        state = b.of_model(state, 4.0, beside=links)
        whole = b.collective(weight, name, 4.0, gathers=True)
        state = b.kernel(state, whole, seconds=4.0)
    return b.finish(state)


def test_on_other_links_gathers_run_at_the_same_time_as_a_models_own_collective():
    gm = beside_model(())
    order = scheduled(gm)
    assert order.index("b") < order.index("m") < order.index("d")
    # Nothing but the model's collectives is exposed: 4 of them, and 4 kernels.
    assert simulate(gm.graph).step_seconds == 32.0


def test_on_the_same_links_no_gather_starts_directly_before_a_models_own_collective():
    gm = beside_model((GROUP,))
    order = scheduled(gm).split()
    before = [order[place - 1] for place, one in enumerate(order) if one == "m"]
    assert not set(before) & set("abcd"), order
    # The links are busy without a pause until the last kernel: 4 gathers and 4 of the model.
    found = simulate(gm.graph)
    assert found.step_seconds == 36.0
    assert found.model_seconds + sum(found.exposed.values()) == 20.0

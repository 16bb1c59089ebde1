"""When stages start and are waited for, and how long that takes, worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from passes.graph.fx_utils import WAIT, is_collective, is_model_collective
from passes.graph.metadata import COLLECTIVE
from passes.overlap.reorder_collectives import order_of, reorder
from passes.simulate.simulator import simulate
from passes.types.plan import Collective
from tests.passes.graphs import INNER, OUTER, context, price
from tests.passes.simulate.test_simulator import Priced


class InStages(Priced):
    """A gather takes 4 s between hosts and then 2 s within one; a reduction the other way round."""

    def collective(
        self,
        source: fx.Node,
        name: str,
        *,
        gathers: bool,
        bytes_of_stages: tuple[int, int] = (0, 0),
    ) -> fx.Node:
        """A collective's two stages, each waited for on the spot; the last wait."""
        found = source
        between, within = (OUTER, 4.0), (INNER, 2.0)
        stages = (between, within) if gathers else (within, between)
        for stage, (group, seconds) in enumerate(stages):
            start = self.gather(found, seconds, bytes_of_stages[stage], group)
            COLLECTIVE.set(start, Collective((name,), gathers, stage))
            found = self.wait(start)
        return found


def scheduled(gm: fx.GraphModule, **changes: Any) -> str:
    """The order after ``reorder``: ``a0`` starts a's first stage, ``-a0`` waits for it."""
    reorder(gm, context(**{"deciding": True, **changes}))
    return in_short(gm)


def in_short(gm: fx.GraphModule) -> str:
    def name(start: fx.Node) -> str:
        purpose = COLLECTIVE.of(start)
        return f"{purpose.names[0]}{purpose.stage}"

    found = []
    for node in gm.graph.nodes:
        if is_collective(node):
            found.append(name(node))
        elif is_model_collective(node):
            found.append("m")
        elif node.target is WAIT:
            found.append(f"-{name(node.args[0])}")  # type: ignore[arg-type]
        elif node.op == "call_function":
            found.append("k")
    return " ".join(found)


def three_gathers() -> fx.GraphModule:
    """A kernel of 3 s, and three of 1 s that use a, b and c."""
    b = InStages()
    weights = [b.tensor(name, static=True) for name in "abc"]
    state = b.kernel(b.tensor("x"), seconds=3.0)
    for name, weight in zip("abc", weights, strict=True):
        state = b.kernel(state, b.collective(weight, name, gathers=True), seconds=1.0)
    return b.finish(state)


# Between hosts there is always one more in line than the time until the next wait needs.
IN_TURN = "a0 b0 k c0 -a0 a1 -a1 k -b0 b1 -b1 k -c0 c1 -c1 k"


def test_one_gathers_second_stage_runs_beside_the_next_ones_first():
    gm = three_gathers()
    assert scheduled(gm) == IN_TURN
    found = simulate(gm.graph)
    times = {
        (COLLECTIVE.of(node).names[0], COLLECTIVE.of(node).stage): (
            found.start[node],
            found.end[node],
        )
        for node in found.exposed
    }
    # The network between hosts works from 0 to 12; one after the other it would be 18, flat.
    assert times == {
        ("a", 0): (0.0, 4.0),
        ("a", 1): (4.0, 6.0),
        ("b", 0): (4.0, 8.0),
        ("b", 1): (8.0, 10.0),
        ("c", 0): (8.0, 12.0),
        ("c", 1): (12.0, 14.0),
    }
    assert found.step_seconds == 15.0


def test_the_plans_order_gives_the_same_schedule_again():
    first, again = three_gathers(), three_gathers()
    scheduled(first)
    ctx = context()
    order = {"forward": order_of(first.graph)}
    assert scheduled(again, plan=ctx.plan.replace(order=order), deciding=False) == IN_TURN


def test_a_stage_that_has_ended_is_waited_for_at_the_next_kernel_and_the_next_stage_started():
    b = InStages()
    weight = b.tensor("a", static=True)
    state = b.kernel(b.tensor("x"), seconds=5.0)
    state = b.kernel(state, seconds=3.0)
    gm = b.finish(b.kernel(state, b.collective(weight, "a", gathers=True), seconds=1.0))
    assert scheduled(gm) == "a0 k -a0 a1 k -a1 k"
    found = simulate(gm.graph)
    assert (found.step_seconds, found.exposed_seconds) == (9.0, 0.0)


def gradients() -> fx.GraphModule:
    """Gradients a and b are ready after 1 s and 2 s; 9 s of computing follow, in three kernels."""
    b = InStages()
    first = b.kernel(b.tensor("x"), seconds=1.0)
    reduced = [b.collective(first, "a", gathers=False)]
    second = b.kernel(first, seconds=1.0)
    reduced.append(b.collective(second, "b", gathers=False))
    last = second
    for _ in range(3):
        last = b.kernel(last, seconds=3.0)
    return b.finish(last, *reduced)


def test_a_gradients_second_stage_starts_at_the_kernel_after_its_first():
    gm = gradients()
    # a: within its host from 1 to 3. b waits for that network from 2, and is there at 5. Between
    # hosts a runs from 5, the end of the kernel that began at 2, to 9; b after it until 13.
    assert scheduled(gm) == "k a0 k b0 k -a0 -b0 a1 b1 k k -a1 -b1"
    found = simulate(gm.graph)
    assert (found.step_seconds, found.exposed_seconds) == (13.0, 2.0)


def test_where_nothing_may_be_in_flight_all_stages_run_on_the_spot():
    assert scheduled(three_gathers(), limit_bytes=0, base_bytes=1) == (
        "k a0 -a0 a1 -a1 k b0 -b0 b1 -b1 k c0 -c0 c1 -c1 k"
    )
    assert scheduled(gradients(), in_flight_bytes=0) == "k a0 -a0 a1 -a1 k b0 -b0 b1 -b1 k k k"


def test_one_collective_in_flight_is_all_of_its_stages():
    # One gather may be ahead, whatever the plan's limit; a stage of the next one would be a second.
    assert scheduled(three_gathers(), in_flight_bytes=0) == (
        "a0 k -a0 a1 -a1 b0 k -b0 b1 -b1 c0 k -c0 c1 -c1 k"
    )


def test_a_second_stage_for_which_there_is_no_room_waits_until_it_is_needed():
    def step() -> fx.GraphModule:
        b = InStages()
        weight = b.tensor("a", static=True)
        state = b.kernel(b.tensor("x"), seconds=5.0, memory_bytes=10)
        state = b.kernel(state, seconds=3.0, memory_bytes=40)
        whole = b.collective(weight, "a", gathers=True, bytes_of_stages=(5, 40))
        return b.finish(b.kernel(state, whole, seconds=1.0, memory_bytes=10))

    assert scheduled(step(), limit_bytes=200) == "a0 k -a0 a1 k -a1 k"
    # While the second kernel runs 50 are alive, and the first stage's 5; at the last one 95.
    gm = step()
    assert scheduled(gm, limit_bytes=95) == "a0 k -a0 k a1 -a1 k"
    assert simulate(gm.graph).peak_bytes <= 95


def test_a_rank_whose_kernels_take_longer_or_hardly_any_time_starts_them_in_the_same_order():
    first = three_gathers()
    scheduled(first)
    order = order_of(first.graph)
    for seconds in (100.0, 1e-3):
        other = three_gathers()
        for node in other.graph.nodes:
            if not is_collective(node) and node.target is not WAIT and node.op == "call_function":
                price(node, seconds)
        plan = dataclasses.replace(context().plan, order={"forward": order})
        scheduled(other, plan=plan, deciding=False)
        assert order_of(other.graph) == order

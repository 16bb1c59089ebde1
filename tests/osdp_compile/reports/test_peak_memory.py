"""Measured memory of tensors whose size is known."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from osdp_compile import OsdpError, PeakMemory
from osdp_compile.runtime.collectives import all_gather_single

MIB = 1 << 20


def tensor(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB // 4)


def test_what_is_alive_at_once_is_counted():
    with PeakMemory() as memory:
        first = tensor(1)
        second = tensor(4)
        view = second.view(-1, 2)  # no bytes of its own
        del second, view
        third = tensor(2)
    assert memory.peak_bytes == 5 * MIB
    assert memory.current_bytes == 3 * MIB
    del first, third


def test_what_lived_before_does_not_count_even_when_it_dies_inside():
    with PeakMemory():
        known_to_the_first = tensor(8)
    old = tensor(8)
    with PeakMemory() as memory:
        del known_to_the_first, old
        new = tensor(1)
    assert (memory.peak_bytes, memory.current_bytes) == (MIB, MIB)
    del new


def test_a_training_step_counts_gradient_and_optimizer_state():
    with PeakMemory() as memory:
        weight = nn.Parameter(tensor(1))
        inputs = tensor(1)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        (weight * inputs).sum().backward()  # a gradient of 1 MiB; the product is gone by then
        optimizer.step()  # momentum of 1 MiB
        state_bytes = 4 * MIB
        optimizer.zero_grad()
    assert memory.peak_bytes == pytest.approx(state_bytes, abs=1024)
    assert memory.current_bytes == pytest.approx(state_bytes - MIB, abs=1024)
    del inputs


def test_a_second_measurement_begins_at_zero():
    memory = PeakMemory()
    for mib in (4, 1):
        with memory:
            held = tensor(mib)
            del held
        assert (memory.peak_bytes, memory.current_bytes) == (mib * MIB, 0)


def test_an_error_inside_comes_out_and_leaves_it_usable():
    with pytest.raises(ZeroDivisionError), PeakMemory():
        1 / 0  # noqa: B018
    with PeakMemory() as memory:
        held = tensor(1)
    assert memory.peak_bytes == MIB
    del held


def all_gather_measured(rank, world_size):
    """Peak and current bytes of gathering 1 MiB from each rank."""
    for wait_seconds in (0.2, 1.0, 5.0, 25.0):  # gloo's worker lets go of its tensors after the end
        with PeakMemory() as memory:
            part = tensor(1)
            whole = torch.empty(world_size * MIB // 4)
            all_gather_single(whole, part)
            time.sleep(wait_seconds)
            del part
        of_all = torch.tensor([memory.current_bytes])
        dist.all_reduce(of_all, op=dist.ReduceOp.MAX)  # all try again, or none
        if of_all.item() <= world_size * MIB + 8192:
            break
    return memory.peak_bytes, memory.current_bytes


def test_a_collective_leaves_nothing_behind(two_ranks):
    for peak_bytes, current_bytes in two_ranks.run(all_gather_measured):
        assert 3 * MIB <= peak_bytes <= 6 * MIB  # gloo may copy
        assert current_bytes == pytest.approx(2 * MIB, abs=8192)


def test_what_another_thread_frees_is_free():
    with PeakMemory() as memory:
        held = [tensor(8)]
        freeing = threading.Thread(target=held.clear)
        freeing.start()
        freeing.join()
        small = tensor(1)
    assert (memory.peak_bytes, memory.current_bytes) == (8 * MIB, MIB)
    del small


def test_what_was_measured_may_be_freed_after():
    with PeakMemory() as memory:
        held = tensor(8)
    del held
    with PeakMemory() as memory:
        held = tensor(2)
        held.resize_(MIB)  # elements: 4 MiB, while the 2 are still there
    assert (memory.peak_bytes, memory.current_bytes) == (6 * MIB, 4 * MIB)
    del held


def test_two_at_once_are_refused():
    with PeakMemory() as memory:
        held = tensor(1)
        with pytest.raises(OsdpError, match="measured already"), PeakMemory():
            pass
        other = tensor(1)
    assert memory.peak_bytes == 2 * MIB
    del held, other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_the_allocator_counts():
    with PeakMemory("cuda") as memory:
        first = torch.zeros(MIB, device="cuda")
        second = torch.zeros(MIB, device="cuda")
        del second
    assert memory.peak_bytes == 8 * MIB
    assert memory.current_bytes == 4 * MIB
    del first

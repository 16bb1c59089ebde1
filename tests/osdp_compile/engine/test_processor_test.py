"""Inductor's test of the processor runs before Inductor needs it, for CPUs only."""

from __future__ import annotations

from unittest import mock

import torch

from osdp_compile import _torch
from osdp_compile.engine.processor_test import start_processor_test


def test_a_thread_tests_what_inductor_asks_for():
    _torch.inductor.vector_instructions.cache_clear()
    thread = start_processor_test(torch.device("cpu"))
    thread.join()
    before = _torch.inductor.vector_instructions.cache_info()
    assert (before.misses, before.currsize) == (1, 1)
    _torch.inductor.vector_instructions()
    assert _torch.inductor.vector_instructions.cache_info().hits == before.hits + 1


def test_an_error_waits_for_inductor():
    with mock.patch.object(
        _torch.inductor, "vector_instructions", side_effect=OSError("no compiler")
    ):
        start_processor_test(torch.device("cpu")).join()


def test_a_gpu_needs_none():
    assert start_processor_test(torch.device("cuda")) is None

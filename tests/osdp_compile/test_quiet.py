"""Warnings of Inductor while it compiles: which rank shows which."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest

from osdp_compile import _torch
from osdp_compile.trace import fake_world

OWN = "TypedStorage is deprecated. It will be removed in the future"
ADVICE = "TensorFloat32 tensor cores are available but not enabled"
OF_USER = "the learning rate is zero"


def compiles_and_warns(*args, **kwargs):
    for text, module in (
        (OWN, "torch._inductor.select_algorithm"),
        (ADVICE, "torch._inductor.compile_fx"),
        (OF_USER, "train"),
    ):
        warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module)


@pytest.mark.parametrize("name", ["compile_fx", "compile_fx_inner"])
@pytest.mark.parametrize(("rank", "shown"), [(0, [ADVICE, OF_USER]), (1, [OF_USER])])
def test_rank_zero_hides_what_no_user_can_act_on_and_other_ranks_all_of_inductors(
    name, rank, shown
):
    with (
        fake_world(2, rank),
        mock.patch.object(_torch.inductor.entry, name, compiles_and_warns),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        getattr(_torch.inductor, name)(None, [])
    assert [str(one.message) for one in seen] == shown

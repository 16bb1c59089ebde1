"""Graphs that run node by node, as the passes leave them: no Inductor, no C++ compiler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from functorch.compile import make_boxed_func
from torch import fx

from osdp_compile import _torch

_compile_fx = _torch.inductor.compile_fx


def without_inductor() -> AbstractContextManager[Any]:
    """Partition, passes and autograd are those of a compiled step; only kernels are eager."""
    return mock.patch.multiple(_torch.inductor, compile_fx=_boxed_fx, compile_fx_inner=_boxed)


def _boxed(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    return make_boxed_func(gm.forward)


def _boxed_fx(gm: fx.GraphModule, inputs: list[Any], inner_compile: Any = _boxed, **kwargs: Any):
    return _compile_fx(gm, inputs, inner_compile=inner_compile, **kwargs)

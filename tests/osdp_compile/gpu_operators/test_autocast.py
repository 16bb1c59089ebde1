"""Autocast as on a GPU: its lists of operators, and the data types that they give."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from osdp_compile import _torch
from osdp_compile.gpu_operators import autocast
from osdp_compile.gpu_operators.autocast import as_autocast_of_gpus

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def in_header(name: str) -> set[str]:
    """The operators of a list in torch's header."""
    text = HEADER.read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"#define AT_FORALL_{name}\(_\)(.*)", text)
    if name == "DIFFERENT_REDISPATCH_SIGNATURE":
        return set(re.findall(r'"([\w.]+)"', line))
    return {one.replace(", ", ".") for one in re.findall(r"_\(([\w, ]+)\)", line)}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("FP32", autocast._WIDE),
        ("FP32_SET_OPT_DTYPE", autocast._WIDE_RESULT),
        ("DIFFERENT_REDISPATCH_SIGNATURE", autocast._WIDE_OVERLOAD),
        ("PROMOTE", autocast._WIDEST),
    ],
)
def test_the_lists_are_torchs(name, ours):
    """A version of torch may lack operators of a later one, and has no others."""
    theirs = in_header(name)
    assert theirs <= set(ours)
    later = set(ours) - theirs - {"linalg_matrix_sqrth"}
    assert not later & _torch.operators.autocast_operators("CUDA"), (
        "torch casts these in another way"
    )


def test_all_other_operators_that_torch_casts_are_narrow():
    others = in_header("LOWER_PRECISION_FP") | {"binary_cross_entropy"}
    others |= {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}
    lists = (autocast._WIDE, autocast._WIDE_RESULT, autocast._WIDE_OVERLOAD, autocast._WIDEST)
    assert _torch.operators.autocast_operators("CUDA") - set().union(*lists) <= others


x = torch.ones(4, 8)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], torch.dtype]] = {
    "linear": (F.linear, (x, x), BF16),
    "matmul": (torch.matmul, (x, x.T), BF16),
    "addmv": (torch.addmv, (x[:, 0], x, x[0]), BF16),
    "conv": (F.conv1d, (x[None], x[:, :4, None]), BF16),
    "layer norm": (lambda a: F.layer_norm(a, (8,)), (x.to(BF16),), F32),
    "group norm": (lambda a: F.group_norm(a, 2), (x.to(BF16),), F32),
    "softmax": (lambda a: a.softmax(-1), (x.to(BF16),), F32),
    "softmax with a type": (lambda a: a.softmax(-1, dtype=BF16), (x,), BF16),
    "log softmax": (lambda a: F.log_softmax(a, -1), (x.to(BF16),), F32),
    "cross entropy": (F.cross_entropy, (x.to(BF16), torch.zeros(4, dtype=torch.long)), F32),
    "mse": (F.mse_loss, (x.to(BF16), x.to(BF16)), F32),
    "sum": (torch.sum, (x.to(BF16),), F32),
    "sum over a dimension": (lambda a: a.sum(-1), (x.to(BF16),), F32),
    "sum of numbers": (torch.sum, (torch.ones(4, dtype=torch.long),), torch.long),
    "exp": (torch.exp, (x.to(BF16),), F32),
    "pow": (lambda a: a.pow(2), (x.to(BF16),), F32),
    "rsqrt": (torch.rsqrt, (x.to(BF16),), F32),
    "norm": (lambda a: torch.ops.aten.norm(a), (x.to(BF16),), F32),
    "norm over a dimension": (lambda a: torch.ops.aten.norm(a, 2, [1]), (x.to(BF16),), F32),
    "wide products": (torch.dot, (x[0], x[0].to(BF16)), F32),
    "narrow products": (torch.dot, (x[0].to(BF16), x[0].to(BF16)), BF16),
    "a sum of two": (torch.add, (x, x.to(BF16)), F32),
    "gelu": (F.gelu, (x.to(BF16),), BF16),
    "float64": (torch.exp, (x.double(),), F64),
    "float64 products": (torch.matmul, (x.double(), x.double().T), F64),
    "quantities of no type": (torch.relu, (x.to(BF16),), BF16),
}


def result(call: Callable[..., Any], args: tuple[Any, ...]) -> Tensor:
    found = call(*args)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("case", CALLS)
def test_the_data_types_are_those_of_a_gpu(case):
    call, args, wanted = CALLS[case]
    with as_autocast_of_gpus(), torch.autocast("cpu", BF16):
        assert result(call, args).dtype is wanted


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
def test_they_are_those_that_torch_gives_cuda_tensors(case):
    """A build with CUDA makes fake CUDA tensors, and runs forwards on them, without a GPU."""
    call, args, wanted = CALLS[case]
    with _torch.tensors.FakeTensorMode():
        given = [
            torch.empty(one.shape, dtype=one.dtype, device="cuda")
            if isinstance(one, Tensor)
            else one
            for one in args
        ]
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", BF16)
        try:
            assert result(call, tuple(given)).dtype is wanted
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


def test_afterwards_autocast_is_the_cpus():
    with as_autocast_of_gpus():
        pass
    with torch.autocast("cpu", BF16):
        assert F.layer_norm(x.to(BF16), (8,)).dtype is BF16
        assert torch.exp(x.to(BF16)).dtype is BF16
        assert F.linear(x, x).dtype is BF16
        assert F.mse_loss(x.to(BF16), x.to(BF16)).dtype is F32


def test_a_loss_that_a_gpu_refuses_is_refused():
    refused = pytest.raises(RuntimeError, match="unsafe to autocast")
    with as_autocast_of_gpus(), torch.autocast("cpu", BF16), refused:
        F.binary_cross_entropy(x, x)

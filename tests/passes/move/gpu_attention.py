"""The attention operators of GPUs on a CPU: their arguments and results, and the CPU's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
KINDS = ("flash", "efficient", "cudnn")


def attend(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by one of the operators."""
    operator = getattr(_aten, f"_scaled_dot_product_{kind}_attention")
    mask = () if kind == "flash" else (None, True)
    found: Tensor = operator(q, k, v, *mask, 0.0, True)[0]
    return found


def register() -> torch.library.Library:
    """Register the operators for CPU tensors, as long as the result lives."""
    library = torch.library.Library("aten", "IMPL")
    for kind in KINDS:
        for direction, run in (("", _forward), ("_backward", _backward)):
            name = f"_scaled_dot_product_{kind}_attention{direction}"
            library.impl(name, _with_names(getattr(_aten, name).default, run, kind), "CPU")
    return library


def _with_names(operator: Any, run: Any, kind: str) -> Any:
    names = [argument.name for argument in operator._schema.arguments]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        assert not given.get("dropout_p")
        return run(kind, given)

    return call


def _forward(kind: str, given: dict[str, Any]) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    out, logsumexp = _FORWARD(q, k, v, 0.0, given.get("is_causal", False), **_options(given))
    is_flash = kind == "flash"
    dtype = torch.uint64 if is_flash else torch.int64
    state = torch.empty([2] if is_flash else [], dtype=dtype)
    other = torch.empty([], dtype=dtype)
    if kind == "efficient":  # a multiple of 32 rows
        return out, F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32)), state, other
    if kind == "cudnn":
        logsumexp = logsumexp[..., None]
    return out, logsumexp, None, None, q.shape[2], k.shape[2], state, other, out.new_empty([0])


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {"attn_mask": given.get("attn_bias"), "scale": given.get("scale")}


def _backward(kind: str, given: dict[str, Any]) -> tuple[Any, ...]:
    gradient = given.get("grad_out", given.get("grad_out_"))
    own = [given[name] for name in ("query", "key", "value", "out", "logsumexp")]
    own[4] = own[4].flatten(2)[..., : own[0].shape[2]]
    found = _BACKWARD(gradient, *own, 0.0, given.get("is_causal", False), **_options(given))
    return (*found, None) if kind == "efficient" else tuple(found)

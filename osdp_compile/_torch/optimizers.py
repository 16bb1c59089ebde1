"""Torch's optimizers and gradient clipping on DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

# 2.13.0: Adafactor's functional step of a group, on lists.
# 2.13.0, 2.15.0: Muon's, its orthogonalization, and its learning rate for a shape.
from torch.optim import _adafactor, _muon


def handle_total_norm(whole: Callable[[Tensor], Tensor]) -> None:
    """Make ``clip_grad_norm_`` and ``get_total_norm`` take ``whole(norm)`` for the total norm."""
    # 2.13.0: clip_grad_norm_ calls this; torch.nn.utils.get_total_norm is another name of it.
    plain: Callable[..., Tensor] = clip_grad._get_total_norm

    @functools.wraps(plain)
    def total_norm(*args: Any, **kwargs: Any) -> Tensor:
        return whole(plain(*args, **kwargs))

    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm


def handle_adafactor(on_rows: Callable[..., None]) -> None:
    """Make Adafactor step each DTensor parameter with ``on_rows(parameter, ...)``."""
    # 2.13.0: Adafactor.step calls this for a group: lists of tensors, then options.
    plain: Callable[..., None] = _adafactor.adafactor

    @functools.wraps(plain)
    def adafactor(params: list[Tensor], *lists: Any, **options: Any) -> None:
        state, rest = lists[:5], lists[5:]
        of_params = list(zip(params, *state, strict=True))
        whole = [one for one in of_params if not isinstance(one[0], DTensor)]
        if whole:
            plain(*map(list, zip(*whole, strict=True)), *rest, **options)
        for one in of_params:
            if isinstance(one[0], DTensor):
                on_rows(*one, **options)

    _adafactor.adafactor = adafactor


def handle_muon(is_ours: Callable[[Tensor], bool], step: Callable[..., None]) -> None:
    """Make Muon step the matrices that ``is_ours`` says with ``step``.

    ``step``: :func:`osdp_compile.optim.muon.step_by_owners`.
    """
    # 2.13.0, 2.15.0: Muon.step calls this for a group: lists of tensors, then options.
    plain: Callable[..., None] = _muon.muon

    @functools.wraps(plain)
    def muon(
        params: list[Tensor], grads: list[Tensor], momentums: list[Tensor], **options: Any
    ) -> None:
        ours: list[tuple[Tensor, Tensor, Tensor]] = []
        theirs: list[tuple[Tensor, Tensor, Tensor]] = []
        for one in zip(params, grads, momentums, strict=True):
            (ours if is_ours(one[0]) else theirs).append(one)
        if theirs or options.get("foreach"):  # which torch refuses
            plain(*([one[i] for one in theirs] for i in range(3)), **options)
        if not ours:
            return
        lr = float(options["lr"])
        adjusted = functools.partial(_muon._adjust_lr, lr, options["adjust_lr_fn"])
        newton = (options[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        step(
            [(*one, adjusted(one[0].shape)) for one in ours],
            orthogonalized=functools.partial(_orthogonalized, *newton),
            decay=1 - lr * options["weight_decay"],
            momentum=options["momentum"],
            nesterov=options["nesterov"],
        )

    # A compiled ``optimizer.step`` breaks its graph here: Dynamo traces no exchange.
    _muon.muon = torch.compiler.disable(muon)


def _orthogonalized(
    coefficients: tuple[float, float, float], steps: int, eps: float, update: Tensor
) -> Tensor:
    return _muon._zeropower_via_newtonschulz(update, coefficients, steps, eps)

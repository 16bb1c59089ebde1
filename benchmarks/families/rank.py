"""One rank of a run: train a trial one way, and return the figures."""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import osdp_compile
from benchmarks.families.catalogue import find_family
from benchmarks.families.trial import WEIGHT_ROUNDING, Family, Trial, Wrap
from benchmarks.families.verdict import ROUNDINGS

#: A limit over the least one that every plan must keep.
OVER_LEAST = 1.1
#: A fixed profile: the same plan in every sweep, and no seconds to measure.
HARDWARE = "cpu-gloo"
#: Bytes that no model trains in.
_TOO_FEW_BYTES = 1024
#: Parts compiled one by one each name their own least limit.
_LIMITS_TRIED = 6


def run(rank: int, world_size: int, name: str, way: str) -> dict[str, Any]:
    """Train the family called ``name`` in the way ``way``; what this rank saw."""
    family = find_family(name)
    result: dict[str, Any] = {}
    begin = time.perf_counter()
    with heard() as lines:
        if way == "limit":
            result |= _train_under_limit(family, rank)
        else:
            result |= _train(family, way, rank, {})
    result["log"] = lines
    result["seconds"] = time.perf_counter() - begin
    for what, whose in (("cpu", resource.RUSAGE_SELF), ("compiler", resource.RUSAGE_CHILDREN)):
        used = resource.getrusage(whose)
        result[f"{what}_seconds"] = used.ru_utime + used.ru_stime
    return result


def _train_under_limit(family: Family, rank: int) -> dict[str, Any]:
    """Train at 1.1 times the least limit, which the refusal of a lower one names."""
    least_bytes, limit_bytes = 0, _TOO_FEW_BYTES
    for _ in range(_LIMITS_TRIED):
        try:
            result = _train(family, "limit", rank, {"memory_limit": f"{limit_bytes}B"})
        except osdp_compile.InfeasibleLimit as error:
            least_bytes = error.least_bytes
            limit_bytes = int(OVER_LEAST * least_bytes)
        else:
            if not least_bytes:
                text = f"a limit of {limit_bytes} bytes is not refused: it is ignored"
                raise AssertionError(text)
            return {**result, "least_bytes": least_bytes, "limit_bytes": limit_bytes}
        torch._dynamo.reset()
        gc.collect()
    raise AssertionError(f"the least limit is refused {_LIMITS_TRIED} times")


def _train(family: Family, way: str, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    memory = osdp_compile.PeakMemory()
    with memory:
        torch.manual_seed(0)
        trial = family.make()
        if way == "rounding":
            _round_otherwise(trial.model)
        steps = list(trial.train(_wrap(trial, family, way, options), rank))
        plan = _decisions(trial)
        parameters = sum(p.numel() for p in trial.model.parameters())
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.norm for step in steps],
        "peak_bytes": memory.peak_bytes,
        "parameters": parameters,
        **plan,
    }


def _round_otherwise(model: nn.Module) -> None:
    """Change every weight by about its rounding error in float32, equally on all ranks."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + WEIGHT_ROUNDING * torch.randn(parameter.shape, generator=generator))


def _wrap(trial: Trial, family: Family, way: str, options: dict[str, Any]) -> Wrap:
    if way in ("ddp", *ROUNDINGS):
        trial.parts = ()

        def ddp(module: nn.Module) -> nn.Module:
            if way == "compiled":
                # In parts, one graph for each of DDP's buckets, torch 2.13 gives some models zero
                # gradients.
                torch._dynamo.config.optimize_ddp = False
                module.compile(dynamic=family.dynamic, backend="inductor")
            # As with FSDP2 and osdp, each rank has batch norm statistics of its own.
            return DistributedDataParallel(
                module,
                find_unused_parameters=trial.unused and not trial.static,
                static_graph=trial.static,
                broadcast_buffers=False,
            )

        return ddp
    if way == "inductor":
        return _compiled(trial, family, backend="inductor")
    given = {"hardware": HARDWARE, **family.options, **options}
    return _compiled(trial, family, backend="osdp", options=given)


def _compiled(trial: Trial, family: Family, **given: Any) -> Wrap:
    if trial.parts:
        return lambda part: part.compile(dynamic=family.dynamic, **given)
    return lambda module: torch.compile(module, dynamic=family.dynamic, **given)


def _decisions(trial: Trial) -> dict[str, Any]:
    """Numbers of parameters by the plan's decision, and the predicted peak."""
    plans = {id(plan): plan for m in trial.model.modules() if (plan := osdp_compile.plan_of(m))}
    if not plans:
        return {}
    decisions = [str(p.decision.name) for plan in plans.values() for p in plan.parameters]
    predicted = [plan.prediction.peak_bytes for plan in plans.values() if plan.prediction]
    return {
        "decisions": {kind: decisions.count(kind) for kind in sorted(set(decisions))},
        "predicted_bytes": max(predicted, default=0),
    }


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect warnings that the package logs."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage()[:500])

    handler = Collect(level=logging.WARNING)
    logger = logging.getLogger("osdp_compile")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def versions() -> dict[str, str]:
    """Versions of the packages that the sweep is of, where they are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "transformers", "timm", "torchvision", "diffusers", "peft"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    found["torch"] = torch.__version__
    return found

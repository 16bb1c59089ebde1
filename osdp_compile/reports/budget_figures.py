"""Budget figures: what a test keeps of a planned step, to name what grew later.

The figures are a small JSON file. Parameters and buffers that differ only in a layer's number share
an entry: ``blocks.{0..11}.up.weight``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from osdp_compile.planning.offline import OfflineStep
from osdp_compile.planning.traced_step import predicted
from osdp_compile.reports.alike_layers import expanded, grouped_names, joined
from osdp_compile.reports.plan_table import decided, shape_text, shortened
from osdp_compile.torch_versions import release
from passes.simulate.timeline import Buffer
from passes.types.context import Parameter
from passes.types.decode import decoded, encoded
from passes.types.plan import Plan
from passes.types.units import format_limit

FORMAT = 1
#: Decimal places of kept seconds. Sums of floats may differ in later places from run to run.
_PLACES = 9
#: The backward's input that holds the saved tensors of layers that the simulated graph lacks
#: (``passes/capture/fold_layers.py``). Its label names no module.
_LEFT_OUT = "left_out_activations"

_V = TypeVar("_V")


@dataclasses.dataclass(frozen=True)
class ParameterFigures:
    """A whole parameter. ``form``: shape and dtype. ``decision``: in words; empty: no plan."""

    form: str
    size_bytes: int
    decision: str = ""


@dataclasses.dataclass(frozen=True)
class PhaseSeconds:
    """Times of the forward, the backward or the optimizer's step.

    ``exposed_seconds``: the part in which compute waits for communication.
    """

    compute_seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class BudgetFigures:
    """The prediction for a planned step on one rank.

    ``settings``: the settings of the plan, as text.
    ``peak_phase``, ``peak``: the phase of the memory peak, and its bytes by kind.
    ``phases``: by name, in the order in which they run.
    ``parameters``: by name.
    ``buffers``: bytes of the step's own tensors at the peak, by module, operator and kind.
    """

    settings: dict[str, str]
    peak_bytes: int
    step_seconds: float
    recomputed_seconds: float
    peak_phase: str
    peak: dict[str, int]
    phases: dict[str, PhaseSeconds]
    parameters: dict[str, ParameterFigures]
    buffers: dict[str, int]

    def to_text(self) -> str:
        """The figures as JSON: a line for each entry, alike entries as one."""
        small = dataclasses.replace(
            self, parameters=_as_ranges(self.parameters), buffers=_as_ranges(self.buffers)
        )
        lines = [_entry(name, value) for name, value in encoded(small).items()]
        return "{\n" + ",\n".join([_entry("format", FORMAT), *lines]) + "\n}\n"

    @classmethod
    def from_text(cls, text: str) -> BudgetFigures:
        """The figures that :meth:`to_text` wrote.

        Raises:
            ValueError: if the text holds none.
        """
        data = json.loads(text)
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        if found != FORMAT:
            raise ValueError(f"no budget figures of format {FORMAT} (found {found!r})")
        small = decoded(cls, {name: value for name, value in data.items() if name != "format"})
        if small.peak_bytes <= 0 or small.step_seconds <= 0:
            raise ValueError("a peak or a step that is not above zero")
        return dataclasses.replace(
            small, parameters=_by_name(small.parameters), buffers=_by_name(small.buffers)
        )


def budget_figures(step: OfflineStep, plan: Plan) -> BudgetFigures:
    """The figures of a plan of the step."""
    prediction, timeline = predicted(plan), step.simulated(plan)
    buffers: dict[str, int] = {}
    for buffer in timeline.peak.peak_buffers:
        if not buffer.is_part:
            name = _name_of(buffer)
            buffers[name] = buffers.get(name, 0) + buffer.size_bytes
    return BudgetFigures(
        settings=settings_of(step),
        peak_bytes=prediction.peak_bytes,
        step_seconds=_rounded(prediction.step_seconds),
        recomputed_seconds=_rounded(prediction.recomputed_seconds),
        peak_phase=timeline.peak.phase,
        peak=prediction.peak,
        phases={
            phase.phase: PhaseSeconds(
                _rounded(phase.compute_seconds), _rounded(phase.exposed_seconds)
            )
            for phase in timeline.phases
        },
        parameters=parameter_figures(step.step.parameters, plan),
        buffers=buffers,
    )


def parameter_figures(
    parameters: Sequence[Parameter], plan: Plan | None = None
) -> dict[str, ParameterFigures]:
    """By name; without a plan they have no decisions."""
    return {
        one.name: ParameterFigures(
            f"{shape_text(one.shape)} {one.dtype}",
            one.full_bytes,
            "" if plan is None else decided(plan[one.name]),
        )
        for one in parameters
    }


def _rounded(seconds: float) -> float:
    return round(float(seconds), _PLACES)


def settings_of(step: OfflineStep) -> dict[str, str]:
    """What a plan of the step is for, as text."""
    sizes = step.ranks
    one = len(sizes) == 1
    limit_bytes = step.limit_bytes
    return {
        "ranks": ",".join(f"{size}" if one else f"{name}={size}" for name, size in sizes.items()),
        "hardware": step.hardware.name,
        "memory limit": "none" if limit_bytes is None else format_limit(limit_bytes),
        "torch": ".".join(map(str, release(torch.__version__))),
    }


def _name_of(buffer: Buffer) -> str:
    """The module of a buffer, its operator and its kind: ``blocks.0.up: addmm, activations``."""
    label = shortened(buffer.label)
    operator, inside, module = label.rpartition(" in ")
    if buffer.name == _LEFT_OUT:
        operator, inside, module = label, " in ", "the layers left out"
    what = f"{module}: {operator}" if inside else label
    return f"{what}, {buffer.kind}"


def _as_ranges(values: Mapping[str, _V]) -> dict[str, _V]:
    """Equal values of alike names as one."""
    groups = grouped_names(values, kind=values.__getitem__)
    return {joined(names): values[names[0]] for names in groups}


def _by_name(values: Mapping[str, _V]) -> dict[str, _V]:
    return {name: value for names, value in values.items() for name in expanded(names)}


def _entry(name: str, value: Any) -> str:
    """A field as lines of JSON."""
    if not isinstance(value, dict) or not value:
        return f" {json.dumps(name)}: {json.dumps(value)}"
    inner = [f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()]
    return f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }"

"""Memory watch: bytes in use while a model's graphs run that its plan does not count.

A plan counts parameters, optimizer state, the batch, the gradients of the option ``accumulate``,
and the bytes of other models at the model's first call. Four more are known at run time only:

* gradients of earlier backwards, to which a backward adds;
* activations saved for a backward that has not run yet;
* inputs larger than those that a graph with dynamic shapes was compiled with;
* models that were planned later.

They are counted before every call of a compiled forward. If a step is above the limit because of
them, one warning gives the bytes and the causes.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from osdp_compile import _torch
from osdp_compile.tracking.step_timer import CompiledStep
from passes.types.units import format_bytes, format_limit

log = logging.getLogger("osdp_compile")

_keys = itertools.count()
_LARGEST_FIRST = "Make the first call with what takes the most, or lower the limit to leave room"


class GraphInput(NamedTuple):
    """A tensor input of a graph; a dynamic size is -1."""

    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        return f"of shape {self.shape}" + (" that requires gradients" * self.requires_grad)


@dataclasses.dataclass(frozen=True)
class Beside:
    """Bytes in use that a plan does not count, with their cause and a remedy.

    ``cause``: a noun phrase. ``remedy``: a whole sentence without its full stop.
    """

    size_bytes: int
    cause: str
    remedy: str


class Watch:
    """Memory of one model in its process.

    ``state_bytes``: parameters, optimizer state and inputs, after the model is sharded.
    ``room_for_gradients``: its plan counts gradients of earlier backwards.
    ``counted_bytes``: bytes of other models that its plan counts.
    ``transient_bytes``: the most that a graph of its training needs while it runs.
    """

    def __init__(self) -> None:
        self.state_bytes = 0
        self.room_for_gradients = False
        self.counted_bytes = 0
        self.transient_bytes = 0
        self._gradients: list[tuple[weakref.ref[nn.Parameter], int]] = []
        self._saved: dict[int, int] = {}
        self._planned: dict[Hashable, tuple[GraphInput, ...]] = {}
        self._said = False
        self._said_larger = False  # of a larger input of a graph with dynamic shapes

    def laid_out(
        self,
        parameters: Iterable[tuple[nn.Parameter, int]],
        state_bytes: int,
        room_for_gradients: bool,
        counted_bytes: int,
    ) -> None:
        """Begin. ``parameters``: trained parameters with their gradients' bytes on this rank."""
        self._gradients = [(weakref.ref(one), size_bytes) for one, size_bytes in parameters]
        self.state_bytes, self.room_for_gradients = state_bytes, room_for_gradients
        self.counted_bytes = counted_bytes
        _watches.add(self)

    @property
    def is_alive(self) -> bool:
        """Whether the model is alive; its compiled code may live longer."""
        return any(reference() is not None for reference, _ in self._gradients)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that exist now."""
        found = 0
        for reference, size_bytes in self._gradients:
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                found += size_bytes
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes between steps: state, gradients of all trained parameters, saved activations."""
        gradients = sum(size_bytes for _, size_bytes in self._gradients)
        return self.state_bytes + gradients + self.saved_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by calls whose backward has not run yet."""
        return sum(self._saved.values())

    def saves(self, outputs: Any, size_bytes: int) -> None:
        """Count a forward's saved bytes until its backward runs or its graph is freed."""
        nodes = (
            leaf.grad_fn
            for leaf in _torch.tensors.tree_leaves(outputs)
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        )
        node = next(nodes, None)
        if node is None:
            return
        saved, key = self._saved, next(_keys)
        saved[key] = size_bytes

        def free(*_: Any) -> None:
            saved.pop(key, None)

        node.register_hook(free)
        weakref.finalize(node, free).atexit = False

    def called(self, step: CompiledStep, limit_bytes: int, args: Sequence[Any] = ()) -> None:
        """Compare the bytes of a coming call of a compiled forward with the limit.

        ``args``: the arguments of the call.
        """
        larger_bytes = 0 if self._said_larger else step.larger_input_bytes(args)
        if self._said and not larger_bytes:
            return
        peak_bytes = step.peak_bytes
        beside = self._beside(step.counted_frames_bytes, larger_bytes)
        more_bytes = sum(one.size_bytes for one in beside)
        if not beside or peak_bytes + more_bytes <= limit_bytes:
            return
        self._said, self._said_larger = True, self._said_larger or larger_bytes > 0
        parts = sorted(beside, key=lambda one: -one.size_bytes)
        causes = "; ".join(f"{format_bytes(one.size_bytes)} of {one.cause}" for one in parts)
        log.warning(
            "this training step needs %s, above memory_limit=%s: beside the %s that the plan "
            "counts there are %s. %s",
            format_bytes(peak_bytes + more_bytes),
            format_limit(limit_bytes),
            format_bytes(peak_bytes),
            causes,
            ". ".join(one.remedy for one in parts),
        )

    def _beside(self, frames_bytes: int, larger_bytes: int) -> list[Beside]:
        """The bytes that the plan does not count, by cause.

        ``frames_bytes``: bytes that the graphs count as saved by earlier frames of the step.
        ``larger_bytes``: bytes that this call needs above the peak for the sizes of its inputs.
        """
        found = []
        if larger_bytes:
            cause = "activations of a larger input than it was compiled with"
            found.append(Beside(larger_bytes, cause, _LARGEST_FIRST))
        if not self.room_for_gradients and (gradient_bytes := self.gradient_bytes):
            found.append(
                Beside(
                    gradient_bytes,
                    "gradients of an earlier backward, which the next one adds its own to",
                    "Give options={'accumulate': 'reduced'} at the first call, and the plan has "
                    "room for them (zero_grad(set_to_none=True) frees those that are not needed)",
                )
            )
        if (saved_bytes := self.saved_bytes - frames_bytes) > 0:
            found.append(
                Beside(
                    saved_bytes,
                    "activations of earlier calls of this model, whose backward is still to come",
                    "Call backward after each call of the model, or lower the limit by so much",
                )
            )
        others = [watch for watch in watches() if watch is not self]
        others_bytes = sum(o.state_bytes + o.gradient_bytes + o.saved_bytes for o in others)
        if others_bytes > self.counted_bytes:
            found.append(
                Beside(
                    others_bytes - self.counted_bytes,
                    f"other models, which hold {format_bytes(others_bytes)}, and at this model's "
                    f"first call {format_bytes(self.counted_bytes)} were counted",
                    "Compile one function that calls all of them, and one plan covers them, or "
                    "lower the limit by so much",
                )
            )
        return found

    def runs(self, transient_bytes: int) -> None:
        """Note the bytes that a graph needs while it runs, beyond those held between steps."""
        self.transient_bytes = max(self.transient_bytes, transient_bytes)

    def lowers(self, frame: Hashable, inputs: tuple[GraphInput, ...], frames: bool) -> str:
        """How a graph that is lowered differs from the planned graph; empty: not at all.

        ``frames``: the plan covers all frames of the step, and the first graph of each frame is a
        planned graph. Else the first graph of all is the planned graph.
        """
        if frames or not self._planned:
            self._planned.setdefault(frame, inputs)
        if frame not in self._planned:
            return (
                "it is another graph than the one that was planned on, as behind a graph break. "
                "Compile without the break, or lower the limit to leave room"
            )
        pairs = zip(inputs, self._planned[frame], strict=False)
        differs = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if differs is None:
            return ""
        return (
            f"it has an input {differs[0]}, in the place of one {differs[1]} when it was planned. "
            + _LARGEST_FIRST
        )

    def above(self, what: str, peak_bytes: int, limit_bytes: int, cause: str) -> None:
        """Warn of a graph whose own peak is above the limit."""
        self._said = True
        log.warning(
            "this %s needs %s, above memory_limit=%s: %s",
            what,
            format_bytes(peak_bytes),
            format_limit(limit_bytes),
            cause,
        )


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def watches() -> list[Watch]:
    """The watches of all planned models that are alive."""
    return [watch for watch in _watches if watch.is_alive]


def watched(
    function: Callable[..., Any], watch: Watch, step: CompiledStep, limit_bytes: int
) -> Callable[..., Any]:
    """Wrap the compiled function of a trained frame; ``watch`` checks every call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        watch.called(step, limit_bytes, args)
        outputs = function(*args, **kwargs)
        watch.saves(outputs, step.kept_bytes)
        return outputs

    return _torch.aot_autograd.with_attributes(call, function)

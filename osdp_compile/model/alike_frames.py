"""Alike frames: blocks that are compiled one by one share their compiled code.

Dynamo runs the code of one block for the next one if its guards hold. They ask for the classes of
the modules, and for the constants of their reads. So alike modules of alike frames get one class,
whose markers have the names of the first of these frames. The plan has equal rows for them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from passes.types.context import Context


@dataclasses.dataclass(frozen=True)
class AlikeFrames:
    """The frames of a step that share compiled code.

    ``first_of``: by parameter name, the parameter in its place in the first alike frame.
    ``times``: by the names of a first frame's parameters, how often a step runs such frames.
    """

    first_of: Mapping[str, str] = dataclasses.field(default_factory=dict)
    times: Mapping[frozenset[str], int] = dataclasses.field(default_factory=dict)

    def times_of(self, names: Iterable[str]) -> int:
        """How often a step runs the frames that share the code of a frame with these parameters."""
        return self.times.get(frozenset(names), 1)


def alike_frames(runs: Sequence[Mapping[str, str]], ctx: Context) -> AlikeFrames:
    """The frames whose parameters the plan treats alike.

    ``runs``: as :attr:`passes.graph.captured.Captured.runs`. ``ctx``: with the plan.

    A frame that shares a parameter with another run of a frame is alike to itself only.
    """
    readers = Counter(name for run in runs for name in {*run.values()})
    firsts: dict[Hashable, Mapping[str, str]] = {}
    first_of: dict[str, str] = {}
    times: Counter[frozenset[str]] = Counter()
    for run in runs:
        rows = [(own, *_treated(name, ctx)) for own, name in sorted(run.items())]
        is_apart = any(readers[name] > 1 for name in run.values())
        first = run if is_apart else firsts.setdefault(tuple(rows), run)
        first_of.update((name, first[own]) for own, name in run.items())
        times[frozenset(first.values())] += 1
    return AlikeFrames(first_of, times)


def _treated(name: str, ctx: Context) -> tuple[Hashable, ...]:
    """The plan's decisions on a parameter, without its name and the reason."""
    row = dataclasses.replace(ctx.plan[name], name="", like=None, reason="")
    return row, ctx.parameter(name).requires_grad

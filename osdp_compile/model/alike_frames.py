"""Alike frames: blocks that are compiled one by one share their compiled code.

Dynamo runs the code of one block for the next one if its guards hold. They ask for the classes of
the modules, and for the constants of their reads. So alike modules of alike frames get one class,
whose markers have the names of the first of these frames. The plan has equal rows for them.

A trial run of the step shows its frames. A model that ``osdp_compile.shard`` sharded has none: its
frames are the modules that are compiled one by one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from torch import nn

from passes.types.context import Context
from passes.types.plan import Plan


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
    return _grouped(runs, lambda name: (_row(ctx.plan, name), ctx.parameter(name).requires_grad))


def alike_parts(root: nn.Module, parts: Sequence[nn.Module], plan: Plan) -> AlikeFrames:
    """The parts of a model that are compiled one by one, and that the plan treats alike.

    ``parts``: modules in ``root``. Those within other parts are no frames of their own.

    Alike parts have modules of the same classes, and parameters of the same names and shapes.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    trained = {id(parameter) for parameter in root.parameters() if parameter.requires_grad}
    wanted = {id(part) for part in parts}
    inside = {id(inner) for part in parts for inner in part.modules() if inner is not part} | {
        id(root)
    }
    kinds: dict[Hashable, int] = {}
    runs: list[dict[str, str]] = []
    for part in root.modules():
        if id(part) not in wanted or id(part) in inside:
            continue
        classes = [(path, type(one)) for path, one in part.named_modules()]
        structure = tuple((path, one.__module__, one.__qualname__) for path, one in classes)
        kind = kinds.setdefault(structure, len(kinds))
        own = part.named_parameters()
        runs.append({f"{kind}: {path}": names[id(one)] for path, one in own})
    requires_grad = {name: one in trained for one, name in names.items()}
    return _grouped(runs, lambda name: (_row(plan, name), requires_grad[name]))


def _grouped(
    runs: Sequence[Mapping[str, str]], treated: Callable[[str], tuple[Hashable, ...]]
) -> AlikeFrames:
    """The runs that share code. ``treated``: all that the code depends on, by parameter name."""
    readers = Counter(name for run in runs for name in {*run.values()})
    firsts: dict[Hashable, Mapping[str, str]] = {}
    first_of: dict[str, str] = {}
    times: Counter[frozenset[str]] = Counter()
    for run in runs:
        rows = [(own, *treated(name)) for own, name in sorted(run.items())]
        is_apart = any(readers[name] > 1 for name in run.values())
        first = run if is_apart else firsts.setdefault(tuple(rows), run)
        first_of.update((name, first[own]) for own, name in run.items())
        times[frozenset(first.values())] += 1
    return AlikeFrames(first_of, times)


def _row(plan: Plan, name: str) -> Hashable:
    """The plan's decisions on a parameter, without its name and the reason."""
    return dataclasses.replace(plan[name], name="", like=None, reason="")

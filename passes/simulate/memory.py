"""The memory model: bytes alive while each node of an annotated, ordered graph runs.

Needs: ``annotate``. Leaves: the graph unchanged.

- A tensor is born with the kernel that writes it (``passes/annotate/kernel_placement.py``). It
  dies after the last kernel that reads it. Views and in-place updates share one buffer.
- A tensor that lives only inside a fused kernel takes no memory. A part of a concatenation is
  written into the memory of the concatenation, which is born with its first part.
- A kernel's workspace is alive while the kernel runs.
- A saved view keeps the whole memory of which it is a view (``passes/simulate/lent.py``).
- The input of a collective lives until the wait. So does the backend's copy of the whole tensor,
  if the backend makes one.
- Memory that the graph does not allocate (such as parameters) is the caller's ``base_bytes``.

On a CPU, Inductor puts all fused kernels between two other operators into one C++ function
(``torch._inductor.scheduler.Scheduler._codegen`` frees buffers where it flushes). Inputs of these
kernels die with the last kernel of the function, except buffers that a kernel reuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from passes.annotate.annotate_costs import cost_of
from passes.annotate.kernel_placement import Kernels
from passes.graph.dataflow import Dataflow
from passes.graph.fx_utils import (
    WAIT,
    is_collective,
)
from passes.graph.metadata import COLLECTIVE, GATHERED, GRADIENT_OF, LENT, SAVED, STATIC, STORAGE
from passes.graph.op_traits import effective_users, is_concatenation, is_reduction
from passes.ops.packing import UNPACK
from passes.types.annotations import Memory

KINDS = ("activations", "gathered", "gradients", "communication", "inputs", "workspace")
#: Memory of a node beside its result: the backend's copy of a collective, a kernel's workspace.
COPY, WORKSPACE = "copy", "workspace"


class MemoryTrace(NamedTuple):
    """The memory of a graph over time, for one order of its nodes; in bytes.

    Nodes are indices into the :class:`~passes.graph.dataflow.Dataflow`; places are positions in
    ``order``.

    ``order``: the nodes in execution order.
    ``curve``: bytes alive at each place.
    ``birth``, ``death``: by node, the first and the last place at which its memory is alive. A
    view (a node that owns no memory) has no death.
    ``at``: the place of the peak; the first one on a tie.
    ``reused``: by node, the place at which a result is written over its dying buffer.
    """

    order: list[int]
    curve: list[int]
    birth: list[int]
    death: dict[int, int]
    at: int
    reused: dict[int, int]

    @property
    def peak_bytes(self) -> int:
        return self.curve[self.at]


class Life(NamedTuple):
    """Memory of a node: from its first to its last place, both included.

    ``part``: empty for the node's result; :data:`COPY` or :data:`WORKSPACE`.
    """

    node: fx.Node
    part: str
    kind: str
    size_bytes: int
    first: int
    last: int


class MemoryModel:
    """The memory of an annotated graph, for any order of its nodes.

    The constructor computes the facts that do not depend on the order, by index in the
    :class:`~passes.graph.dataflow.Dataflow`:

    ``_size``: bytes that a node allocates; 0 if it allocates none or the graph does not own it.
    ``_into``: the node that has the memory of a part of a concatenation or of a saved view.
    ``_inlined``: the node lives only inside its readers' kernels.
    ``_over``: the node may reuse a dying buffer.
    ``_own``: other nodes may reuse the node's buffer.
    ``_workspace``: workspace bytes of a node's kernel.
    ``_held``: pairs (input or output of a collective, wait that ends its life).
    ``_staged``: pairs (start, wait) of the collectives of which the backend holds a copy.
    ``_part``: the node's kernel is part of a C++ function.
    ``_ends``: the node runs outside of C++ functions, and so ends one.
    ``_reading``: the readers of a node; an inlined reader is replaced by its own readers.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self._wiring = dataflow
        self._kernels = Kernels(dataflow)
        self._returned = [*dataflow.returned()]
        self._size: list[int] = []
        self._inlined: list[bool] = []
        self._over: list[bool] = []
        self._own: list[bool] = []
        self._workspace: list[int] = []
        self._held: list[tuple[int, int]] = []
        self._staged: list[tuple[int, int]] = []
        self._part: list[bool] = []
        self._ends: list[bool] = []
        self._needed: dict[tuple[int, int], bool] = {}
        costs = [cost_of(node) for node in dataflow.nodes]
        parts = self._kernels.into
        self._into = parts | _views_of_one(dataflow)
        for index, node in enumerate(dataflow.nodes):
            meta, traits, cost = node.meta, dataflow.traits[index], costs[index]
            placed = meta.get(STATIC.name) or index in self._into
            size_bytes = 0 if placed else cost.memory_bytes
            self._size.append(size_bytes)
            readers = bool(dataflow.readers[index])
            inlined = traits.fusible and readers
            writes = cost.memory_bytes > 0 or index in parts
            self._inlined.append(inlined and not writes and not is_reduction(node))
            self._part.append(cost.in_function and writes)
            is_view = traits.alias and node.target is not WAIT
            self._ends.append(
                dataflow.called[index] and not (traits.fusible or traits.getitem or is_view)
            )
            joins = cost.in_function and is_concatenation(node)
            self._over.append(traits.fusible and size_bytes > 0 and not joins)
            given = bool(meta.get(SAVED.name)) and not {LENT.name, STORAGE.name} & meta.keys()
            self._own.append((dataflow.called[index] and not joins) or given)
            self._workspace.append(cost.workspace_bytes)
            if node.target is WAIT and isinstance(node.args[0], fx.Node):
                start = dataflow.place[node.args[0]]
                if dataflow.traits[start].collective:
                    source = dataflow.root[dataflow.place[node.args[0].args[0]]]
                    self._held += [(source, index), (start, index)]
                    if self._workspace[start]:
                        self._staged.append((start, index))
        self._reading: list[list[int]] = list(dataflow.readers)
        for index in reversed(range(len(dataflow.nodes))):
            own = dataflow.readers[index]
            if any(map(self._inlined.__getitem__, own)):
                seen: dict[int, None] = {}
                for user in own:
                    inside = self._inlined[user]
                    seen.update(dict.fromkeys(self._reading[user] if inside else [user]))
                self._reading[index] = list(seen)

    def trace(self, nodes: Iterable[fx.Node] | None = None) -> MemoryTrace:
        """The memory over time, with the nodes in this order (None: the dataflow's order)."""
        place_of = self._wiring.place
        count = len(place_of)
        order = list(range(count) if nodes is None else [place_of[node] for node in nodes])
        runs, birth, death = self._lives(order)
        size, workspace = self._size, self._workspace
        born, dying = self._by_place(birth, death)
        ends = self._function_ends(order, runs)
        staged = self._staged_bytes(order)
        freed: list[list[int]] = [[] for _ in order]
        alive_bytes, most_bytes, at = 0, -1, 0
        curve: list[int] = []
        reused: dict[int, int] = {}
        for place, index in enumerate(order):
            comes, dies = born[place], dying[place]
            here = workspace[index] if staged is None else staged[place]
            replaced: list[int] = []
            if comes is not None:
                for one in comes:
                    alive_bytes += size[one]
                if dies is not None:
                    replaced = self._written_over(comes, dies, runs)
                    for one in replaced:
                        alive_bytes -= size[one]
                        reused[one] = place
            here += alive_bytes
            curve.append(here)
            if here > most_bytes:
                most_bytes, at = here, place
            for one in dies or ():
                if one not in replaced:
                    death[one] = ends[place]
                    freed[ends[place]].append(one)
            for one in freed[place]:
                alive_bytes -= size[one]
        return MemoryTrace(order, curve, birth, death, at, reused)

    def described(self, trace: MemoryTrace) -> Memory:
        """The memory at the peak by kind, and the bytes alive at the end."""
        nodes, size, at = self._wiring.nodes, self._size, trace.at
        peak = dict.fromkeys(KINDS, 0)
        returned = set(self._returned)
        for index, last in trace.death.items():
            if trace.birth[index] <= at <= last and size[index] and trace.reused.get(index) != at:
                peak[kind_of(nodes[index], index in returned)] += size[index]
        runs = trace.order[at]
        if not self._wiring.traits[runs].collective:
            peak["workspace"] = self._workspace[runs]
        place = {index: where for where, index in enumerate(trace.order)}
        for start, wait in self._staged:
            if place[start] <= at < place[wait]:
                peak["communication"] += self._workspace[start]
        end = len(nodes) - 1
        kept_bytes = sum([size[index] for index, last in trace.death.items() if last == end])
        return Memory(
            trace.curve,
            nodes[trace.order[at]],
            {kind: size_bytes for kind, size_bytes in peak.items() if size_bytes},
            kept_bytes,
        )

    def lives(self, trace: MemoryTrace) -> list[Life]:
        """All memory with its places. The bytes alive at a place add up to the curve."""
        nodes, size = self._wiring.nodes, self._size
        returned = set(self._returned)
        found = [
            Life(
                nodes[index],
                "",
                kind_of(nodes[index], index in returned),
                size[index],
                trace.birth[index],
                trace.reused.get(index, last + 1) - 1,
            )
            for index, last in trace.death.items()
            if size[index]
        ]
        place = {index: where for where, index in enumerate(trace.order)}
        copied = {start: place[wait] - 1 for start, wait in self._staged}
        for index, size_bytes in enumerate(self._workspace):
            if size_bytes:
                first = place[index]
                last = copied.get(index, first)
                is_copy = index in copied
                part, kind = (COPY, "communication") if is_copy else (WORKSPACE, WORKSPACE)
                found.append(Life(nodes[index], part, kind, size_bytes, first, last))
        return found

    def _by_place(
        self, birth: list[int], death: dict[int, int]
    ) -> tuple[list[list[int] | None], list[list[int] | None]]:
        """By place, the nodes whose buffers are born there, and those whose buffers die there."""
        born: list[list[int] | None] = [None] * len(birth)
        dying: list[list[int] | None] = [None] * len(birth)
        size = self._size
        for index, last in death.items():
            if size[index]:
                dies = dying[last]
                if dies is None:
                    dying[last] = [index]
                else:
                    dies.append(index)
                first = birth[index]
                comes = born[first]
                if comes is None:
                    born[first] = [index]
                else:
                    comes.append(index)
        return born, dying

    def _staged_bytes(self, order: list[int]) -> list[int] | None:
        """Workspace bytes at every place, the backend's copies included; None: no copies.

        A copy lives from the start of its collective to the wait.
        """
        if not self._staged:
            return None
        place = {index: where for where, index in enumerate(order)}
        held = [self._workspace[index] for index in order]
        for start, wait in self._staged:
            for where in range(place[start] + 1, place[wait]):
                held[where] += self._workspace[start]
        return held

    def _function_ends(self, order: list[int], runs: list[int]) -> list[int]:
        """For every place the last place of its C++ function; outside of functions, itself."""
        parts = [False] * len(order)
        for index, is_part in enumerate(self._part):
            if is_part:
                parts[runs[index]] = True
        ends = list(range(len(order)))
        last = -1
        for place in range(len(order) - 1, -1, -1):
            if self._ends[order[place]]:
                last = -1
            elif parts[place]:
                last = max(last, place)
                ends[place] = last
        return ends

    def _written_over(self, born: list[int], dying: list[int], runs: list[int]) -> list[int]:
        """The dying buffers that Inductor reuses for pointwise results of the same size.

        A reusable buffer is the graph's own, or a saved tensor that AOTAutograd donates. A buffer
        is not reusable if the kernel reads it for another result too, unless this result needs
        that one (``torch._inductor.scheduler.BaseSchedulerNode.decide_inplace_update``).
        """
        found: list[int] = []
        size = self._size
        for index in born:
            if not self._over[index]:
                continue
            new_bytes = size[index]
            for dead in dying:
                same = size[dead] == new_bytes and self._own[dead]
                if not same or dead in found or dead in born:
                    continue
                others = [r for r in self._reading[dead] if runs[r] == runs[index]]
                if index in others and all(
                    other == index or self._needs(index, other) for other in others
                ):
                    found.append(dead)
                    break
        return found

    def _needs(self, index: int, other: int) -> bool:
        """Whether ``index`` depends on ``other``, directly or indirectly."""
        key = (index, other)
        if key not in self._needed:
            stack, seen = [index], {index}
            while stack and other not in seen:
                for source in self._wiring.inputs[stack.pop()]:
                    if source >= other and source not in seen:
                        seen.add(source)
                        stack.append(source)
            self._needed[key] = other in seen
        return self._needed[key]

    def _lives(self, order: list[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """By node, the place of its kernel, and the first and the last place of its memory."""
        runs = self._kernels.places(order)
        birth, death = list(runs), self._deaths(order, runs)
        for part, whole in self._into.items():
            birth[whole] = min(birth[whole], birth[part])
            death[whole] = max(death[whole], death[part])
        return runs, birth, death

    def _deaths(self, order: list[int], birth: list[int]) -> dict[int, int]:
        """For every node that is not a view: the place of its last reader."""
        place = [0] * len(order)
        for where, index in enumerate(order):
            place[index] = where
        last = len(order) - 1
        dataflow = self._wiring
        alias, readers, inlined = dataflow.alias, dataflow.readers, self._inlined
        runs = [last] * len(order)  # the place where a node's kernel runs
        death: dict[int, int] = {}
        held = self._held_until(place)
        for index in reversed(order):
            if index == last:
                continue
            end = runs[index] = birth[index]
            for user in readers[index]:
                if runs[user] > end:
                    end = runs[user]
            if inlined[index]:
                runs[index] = max([runs[user] for user in readers[index]])
            if not alias[index]:
                death[index] = max(end, held[index])
        for index in self._returned:
            death[index] = last
        return death

    def _held_until(self, place: list[int]) -> list[int]:
        """For every node, the place of the last wait that its collectives hold it for; else 0."""
        held = [0] * len(place)
        for index, wait in self._held:
            if place[wait] > held[index]:
                held[index] = place[wait]
        return held


def _views_of_one(dataflow: Dataflow) -> dict[int, int]:
    """Saved views of one memory, each with the first of them."""
    first: dict[str, int] = {}
    found: dict[int, int] = {}
    for index, node in enumerate(dataflow.nodes):
        storage = STORAGE.get(node)
        if storage is not None and first.setdefault(storage.owner, index) != index:
            found[index] = first[storage.owner]
    return found


def memory_of(graph: fx.Graph) -> Memory:
    """The memory of an annotated graph in its own order. See the module's docstring."""
    model = MemoryModel(Dataflow(graph))
    return model.described(model.trace())


def lives_of(graph: fx.Graph) -> list[Life]:
    """All memory of an annotated graph in its own order, with its places."""
    model = MemoryModel(Dataflow(graph))
    return model.lives(model.trace())


def kind_of(node: fx.Node, returned: bool) -> str:
    """The kind of a buffer, one of :data:`KINDS`.

    ``returned``: the graph returns the buffer.
    """
    purpose = COLLECTIVE.get(node)
    if node.target is UNPACK or GATHERED.get(node):
        return "gathered"
    if purpose is not None and purpose.gathers_weights:
        return "gathered"
    if node.op == "placeholder":
        return "activations" if SAVED.get(node) else "inputs"
    if is_collective(node) or any(is_collective(user) for user in effective_users(node)):
        return "communication"
    if returned and GRADIENT_OF.is_set(node):
        return "gradients"
    return "activations"

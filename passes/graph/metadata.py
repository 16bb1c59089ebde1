"""Metadata: all keys of this package in ``node.meta`` and ``gm.meta``, and their values' types.

The values are stored in the ``meta`` of torch under the names of the keys, so a copy of ``meta``
has them too. Torch's own keys (``val``, ``desc``, ``recompute``, ``nn_module_stack``) are not
declared here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar, overload

from torch import fx

from passes.graph.dataflow import Dataflow
from passes.types.annotations import Chunk, Cost, Memory, Packable, Reason, Storage
from passes.types.plan import Collective

_Owner = TypeVar("_Owner", fx.Node, fx.GraphModule)
_Value = TypeVar("_Value")


class NoMetadata(ValueError):
    """A node or a module lacks metadata that was read; the message names the writer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Key(Generic[_Owner, _Value]):
    """A key of metadata: of nodes or of modules, with a value of one type.

    Attributes:
        name: the key in ``meta``. Loops over all nodes of each candidate plan (``annotate``, the
            simulator) use it directly, because a call of a method takes longer than the read.
        writer: the passes or functions that write it.

    Examples:
        >>> node = fx.Graph().placeholder("x")
        >>> PARAMETER.set(node, "head.weight")
        >>> PARAMETER.of(node), PARAMETER.get(node), INPUT.get(node), INPUT.is_set(node)
        ('head.weight', 'head.weight', None, False)
        >>> INPUT.of(node)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        passes.graph.metadata.NoMetadata: node 'x' (x) has no meta['input'], which mark_inputs ...
    """

    name: str
    writer: str

    def of(self, owner: _Owner) -> _Value:
        """The value.

        Raises:
            NoMetadata: the key is not set.
        """
        if self.name not in owner.meta:
            is_node = isinstance(owner, fx.Node)
            label = f"node {owner.name!r} ({owner.target})" if is_node else "the graph's module"
            raise NoMetadata(f"{label} has no meta[{self.name!r}], which {self.writer} writes")
        value: _Value = owner.meta[self.name]
        return value

    @overload
    def get(self, owner: _Owner) -> _Value | None: ...
    @overload
    def get(self, owner: _Owner, default: _Value) -> _Value: ...
    def get(self, owner: _Owner, default: _Value | None = None) -> _Value | None:
        """The value; ``default`` if the key is not set."""
        value: _Value | None = owner.meta.get(self.name, default)
        return value

    def is_set(self, owner: _Owner) -> bool:
        """Whether there is a value."""
        return self.name in owner.meta

    def set(self, owner: _Owner, value: _Value) -> None:
        """Write the value."""
        owner.meta[self.name] = value

    def copy(self, source: _Owner, target: _Owner) -> None:
        """Write the value of ``source``, if it has one, to ``target``."""
        if self.name in source.meta:
            target.meta[self.name] = source.meta[self.name]

    def pop(self, owner: _Owner) -> _Value | None:
        """Remove the value and return it; None if the key is not set."""
        value: _Value | None = owner.meta.pop(self.name, None)
        return value


#: The cost of a node.
COST: Key[fx.Node, Cost] = Key("cost", "annotate")
#: The value of the :class:`passes.types.context.Phase` of a node's graph.
PHASE: Key[fx.Node, str] = Key("phase", "annotate")
#: The number of a node's fused region; None: it has none.
REGION: Key[fx.Node, int | None] = Key("region", "annotate")
#: The purpose of a collective.
COLLECTIVE: Key[fx.Node, Collective] = Key("collective", "shard")
#: The name of a placeholder's parameter.
PARAMETER: Key[fx.Node, str] = Key("parameter", "mark_inputs")
#: The name of a placeholder's buffer, or ``batch``.
INPUT: Key[fx.Node, str] = Key("input", "mark_inputs")
#: Of a placeholder: True if its memory is not the graph's (parameters, buffers, the batch).
STATIC: Key[fx.Node, bool] = Key("static", "mark_inputs")
#: Of a placeholder of a backward: True if it is a saved tensor or an output's gradient.
SAVED: Key[fx.Node, bool] = Key("saved", "mark_inputs")
#: Of a placeholder of a backward: True if others hold it too; no kernel may reuse its memory.
LENT: Key[fx.Node, bool] = Key("lent", "lend")
#: Of a placeholder of a backward: the memory of which it is a view, if it is not all of it.
STORAGE: Key[fx.Node, Storage] = Key("storage", "lend")
#: Of a node of a backward: the name of the same value's node in the forward, if it differs; "":
#: the forward has no such node.
SAVES: Key[fx.Node, str] = Key("saves", "the passes on a step")
#: The parameter (or slice of one) whose gathered value a node holds.
GATHERED: Key[fx.Node, str] = Key("gathered", "the capture of a step")
#: The name of the parameter whose reduced gradient a node holds.
GRADIENT_OF: Key[fx.Node, str] = Key("gradient_of", "shard or split")
#: True if the scheduler moves a node together with the wait before it.
AFTER_WAIT: Key[fx.Node, bool] = Key("after_wait", "shard")
#: Of a recomputed node in the backward: its key if the plan recomputes it by name, else "".
RECOMPUTED: Key[fx.Node, str] = Key("recomputed", "recompute")
#: Of a node of a partial graph (folded or one frame): its recomputation key in the whole step.
OPERATOR_KEY: Key[fx.Node, str] = Key("operator_key", "fold or join_frames")
#: Of a slice of tokens with which a chunk begins, or a product with which it ends: which chunk.
CHUNK: Key[fx.Node, Chunk] = Key("chunk", "chunk")
#: The reason why a collective does not start earlier.
HELD_BACK: Key[fx.Node, Reason] = Key("held_back", "reorder")
#: Of a collective: True if its wait comes early to free memory.
DRAINED: Key[fx.Node, bool] = Key("drained", "reorder")
#: The number of the layer of a folded step's node.
LAYER: Key[fx.Node, int] = Key("layer", "fold")
#: True for the node of a folded step at which its layer's time is measured.
ANCHOR: Key[fx.Node, bool] = Key("anchor", "fold")
#: The memory of a module's graph; valid until the next pass.
MEMORY: Key[fx.GraphModule, Memory] = Key("memory", "reorder")
#: The dataflow of a module's graph; valid until the next pass.
DATAFLOW: Key[fx.GraphModule, Dataflow] = Key("dataflow", "annotate")
#: Of a step module: the keys of tensors that the plan recomputes and this forward does not save, or
#: that the backward cannot recompute.
NOT_RECOMPUTED: Key[fx.GraphModule, list[str]] = Key("not_recomputed", "recompute")
#: Of a step module: by parameter that the plan leaves where it is, and that this step has to gather
#: all the same, the reason.
NOT_MOVED: Key[fx.GraphModule, dict[str, str]] = Key("not_moved", "move")
#: Of a step module: by weight whose tokens travel whole although the plan has chunks, the reason.
NOT_CHUNKED: Key[fx.GraphModule, dict[str, str]] = Key("not_chunked", "chunk")
#: The collectives of a module's graph before packing.
PACKABLE: Key[fx.GraphModule, list[Packable]] = Key("packable", "bucket")

#: Names of a module's nodes and the bytes alive at each while no collective overlaps compute. Only
#: while planning under a memory limit.
UNSCHEDULED: Key[fx.GraphModule, list[tuple[str, int]]] = Key("unscheduled", "reorder")

#: All keys of modules that a copy of a module keeps.
MODULE_KEYS: tuple[Key[fx.GraphModule, Any], ...] = (
    MEMORY,
    DATAFLOW,
    NOT_RECOMPUTED,
    NOT_MOVED,
    NOT_CHUNKED,
    PACKABLE,
    UNSCHEDULED,
)

"""Decisions: where a parameter is, and what happens to its gathered copy.

A decision has independent fields. The usual combinations have names; tables, errors and
``Plan.uniform`` use them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import ClassVar


class Scope(str, enum.Enum):
    """The ranks among which a parameter is sharded.

    Attributes:
        NONE: every rank has the full parameter.
        HOST: the ranks of each host of a two-dimensional mesh. Every host has the full parameter.
        ALL: all ranks.
    """

    NONE = "none"
    HOST = "host"
    ALL = "all"


class Moves(str, enum.Enum):
    """The smaller thing of an operator: what moves between the ranks.

    Attributes:
        WEIGHT: the weight is gathered to the data.
        ACTIVATIONS: the weight's shard stays, and the tokens of the ranks that share the weight are
            gathered to it (tensor parallel, ``passes/move/move_activations.py``).
    """

    WEIGHT = "weight"
    ACTIVATIONS = "activations"


#: The number of a scope's first decision.
_FIRST = {Scope.NONE: 0, Scope.ALL: 1, Scope.HOST: 3}


@dataclasses.dataclass(frozen=True, repr=False)
class Decision:
    """The decision for one parameter, beside its slices (``ParameterPlan``).

    | name                    | scope | keep  | elsewhere                                    |
    |-------------------------|-------|-------|----------------------------------------------|
    | ``replicate``           | none  | False | DDP: the gradient is all-reduced             |
    | ``shard_keep``          | all   | True  | ZeRO-2, ``reshard_after_forward=False``      |
    | ``shard_regather``      | all   | False | ZeRO-3, FSDP                                 |
    | ``shard_host_keep``     | host  | True  | ZeRO-2 within each host                      |
    | ``shard_host_regather`` | host  | False | HYBRID_SHARD, HSDP: gradient shards are      |
    |                         |       |       | all-reduced between hosts                    |

    Attributes:
        scope: the ranks among which it is sharded.
        keep: the gathered parameter is kept from the forward for the backward. Otherwise the
            backward regathers it. False for a replicated parameter.
    """

    scope: Scope = Scope.NONE
    keep: bool = False

    REPLICATE: ClassVar[Decision]
    SHARD_KEEP: ClassVar[Decision]
    SHARD_REGATHER: ClassVar[Decision]
    SHARD_HOST_KEEP: ClassVar[Decision]
    SHARD_HOST_REGATHER: ClassVar[Decision]

    def __post_init__(self) -> None:
        if self.keep and not self.sharded:
            raise ValueError(
                "keep=True needs a sharded parameter: a replicated one is not gathered"
            )

    @classmethod
    def named(cls, name: str | Decision) -> Decision:
        """The decision of this name; a decision is returned as it is.

        Raises:
            ValueError: for another name. The message lists the names.
        """
        if isinstance(name, Decision):
            return name
        found = _BY_NAME.get(_NAMES_OF_0_1.get(name, name)) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(f"{one!r} ({_KNOWN_AS[one]})" for one in _BY_NAME)
            raise ValueError(f"{name!r} is not a decision. Decisions: {known}")
        return found

    @property
    def name(self) -> str:
        """The name, as in the table above."""
        return _NAMES[self]

    @property
    def text(self) -> str:
        """The decision in words, for tables: ``shard within host, regather``."""
        if not self.sharded:
            return "replicate"
        where = "shard within host" if self.within_host else "shard"
        return f"{where}, {'keep' if self.keep else 'regather'}"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Decision.{self.name.upper()}"

    def __hash__(self) -> int:  # the planner hashes tuples of hundreds
        return self.number

    @functools.cached_property
    def number(self) -> int:
        """Its place among :data:`DECISIONS`."""
        return _FIRST[self.scope] + self.regathers

    @property
    def sharded(self) -> bool:
        return self.scope is not Scope.NONE

    @property
    def regathers(self) -> bool:
        """Whether the parameter is regathered in the backward."""
        return self.sharded and not self.keep

    @property
    def within_host(self) -> bool:
        """Whether each host has the full parameter, sharded over its ranks."""
        return self.scope is Scope.HOST


Decision.REPLICATE = Decision()
Decision.SHARD_KEEP = Decision(Scope.ALL, keep=True)
Decision.SHARD_REGATHER = Decision(Scope.ALL)
Decision.SHARD_HOST_KEEP = Decision(Scope.HOST, keep=True)
Decision.SHARD_HOST_REGATHER = Decision(Scope.HOST)

_BY_NAME = {
    "replicate": Decision.REPLICATE,
    "shard_keep": Decision.SHARD_KEEP,
    "shard_regather": Decision.SHARD_REGATHER,
    "shard_host_keep": Decision.SHARD_HOST_KEEP,
    "shard_host_regather": Decision.SHARD_HOST_REGATHER,
}
_NAMES = {decision: name for name, decision in _BY_NAME.items()}
#: Names of version 0.1.
_NAMES_OF_0_1 = {"shard_again": "shard_regather", "shard_host_again": "shard_host_regather"}
#: Names of each decision in other libraries.
_KNOWN_AS = {
    "replicate": "DDP",
    "shard_keep": "ZeRO-2",
    "shard_regather": "FSDP, ZeRO-3",
    "shard_host_keep": "ZeRO-2 within each host of a two-dimensional mesh",
    "shard_host_regather": "HYBRID_SHARD, HSDP: the same within each host",
}

#: All decisions, in the order of the table.
DECISIONS = tuple(_BY_NAME.values())
#: Decisions that are possible on any mesh.
FLAT_DECISIONS = tuple(decision for decision in DECISIONS if not decision.within_host)

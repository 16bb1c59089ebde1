"""The plan: what was decided for every parameter, and what was predicted for the step.

A :class:`Plan` is the only thing that carries decisions from the planner to the
passes. It is data: it prints as a table, saves as JSON, and can be given back.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 2


class Decision(str, enum.Enum):
    """What happens to one parameter.

    ``REPLICATE``: whole on every rank; its gradient is all-reduced (DDP).
    ``SHARD_KEEP``: sharded; gathered in the forward, kept for the backward (ZeRO-2-like).
    ``SHARD_AGAIN``: sharded; gathered in the forward, freed, gathered again (FSDP, ZeRO-3).
    ``SHARD_HOST_KEEP``, ``SHARD_HOST_AGAIN``: the same within each host of a mesh of two levels,
    every host having the whole; gradients are then all-reduced between hosts (HYBRID_SHARD).
    """

    REPLICATE = "replicate"
    SHARD_KEEP = "shard_keep"
    SHARD_AGAIN = "shard_again"
    SHARD_HOST_KEEP = "shard_host_keep"
    SHARD_HOST_AGAIN = "shard_host_again"

    @classmethod
    def _missing_(cls, value: object) -> Decision | None:
        known = ", ".join(f"{one.value!r} ({_KNOWN_AS[one]})" for one in cls)
        raise ValueError(f"{value!r} is not a decision. Decisions: {known}")

    @property
    def sharded(self) -> bool:
        return self is not Decision.REPLICATE

    @property
    def keeps(self) -> bool:
        """Whether what was gathered in the forward is kept for the backward."""
        return self in (Decision.SHARD_KEEP, Decision.SHARD_HOST_KEEP)

    @property
    def again(self) -> bool:
        """Whether what was gathered in the forward is gathered again in the backward."""
        return self.sharded and not self.keeps

    @property
    def within_host(self) -> bool:
        """Whether each host has the whole parameter, cut over its ranks."""
        return self in (Decision.SHARD_HOST_KEEP, Decision.SHARD_HOST_AGAIN)


#: What people call each decision elsewhere.
_KNOWN_AS = {
    Decision.REPLICATE: "DDP",
    Decision.SHARD_KEEP: "ZeRO-2",
    Decision.SHARD_AGAIN: "FSDP, ZeRO-3",
    Decision.SHARD_HOST_KEEP: "ZeRO-2 within each host of a mesh of two levels",
    Decision.SHARD_HOST_AGAIN: "HYBRID_SHARD, HSDP: the same within each host",
}

#: What can be decided on any mesh.
FLAT_DECISIONS = tuple(decision for decision in Decision if not decision.within_host)


#: For errors.
_UNIFORM = "As: Plan.uniform(model.named_parameters(), 'shard_again', world_size=8)"

#: See :class:`ParameterPlan`.
OF_INPUT = -1


class Split(NamedTuple):
    """How a parameter's operators are sliced: see :class:`ParameterPlan`."""

    name: str
    slices: int
    along: int = 0
    like: str | None = None
    kept_slices: int = 0


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """The decision for one parameter.

    ``saved_bytes``: what the decision saves on each rank against replicating it
    (state only: parameter, gradient and optimizer state).
    ``reason``: why, in one line for people.
    ``slices``: in how many its operators run, one after the other
    (``passes/split/split_operators.py``); 1: whole.
    ``along``: the dimension that is sliced; :data:`OF_INPUT`: none of the parameter, but the rows
    of what it is multiplied with. ``like``: the parameter whose rows are sliced as its dimension
    ``along`` is, where one operator's slices go into the other's.
    ``kept_slices``: so many of its slices, the first, are kept for the backward although the others
    are gathered again.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    decision: Decision
    saved_bytes: int = 0
    reason: str = ""
    slices: int = 1
    along: int = 0
    like: str | None = None
    kept_slices: int = 0

    @property
    def kept_share(self) -> float:
        """How much of what is gathered in the forward is kept for the backward: 0 to 1."""
        return 1.0 if self.decision.keeps else self.kept_slices / self.slices


@dataclasses.dataclass(frozen=True)
class Collective:
    """What a collective is for: the parameters it serves, and whether it gathers or reduces.

    ``leg``: which of its legs it is, where it is carried out along the dimensions of a mesh one
    after the other (``passes/overlap/hierarchical_collectives.py``); what is carried out over all
    ranks at once is 0.
    """

    names: tuple[str, ...]
    gathers: bool
    leg: int = 0

    @property
    def label(self) -> str:
        later = f", leg {self.leg + 1}" if self.leg else ""
        return f"{'gather' if self.gathers else 'reduce'} {'+'.join(self.names)}{later}"

    @property
    def first(self) -> Collective:
        """Its first leg."""
        return dataclasses.replace(self, leg=0)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What the simulator says of one training step on one rank.

    ``peak`` maps what is alive at the peak (``parameters``, ``gradients``,
    ``optimizer``, ``activations``, ``gathered``, ``communication``, ``inputs``)
    to bytes; the values add up to ``peak_bytes``.
    ``recomputed_bytes``: of the activations that are not saved but computed again, which takes
    ``recomputed_seconds`` of the backward.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    peak_bytes: int
    peak: dict[str, int]
    recomputed_bytes: int = 0
    recomputed_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decisions for every parameter of a model, for one world size.

    ``bucket_bytes``: collectives below this travel together up to this size.
    ``in_flight_bytes``: at most this many bytes of gathered weights wait ahead of
    their use, and of gradients wait behind their reduction (None: no bound).
    ``order``: by graph (``"forward"``, ``"backward"``), what the collectives are for in the
    order they start; those for several parameters are the buckets, and those with later legs
    run along the levels of a mesh. It is decided once, for all: ranks with other batch sizes,
    which would each like another order, follow it (a graph it does not fit gets buckets, legs
    and an order that no batch size enters).
    ``ranks_of_a_host``: of the mesh of two levels that the plan was made for, if it was.
    ``recompute``: what the forward would save for the backward and is computed again there
    instead, by module and operator: ``blocks.0.up:addmm:0``
    (``passes/recompute/recompute_activations.py``).
    ``also_save``: what the forward saves besides, for what is recomputed to begin with.
    """

    parameters: tuple[ParameterPlan, ...]
    world_size: int
    memory_limit_bytes: int | None = None
    bucket_bytes: int = 1 << 20
    in_flight_bytes: int | None = None
    prediction: Prediction | None = None
    order: dict[str, tuple[Collective, ...]] = dataclasses.field(default_factory=dict)
    ranks_of_a_host: int | None = None
    recompute: tuple[str, ...] = ()
    also_save: tuple[str, ...] = ()

    def decision(self, name: str) -> Decision:
        """The decision for a parameter; KeyError if the plan does not know it."""
        return self._by_name[name].decision

    def __getitem__(self, name: str) -> ParameterPlan:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @functools.cached_property
    def shards(self) -> bool:
        """Whether anything is sharded."""
        return any(row.decision.sharded for row in self.parameters)

    @functools.cached_property
    def within_hosts(self) -> bool:
        """Whether anything is sharded within hosts."""
        return any(row.decision.within_host for row in self.parameters)

    @property
    def _by_name(self) -> dict[str, ParameterPlan]:
        cached: dict[str, ParameterPlan] | None = self.__dict__.get("_names")
        if cached is None:
            cached = {p.name: p for p in self.parameters}
            object.__setattr__(self, "_names", cached)
        return cached

    @classmethod
    def uniform(
        cls,
        parameters: Iterable[tuple[str, Any]],
        decision: Decision | str | None = None,
        *,
        world_size: int | None = None,
        bucket_bytes: int = 1 << 20,
        ranks_of_a_host: int | None = None,
    ) -> Plan:
        """One decision for all parameters; what is too small to be cut so is replicated.

        ``parameters``: as ``model.named_parameters()`` gives them. ``decision`` and ``world_size``
        are needed: without a default they would be missed without a list of decisions.
        ``ranks_of_a_host``: of a mesh of two levels; needed to shard within hosts.

        Raises:
            ValueError: for an unknown decision, or if something needed is not given.
            TypeError: if ``parameters`` are none.

        Example::

            Plan.uniform(model.named_parameters(), "shard_again", world_size=8)
        """
        given = parameters if isinstance(parameters, str | Decision) else decision
        chosen = Decision(given)  # says which there are
        pairs = None if isinstance(parameters, str | Decision) else _pairs(parameters)
        if pairs is None:
            raise TypeError(f"Plan.uniform needs named parameters, not {parameters!r}. {_UNIFORM}")
        if world_size is None or isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"world_size={world_size!r} is not a number of ranks. {_UNIFORM}")
        ranks = ranks_of_a_host if chosen.within_host else world_size
        if ranks is None:
            raise ValueError(f"{chosen.value!r} needs ranks_of_a_host, how many ranks a host has")
        rows = tuple(
            ParameterPlan(
                name=name,
                shape=tuple(p.shape),
                dtype=str(p.dtype).removeprefix("torch."),
                decision=chosen if shardable(tuple(p.shape), ranks) else Decision.REPLICATE,
                reason="by hand",
            )
            for name, p in pairs
        )
        return cls(
            rows,
            world_size=world_size,
            bucket_bytes=bucket_bytes,
            ranks_of_a_host=ranks_of_a_host,
        )

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def split(
        self,
        name: str,
        slices: int,
        along: int = 0,
        like: str | None = None,
        kept_slices: int = 0,
    ) -> Plan:
        """A copy in which a parameter's operators run in slices (:class:`ParameterPlan`).

        What was decided of the order of collectives, and the prediction, no longer hold.

        Raises:
            ValueError: if the parameter cannot be split so.
        """
        row = self[name]
        of_input = along == OF_INPUT
        if not of_input and not (0 <= along < len(row.shape) and 1 <= slices <= row.shape[along]):
            raise ValueError(
                f"parameter {name!r} of shape {row.shape} has no {slices} slices along {along}"
            )
        if kept_slices and (of_input or not row.decision.again):
            raise ValueError(
                f"parameter {name!r} is {row.decision.value}"
                + (" and sliced by the rows of its input" if of_input else "")
                + ": some slices are kept and others not only of a weight in slices that is "
                "gathered again; leave out kept_slices"
            )
        if not 0 <= kept_slices <= slices:
            raise ValueError(f"parameter {name!r}: {kept_slices} of {slices} slices cannot be kept")
        if like is not None and (
            like not in self
            or (self[like].slices, self[like].along) != (slices, 0)
            or self[like].shape[0] != row.shape[along]
        ):
            raise ValueError(
                f"parameter {name!r} cannot be sliced like {like!r}: that must be in {slices} "
                f"slices along its {row.shape[along]} rows"
            )
        own = dataclasses.replace(
            row, slices=slices, along=along, like=like, kept_slices=kept_slices
        )
        rows = tuple(own if one.name == name else one for one in self.parameters)
        return self.replace(parameters=rows, order={}, prediction=None)

    def mismatch(
        self,
        parameters: Iterable[tuple[str, tuple[int, ...], str]],
        world_size: int,
        ranks_of_a_host: int | None = None,
    ) -> str | None:
        """The first difference between this plan and a model, in words; None if it fits.

        ``parameters``: (name, shape, dtype without ``torch.``) of the model.
        ``ranks_of_a_host``: of the run's mesh, if it has two levels.
        """
        if self.world_size != world_size:
            return f"the plan is for {self.world_size} ranks, this run has {world_size}"
        if self.within_hosts and self.ranks_of_a_host != ranks_of_a_host:
            mesh = "no mesh of two levels with rates along both"
            if ranks_of_a_host is not None:
                mesh = f"hosts of {ranks_of_a_host}"
            return (
                f"the plan shards within hosts of {self.ranks_of_a_host} ranks, this run has {mesh}"
            )
        seen: set[str] = set()
        for name, shape, dtype in parameters:
            seen.add(name)
            if name not in self:
                return f"the model's parameter {name!r} is not in the plan"
            row = self[name]
            if row.shape != tuple(shape):
                return (
                    f"parameter {name!r} has shape {tuple(shape)} here and {row.shape} in the plan"
                )
            if row.dtype != dtype:
                return f"parameter {name!r} has dtype {dtype} here and {row.dtype} in the plan"
        for row in self.parameters:
            if row.name not in seen:
                return f"the plan's parameter {row.name!r} is not in the model"
        return None

    def order_for(self, phase: str, graph: Iterable[Collective]) -> tuple[Collective, ...] | None:
        """The order of a graph's collectives: of the step's, or of one of its frames' alone.

        ``graph``: the collectives of the graph, packed or not, in legs or not. A frame between
        graph breaks keeps what the step's order says of its own parameters. None: the order does
        not know all of them, as of a plan made by hand.
        """
        served = _served(graph)
        own = set(served)
        planned = [
            dataclasses.replace(
                one, names=tuple(name for name in one.names if (one.gathers, name) in own)
            )
            for one in self.order.get(phase, ())
        ]
        planned = [one for one in planned if one.names]
        if not planned or _served(planned) != served:
            return None
        return tuple(planned)

    def to_dict(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["format"] = FORMAT
        for row in data["parameters"]:
            row["decision"] = row["decision"].value
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that :meth:`to_dict` wrote.

        Raises:
            ValueError: if the data is not a plan of this format.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"not a plan of format {FORMAT} (found {found!r}); make it again with this version"
            )
        try:
            rows = tuple(
                ParameterPlan(
                    name=row["name"],
                    shape=tuple(row["shape"]),
                    dtype=row["dtype"],
                    decision=Decision(row["decision"]),
                    saved_bytes=row["saved_bytes"],
                    reason=row["reason"],
                    slices=row.get("slices", 1),  # older plans have none
                    along=row.get("along", 0),
                    like=row.get("like"),
                    kept_slices=row.get("kept_slices", 0),
                )
                for row in data["parameters"]
            )
            prediction = data["prediction"]
            return cls(
                parameters=rows,
                world_size=data["world_size"],
                memory_limit_bytes=data["memory_limit_bytes"],
                bucket_bytes=data["bucket_bytes"],
                in_flight_bytes=data["in_flight_bytes"],
                prediction=Prediction(**prediction) if prediction else None,
                order={
                    graph: tuple(
                        Collective(tuple(c["names"]), c["gathers"], c.get("leg", 0))
                        for c in collectives
                    )
                    for graph, collectives in data["order"].items()
                },
                ranks_of_a_host=data.get("ranks_of_a_host"),
                recompute=tuple(data.get("recompute", ())),  # older plans have none
                also_save=tuple(data.get("also_save", ())),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the plan is damaged: {error!r}; make it again") from error

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by :meth:`save`; ValueError if the file holds none."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} holds no plan: {error}") from error
        return cls.from_dict(data)


def _served(collectives: Iterable[Collective]) -> list[tuple[bool, str]]:
    """What is gathered and what is reduced, each parameter by itself."""
    return sorted((c.gathers, name) for c in collectives if c.leg == 0 for name in c.names)


def _pairs(parameters: Any) -> list[tuple[str, Any]] | None:
    """Named parameters; None for something else, as a module or parameters without names."""
    if not isinstance(parameters, Iterable):
        return None
    pairs = list(parameters)
    named = all(type(one) is tuple and len(one) == 2 and isinstance(one[0], str) for one in pairs)
    return pairs if named else None


def shardable(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a parameter of this shape can be cut over so many ranks, along its first dimension.

    A scalar has none; a tensor with fewer elements than ranks is not worth a shard.
    """
    numel = 1
    for size in shape:
        numel *= size
    return len(shape) > 0 and numel >= ranks and shape[0] > 1

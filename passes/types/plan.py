"""The plan: the decision for every parameter, and the prediction for the step.

Only a ``Plan`` carries decisions from the planner to the passes. It is data: it saves as
JSON, and users can load it and pass it to a run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from passes.types.decision import Decision, Moves, Scope
from passes.types.decode import decoded, encoded
from passes.types.plan_format_2 import of_format_2
from passes.types.shard_layout import ShardLayout
from passes.types.units import format_ranks

FORMAT = 3


#: Fields with a default that every saved plan has.
_WRITTEN = (
    "memory_limit_bytes",
    "bucket_bytes",
    "in_flight_bytes",
    "prediction",
    "order",
    "saved_bytes",
    "reason",
)

#: For errors.
_UNIFORM = "As: Plan.uniform(model.named_parameters(), 'shard_regather', world_size=8)"

#: See ``ParameterPlan``.
OF_INPUT = -1


class Split(NamedTuple):
    """Slices of a parameter's operators: see ``ParameterPlan``."""

    name: str
    slices: int
    along: int = 0
    like: str | None = None
    kept_slices: int = 0


@dataclasses.dataclass(frozen=True)
class ParameterPlan:
    """The decision for one parameter.

    Attributes:
        name: name of the parameter, as in ``named_parameters()``.
        shape: its whole shape.
        dtype: its dtype, without ``torch.``.
        decision: where it is, and what happens to its gathered copy.
        saved_bytes: bytes saved on each rank against replication (state only: parameter, gradient
            and optimizer state).
        reason: one line for people.
        slices: number of slices in which its operators run, one after the other
            (``passes/split/split_operators.py``); 1: whole.
        along: the sliced dimension of the parameter; ``OF_INPUT``: the rows of the operator's
            input are sliced instead.
        like: another parameter, whose rows have the same slices as dimension ``along`` of this one.
            The output slices of that parameter's operator are inputs of this parameter's slices.
        kept_slices: number of slices, from the first, that are kept gathered for the backward; the
            others are regathered.
        moves: ``activations``: every rank keeps its shard, and the tokens of the ranks that share
            the parameter travel to it: of all ranks, or of the ranks of each host. The parameter is
            never gathered; the decision's ``keep`` says whether the gathered tokens are kept for
            the backward.
        dim: the dimension that it is sharded along; 0 for every parameter whose weight moves.
        chunks: number of chunks in which the tokens of a rank travel to it, one of them while
            another one computes (``passes/chunk/chunk_tokens.py``); to attention, these are of
            sequences; 1: whole. All parameters of a group have the same number.
        alone: its product is a group of its own: the ranks exchange the features of its result, and
            of the gradient, so that each has its own tokens whole. False: a rank has some features
            up to the product that contracts them.
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
    moves: Moves = Moves.WEIGHT
    dim: int = 0
    chunks: int = 1
    alone: bool = False

    def __post_init__(self) -> None:
        stays = self.moves is Moves.ACTIVATIONS
        if self.dim and not stays:
            raise ValueError(f"parameter {self.name!r}: dim={self.dim} needs moves='activations'")
        if self.chunks < 1 or (self.chunks > 1 and not stays):
            raise ValueError(
                f"parameter {self.name!r}: chunks={self.chunks} needs a number of at least 1, and "
                "above 1 moves='activations'"
            )
        if self.alone and (not stays or len(self.shape) != 2):
            raise ValueError(
                f"parameter {self.name!r}: alone=True needs a matrix with moves='activations'"
            )
        if stays and (not self.decision.sharded or self.slices > 1):
            raise ValueError(
                f"parameter {self.name!r}: moves='activations' needs a sharded parameter in one "
                "slice"
            )

    @property
    def kept_share(self) -> float:
        """Share of the gathered parameter that is kept for the backward: 0 to 1."""
        return 1.0 if self.keeps_gathered else self.kept_slices / self.slices

    @property
    def keeps_gathered(self) -> bool:
        """Whether the whole gathered parameter is kept for the backward."""
        return self.decision.keep and self.moves is Moves.WEIGHT


@dataclasses.dataclass(frozen=True)
class Collective:
    """The purpose of a collective: its parameters, and whether it gathers or reduces.

    Attributes:
        names: its parameters; several share a bucket.
        gathers: True: it gathers parameters; False: it reduces gradients.
        stage: the stage of a hierarchical collective, which runs along one mesh dimension after the
            other (``passes/overlap/hierarchical_collectives.py``); 0: the first stage, or a flat
            collective.
        tokens: it gathers or sums activations for these parameters, which stay where they are
            (``passes/move/move_activations.py``).
    """

    names: tuple[str, ...]
    gathers: bool
    stage: int = 0
    tokens: bool = False

    @property
    def label(self) -> str:
        later = f", stage {self.stage + 1}" if self.stage else ""
        what = "tokens for " if self.tokens else ""
        return f"{'gather' if self.gathers else 'reduce'} {what}{'+'.join(self.names)}{later}"

    @property
    def gathers_weights(self) -> bool:
        """Whether it gathers parameters."""
        return self.gathers and not self.tokens

    @property
    def first(self) -> Collective:
        """The same collective's first stage."""
        return dataclasses.replace(self, stage=0)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The simulator's prediction for one training step on one rank.

    Attributes:
        step_seconds: seconds of the step.
        compute_seconds: the part in which compute runs.
        exposed_seconds: the part in which compute waits for communication.
        peak_bytes: most bytes alive at once.
        peak: bytes alive at the peak by kind (``parameters``, ``gradients``, ``optimizer``,
            ``activations``, ``gathered``, ``communication``, ``inputs`` and others); the values add
            up to ``peak_bytes``.
        recomputed_bytes: bytes of the activations that the backward recomputes instead of reading
            saved ones.
        recomputed_seconds: the time of this in the backward.
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

    Attributes:
        parameters: the decision for every parameter.
        world_size: number of ranks.
        memory_limit_bytes: the limit that the search kept; None: none.
        prediction: the simulated step; None for a plan made by hand.
        bucket_bytes: smaller collectives are packed into buckets of at most this size.
        in_flight_bytes: limit on gathered weights in flight before their use, and on gradients in
            reduction (None: no limit).
        order: the collectives of each graph (``"forward"``, ``"backward"``) in start order.
            Collectives of several parameters are buckets. Collectives with later stages are
            hierarchical. One order holds for all ranks, whatever their batch sizes. A graph that it
            does not fit gets buckets, stages and an order that no batch size affects.
        ranks_of_a_host: ranks along the inner dimension of the plan's mesh; None: the ranks are
            flat.
        recompute: keys of activations that the backward recomputes instead of the forward saving
            them, by module and operator: ``blocks.0.up:addmm:0``
            (``passes/recompute/recompute_activations.py``).
        also_save: keys of tensors that the forward saves as inputs of this recomputation.
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

    @functools.cached_property
    def moved(self) -> frozenset[str]:
        """The parameters that stay where they are while activations move."""
        return frozenset(row.name for row in self.parameters if row.moves is Moves.ACTIVATIONS)

    @functools.cached_property
    def alone(self) -> frozenset[str]:
        """The weights that stay where they are and are groups of their own."""
        return frozenset(row.name for row in self.parameters if row.alone)

    @functools.cached_property
    def _by_name(self) -> dict[str, ParameterPlan]:
        return {row.name: row for row in self.parameters}

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
        """One decision for all parameters; parameters too small to shard are replicated.

        ``parameters``: the pairs of ``model.named_parameters()``. ``decision`` and ``world_size``
        are required; they have a default so that the error can list the decisions.
        ``ranks_of_a_host``: ranks along the inner mesh dimension; required to shard within hosts.

        Raises:
            ValueError: for an unknown or missing decision, or a missing ``ranks_of_a_host``.
            TypeError: if ``parameters`` are not named parameters, or ``world_size`` is no integer.

        Examples:
            >>> import torch
            >>> model = torch.nn.Linear(16, 16)
            >>> plan = Plan.uniform(model.named_parameters(), "shard_regather", world_size=8)
            >>> plan["weight"].decision
            Decision.SHARD_REGATHER
        """
        given = parameters if isinstance(parameters, str | Decision) else decision
        chosen = Decision.named(given or "")  # the error lists the decisions
        pairs = None if isinstance(parameters, str | Decision) else _pairs(parameters)
        if pairs is None:
            raise TypeError(f"Plan.uniform needs named parameters, not {parameters!r}. {_UNIFORM}")
        if world_size is None or isinstance(world_size, bool) or not isinstance(world_size, int):
            raise TypeError(f"world_size={world_size!r} is not a number of ranks. {_UNIFORM}")
        ranks = ranks_of_a_host if chosen.within_host else world_size
        if ranks is None:
            raise ValueError(f"{chosen.name!r} needs ranks_of_a_host, how many ranks a host has")
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
        """A copy in which a parameter's operators run in slices (``ParameterPlan``).

        The copy has no order of collectives and no prediction: both belong to the plan without
        these slices.

        Raises:
            ValueError: if the parameter cannot have these slices.
        """
        row = self[name]
        of_input = along == OF_INPUT
        if not of_input and not (0 <= along < len(row.shape) and 1 <= slices <= row.shape[along]):
            raise ValueError(
                f"parameter {name!r} of shape {row.shape} has no {slices} slices along {along}"
            )
        if kept_slices and (of_input or not row.decision.regathers):
            raise ValueError(
                f"parameter {name!r} is {row.decision.name}"
                + (" and sliced by the rows of its input" if of_input else "")
                + ": kept_slices needs a regathered parameter whose rows are sliced; leave it out"
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

    def tensor_parallel(
        self,
        dims: Mapping[str, int],
        *,
        within_hosts: bool = False,
        keep_tokens: bool = False,
        chunks: int = 1,
        alone: bool = False,
    ) -> Plan:
        """A copy in which these parameters stay where they are, and activations move.

        ``dims``: the dimension of each parameter that the ranks share. Of the two linears of an
        MLP: 0 for the first one's weight and bias, 1 for the second one's weight.
        ``within_hosts``: the ranks of each host share them, and every host has them whole. The plan
        needs ``ranks_of_a_host``.
        ``keep_tokens``: the backward reads the tokens that the forward gathered. Otherwise it
        gathers them again.
        ``chunks``: in how many chunks a rank's tokens travel to the two linears of an MLP, the
        three of a gated one, or the four of attention; 1: whole.
        ``alone``: each of these weights is a group of its own, whatever reads its product.

        The copy has no order of collectives and no prediction.

        Raises:
            ValueError: if a rank would have nothing of a parameter along its dimension, if the
                plan has no hosts, if ``chunks`` is below 1, or if ``alone`` is not for matrices.

        Examples:
            >>> import torch
            >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
            >>> plan = Plan.uniform(mlp.named_parameters(), "replicate", world_size=2)
            >>> plan = plan.tensor_parallel({"0.weight": 0, "0.bias": 0, "1.weight": 1})
            >>> sorted(plan.moved)
            ['0.bias', '0.weight', '1.weight']
        """
        if within_hosts and self.ranks_of_a_host is None:
            raise ValueError(
                "within_hosts=True needs a plan with hosts: give Plan.uniform ranks_of_a_host, how "
                "many ranks a host has"
            )
        decision = Decision(Scope.HOST if within_hosts else Scope.ALL, keep=keep_tokens)
        ranks = self._ranks_of(decision)
        rows = {row.name: row for row in self.parameters}
        for name, dim in dims.items():
            row = self[name]
            if ranks == 1 or not _is_shared(row.shape, dim, ranks):
                raise ValueError(
                    f"parameter {name!r} of shape {row.shape} cannot stay on {ranks} "
                    f"ranks along dimension {dim}, a rank would have nothing: let its weight move"
                )
            rows[name] = dataclasses.replace(
                row,
                decision=decision,
                moves=Moves.ACTIVATIONS,
                dim=dim,
                chunks=chunks,
                alone=alone,
                slices=1,
                along=0,
                like=None,
                kept_slices=0,
            )
        return self.replace(parameters=tuple(rows.values()), order={}, prediction=None)

    def _ranks_of(self, decision: Decision) -> int:
        """The number of ranks among which a sharded parameter is divided."""
        return (self.ranks_of_a_host or 1) if decision.within_host else self.world_size

    def mismatch(
        self,
        parameters: Iterable[tuple[str, tuple[int, ...], str]],
        world_size: int,
        ranks_of_a_host: int | None = None,
    ) -> str | None:
        """The first difference between this plan and a run, in words; None if it fits.

        ``parameters``: (name, shape, dtype without ``torch.``) of the model.
        ``ranks_of_a_host``: ranks along the inner dimension of the run's mesh, if it has two.
        """
        other_ranks = self._other_ranks(world_size, ranks_of_a_host)
        if other_ranks is not None:
            return other_ranks
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
        return self._not_shared()

    def _not_shared(self) -> str | None:
        """A parameter that cannot stay where the plan leaves it, in words; None: there is none."""
        for row in self.parameters:
            if row.moves is Moves.WEIGHT:
                continue
            ranks, hosts = self._ranks_of(row.decision), 1
            if self.within_hosts and not row.decision.within_host:
                hosts = ranks // (self.ranks_of_a_host or 1)
            if not _is_shared(row.shape, row.dim, ranks, hosts):
                return (
                    f"parameter {row.name!r} of shape {row.shape} cannot stay on {ranks} "
                    f"ranks along dimension {row.dim}: a rank would have nothing"
                )
        return None

    def _other_ranks(self, world_size: int, ranks_of_a_host: int | None) -> str | None:
        """The difference between this plan's ranks and a run's, in words; None: none."""
        if self.world_size != world_size:
            return f"the plan is for {format_ranks(self.world_size)}, this run has {world_size}"
        if world_size == 1 and self.shards:
            return f"the plan shards parameters, and this run has {format_ranks(1)}"
        if self.within_hosts and self.ranks_of_a_host != ranks_of_a_host:
            mesh = "no two-dimensional mesh with rates along both"
            if ranks_of_a_host is not None:
                mesh = f"hosts of {ranks_of_a_host}"
            return (
                f"the plan shards within hosts of {self.ranks_of_a_host} ranks, this run has {mesh}"
            )
        return None

    def order_for(self, phase: str, graph: Iterable[Collective]) -> tuple[Collective, ...] | None:
        """The start order of a graph's collectives; the graph is a step or one of its frames.

        ``graph``: the collectives of the graph, packed or not, in stages or not. A frame between
        graph breaks gets the part of the step's order for its own parameters. None: the order
        lacks some of them, as in a plan made by hand.
        """
        served = _served(graph)
        own = set(served)
        planned = [
            dataclasses.replace(
                one,
                names=tuple(name for name in one.names if (one.gathers, one.tokens, name) in own),
            )
            for one in self.order.get(phase, ())
        ]
        planned = [one for one in planned if one.names]
        if not planned or _served(planned) != served:
            return None
        return tuple(planned)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **encoded(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan that ``to_dict`` wrote, in this format or in format 2.

        Raises:
            ValueError: if the data is not such a plan. The message names the field.
        """
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        if found not in (2, FORMAT):
            raise ValueError(
                f"not a plan of format {FORMAT} (found {found!r}); make a new one with this version"
            )
        fields = {name: value for name, value in data.items() if name != "format"}
        try:
            return decoded(cls, of_format_2(fields) if found == 2 else fields, _WRITTEN)
        except ValueError as error:
            raise ValueError(f"the plan is damaged: {error}; make a new one") from error

    def to_json(self) -> str:
        """The text of a saved plan."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan written by ``save``; ValueError, with the path, if the file holds none."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} holds no plan: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _served(collectives: Iterable[Collective]) -> list[tuple[bool, bool, str]]:
    """All (gathers, tokens, parameter name), sorted; later stages are left out."""
    return sorted(
        (c.gathers, c.tokens, name) for c in collectives if c.stage == 0 for name in c.names
    )


def _pairs(parameters: Any) -> list[tuple[str, Any]] | None:
    """Named parameters; None for anything else, as a module or unnamed parameters."""
    if not isinstance(parameters, Iterable):
        return None
    pairs = list(parameters)
    named = all(type(one) is tuple and len(one) == 2 and isinstance(one[0], str) for one in pairs)
    return pairs if named else None


def _is_shared(shape: tuple[int, ...], dim: int, ranks: int, hosts: int = 1) -> bool:
    """Whether each rank has a part of a parameter along a dimension."""
    layout = ShardLayout(ranks, 0, "", hosts)
    return 0 <= dim < len(shape) and layout.fewest_rows(shape[dim]) > 0


def shardable(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether a parameter of this shape can be sharded over ``ranks`` along its first dimension.

    False for one rank, a scalar, a single row, and fewer elements than ranks.
    """
    numel = 1
    for size in shape:
        numel *= size
    return ranks > 1 and len(shape) > 0 and numel >= ranks and shape[0] > 1

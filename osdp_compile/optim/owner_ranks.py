"""Owner ranks: updates of whole matrices, each computed by one rank for all.

Optimizers such as Muon need an update's whole matrix. Each matrix has an owner. The owner gathers
the ranks' parts of the update, computes, and sends every rank its part of the result. Matrices go
in rounds: the parts of the next round travel while the owners compute this one. A round is bounded
in bytes, so that few whole matrices are in memory at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from osdp_compile.errors import OsdpError
from osdp_compile.runtime.eager_markers import group_of
from passes.annotate.owner_ranks import (
    ROUND_BYTES,
    orthogonal_flops,
    owners,
    replicas_have_owners,
)
from passes.types.context import Context
from passes.types.shard_layout import ShardLayout


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How the ranks share the update of one matrix.

    Attributes:
        group_name: the process group of all ranks.
        dim: the sharded dimension.
        rows: first and last (exclusive) row along ``dim``, by place. Place ``i`` is that of the
            ranks ``i``, ``i + len(rows)``, ...: consecutive ranks hold the whole matrix together.
        computed_by_all: a replicated matrix that every rank computes.
    """

    group_name: str
    dim: int
    rows: tuple[tuple[int, int], ...]
    computed_by_all: bool

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of a whole update."""
        start, stop = self.rows[rank % len(self.rows)]
        return whole.narrow(self.dim, start, stop - start)

    def part_shape(self, whole: Sequence[int], rank: int) -> list[int]:
        """The shape of a rank's part."""
        start, stop = self.rows[rank % len(self.rows)]
        return [stop - start if dim == self.dim else size for dim, size in enumerate(whole)]

    def together(self, rank: int, other: int) -> bool:
        """Whether both ranks are among the same consecutive ones that hold the whole matrix."""
        return rank // len(self.rows) == other // len(self.rows)


#: Parameters of a model that is sharded or replicated here -> how the ranks share them.
_shared: Any = WeakTensorKeyDictionary()


def share(parameter: nn.Parameter, name: str, ctx: Context) -> None:
    """Record how the ranks share a parameter's update, if it is a matrix.

    A matrix that is on other mesh dimensions too (tensor parallelism) is left to torch.
    """
    if parameter.dim() != 2 or ctx.world_size == 1 or ctx.model_groups:
        return
    layout = ctx.layout_of(name)
    total = parameter.shape[layout.dim]
    rows = _rows(layout.ranks, layout.hosts, total) if layout.ranks > 1 else ((0, total),)
    by_all = layout.ranks == 1 and not replicas_have_owners(
        tuple(parameter.shape), ctx.hardware, ctx.world_size
    )
    _shared[parameter] = Sharing(ctx.group_name, layout.dim, rows, by_all)


@functools.lru_cache(maxsize=1 << 10)
def _rows(ranks: int, hosts: int, total: int) -> tuple[tuple[int, int], ...]:
    """The rows of each place of a shard layout."""
    return tuple(ShardLayout(ranks, place, "", hosts).rows(total) for place in range(ranks))


def is_shared(parameter: Tensor) -> bool:
    """Whether the parameter is a matrix of a compiled or sharded model."""
    return parameter in _shared


@torch.no_grad()
def update_by_owners(
    parameters: Sequence[nn.Parameter],
    update: Callable[[nn.Parameter], Tensor],
    compute: Callable[[nn.Parameter, Tensor], Tensor],
    apply: Callable[[nn.Parameter, Tensor], None],
    dtype: torch.dtype = torch.bfloat16,
    flops: Callable[[Sequence[int]], int] = orthogonal_flops,
) -> None:
    """Compute something of each whole update on one rank, and apply it on all. Collective.

    For optimizers that need whole matrices. Every rank calls it with the same parameters, in the
    same order. A matrix has the same owner in each call with the same parameters, so ``compute``
    may keep state of its own for it.

    Args:
        parameters: matrices of models that the backend compiled or sharded.
        update: this rank's part of a parameter's update, in ``dtype``. Called once for each.
        compute: takes a parameter and its whole update, and returns a tensor of the same shape and
            type. The owner calls it; every rank does for replicated matrices that take longer to
            send than to compute.
        apply: takes a parameter and this rank's part of the result.
        dtype: the type in which updates and results travel.
        flops: the cost of ``compute`` for a shape, by which the owners are balanced.

    Raises:
        OsdpError: for a parameter that is no matrix of a compiled or sharded model.
    """
    runs: dict[str, _Run] = {}
    for index, parameter in enumerate(parameters):
        sharing = _shared.get(parameter)
        if sharing is None:
            raise OsdpError(
                f"parameter {index} of update_by_owners, of shape {tuple(parameter.shape)}, is no "
                "matrix of a model that backend='osdp' compiled, after its first call: build the "
                "optimizer from model.parameters()"
            )
        if sharing.computed_by_all:
            apply(parameter, compute(parameter, update(parameter)))
            continue
        if sharing.group_name not in runs:
            like = torch.empty(0, dtype=dtype, device=parameter.device)
            runs[sharing.group_name] = _Run(group_of(sharing.group_name), like, update)
        runs[sharing.group_name].matrices.append(_Matrix(parameter, sharing))
    for run in runs.values():
        run.go(compute, apply, flops)


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A parameter, and how the ranks share it."""

    parameter: nn.Parameter
    sharing: Sharing

    @property
    def gathered(self) -> bool:
        return len(self.sharing.rows) > 1

    def part_shape(self, rank: int) -> list[int]:
        return self.sharing.part_shape(self.parameter.shape, rank)


#: A matrix, its owner, and this rank's part of its update.
_Item = tuple[_Matrix, int, Tensor]


class _Run:
    """Matrices of one process group.

    ``like``: an empty tensor of the updates' type, on the ranks' device.
    """

    def __init__(
        self, group: dist.ProcessGroup, like: Tensor, update: Callable[[nn.Parameter], Tensor]
    ) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.like, self.update = like, update
        self.matrices: list[_Matrix] = []

    def go(
        self,
        compute: Callable[[nn.Parameter, Tensor], Tensor],
        apply: Callable[[nn.Parameter, Tensor], None],
        flops: Callable[[Sequence[int]], int],
    ) -> None:
        """Compute and apply all updates."""
        costs = [flops(tuple(one.parameter.shape)) for one in self.matrices]
        rounds = self.rounds(owners(costs, self.ranks))
        now, coming = self.gather(rounds[0])
        for number in range(len(rounds)):
            wholes = self.wholes(now, coming)
            if number + 1 < len(rounds):
                after, coming = self.gather(rounds[number + 1])
            made = []
            while wholes:
                one, whole = wholes.pop(0)
                made.append((one, compute(one.parameter, whole)))
                del whole
            for one, part in self.returned(now, made):
                apply(one.parameter, part)
            now = after if number + 1 < len(rounds) else []

    def rounds(self, owner: Sequence[int]) -> list[list[tuple[_Matrix, int]]]:
        """The matrices of each round with their owners: of each owner as many as fit, or one."""
        found: list[list[tuple[_Matrix, int]]] = []
        last = [(0, 0)] * self.ranks  # by owner: its last round, and the bytes in it
        for one, rank in zip(self.matrices, owner, strict=True):
            size_bytes = one.parameter.numel() * self.like.element_size()
            number, held_bytes = last[rank]
            if held_bytes and held_bytes + size_bytes > ROUND_BYTES:
                number, held_bytes = number + 1, 0
            last[rank] = number, held_bytes + size_bytes
            if number == len(found):
                found.append([])
            found[number].append((one, rank))
        return found

    def gather(self, now: Sequence[tuple[_Matrix, int]]) -> tuple[list[_Item], _Exchange | None]:
        """Start sending the parts of updates to their owners; None: there are only replicas."""
        items = []
        exchange = _Exchange(self)
        for one, owner in now:
            update = self.update(one.parameter)
            replica = not one.gathered
            items.append((one, owner, update if replica and owner == self.rank else self.like))
            for rank in range(self.ranks) if one.gathered else ():
                if one.sharing.together(rank, owner):
                    if rank == self.rank:
                        exchange.send(owner, update)
                    if owner == self.rank:
                        exchange.expect(rank, one.part_shape(rank))
        return items, exchange.start() if any(one.gathered for one, _ in now) else None

    def wholes(
        self, now: Sequence[_Item], coming: _Exchange | None
    ) -> list[tuple[_Matrix, Tensor]]:
        """The whole updates of this rank's matrices."""
        parts = [] if coming is None else coming.received()
        found = []
        for one, owner, whole in now:
            if owner != self.rank:
                continue
            if one.gathered:
                whole = self.like.new_empty(one.parameter.shape)
                for rank in range(self.ranks):
                    if one.sharing.together(rank, owner):
                        one.sharing.part(whole, rank).copy_(next(parts[rank]))
            found.append((one, whole))
        return found

    def returned(
        self, now: Sequence[_Item], made: list[tuple[_Matrix, Tensor]]
    ) -> Iterator[tuple[_Matrix, Tensor]]:
        """Send the results of this rank's matrices, and receive this rank's parts of all."""
        exchange = _Exchange(self)
        for one, result in made:
            for rank in range(self.ranks):
                exchange.send(rank, one.sharing.part(result, rank))
        made.clear()
        for one, owner, _ in now:
            exchange.expect(owner, one.part_shape(self.rank))
        parts = exchange.start().received()
        for one, owner, _ in now:
            yield one, next(parts[owner])


class _Exchange:
    """An all-to-all of pieces of several sizes."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.sent: list[list[Tensor]] = [[] for _ in range(run.ranks)]
        self.shapes: list[list[Sequence[int]]] = [[] for _ in range(run.ranks)]
        self.work: Any = None

    def send(self, rank: int, piece: Tensor) -> None:
        self.sent[rank].append(piece.reshape(-1))

    def expect(self, rank: int, shape: Sequence[int]) -> None:
        self.shapes[rank].append(shape)

    def start(self) -> _Exchange:
        """Start the collective. It sends bytes: gloo does not know every data type."""
        like, size = self.run.like, self.run.like.element_size()
        self.sizes = [sum(math.prod(shape) for shape in shapes) for shapes in self.shapes]
        given = [size * sum(piece.numel() for piece in pieces) for pieces in self.sent]
        pieces = [piece for pieces in self.sent for piece in pieces]
        self.given = torch.cat([like.new_empty(0), *pieces]).view(torch.uint8)
        self.taken = like.new_empty(sum(self.sizes))
        self.sent = []
        self.work = dist.all_to_all_single(
            self.taken.view(torch.uint8),
            self.given,
            [size * one for one in self.sizes],
            given,
            group=self.run.group,
            async_op=True,
        )
        return self

    def received(self) -> list[Iterator[Tensor]]:
        """Wait; the pieces from each rank, in the order in which they were expected."""
        self.work.wait()
        found = []
        for flat, shapes in zip(self.taken.split(self.sizes), self.shapes, strict=True):
            pieces = flat.split([math.prod(shape) for shape in shapes])
            found.append(iter([p.view(s) for p, s in zip(pieces, shapes, strict=True)]))
        return found

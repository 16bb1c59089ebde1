"""Owner ranks: which rank computes a matrix's update for all ranks, and how long that takes.

Muon orthogonalizes the whole update of a matrix. An owner gathers the update, orthogonalizes it and
sends the result back, so that the ranks share the work. A replicated matrix needs no gathering. If
the result takes longer to send than to compute, every rank computes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from passes.types.context import Context, Parameter
from passes.types.hardware import Hardware
from passes.types.plan import Plan

#: Bytes of whole updates that an owner gathers in one round, if it has more than one matrix.
ROUND_BYTES = 32 << 20
#: Newton-Schulz iterations, Muon's default.
_ITERATIONS = 5
#: The type in which Muon orthogonalizes, and in which updates travel.
_DTYPE, _DTYPE_BYTES = "bfloat16", 2


def orthogonal_flops(shape: Sequence[int]) -> int:
    """FLOPs of Muon's orthogonalization of a matrix.

    An iteration on ``[k, l]``, ``k <= l``, has products of ``[k, l] @ [l, k]``, ``[k, k] @ [k, k]``
    and ``[k, k] @ [k, l]``. Source: ``torch.optim.Muon``.
    """
    short, long = sorted(shape)
    return _ITERATIONS * (4 * short * short * long + 2 * short**3)


def owners(flops: Sequence[int], ranks: int) -> list[int]:
    """The owner of each matrix: the dearest first, each to the rank with the least work so far.

    Source: R. L. Graham, Bounds on multiprocessing timing anomalies (1969), the LPT rule: at most
    4/3 of the least possible work of the busiest rank. Ties go to the lower rank.
    """
    found = [0] * len(flops)
    work = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(flops)), key=lambda index: (-flops[index], index)):
        done, rank = work[0]
        found[index] = rank
        heapq.heapreplace(work, (done + flops[index], rank))
    return found


def replicas_have_owners(shape: Sequence[int], hardware: Hardware, ranks: int) -> bool:
    """Whether a replicated matrix is orthogonalized by one rank only."""
    saved_seconds = orthogonal_flops(shape) * (1 - 1 / ranks) / hardware.flops(_DTYPE)
    rows, columns = shape
    sent_bytes = rows * columns * _DTYPE_BYTES
    return saved_seconds > hardware.collective_seconds("all_to_all", sent_bytes, ranks)


def orthogonal_bytes(parameters: Iterable[Parameter], world_size: int) -> int:
    """Bytes of Muon's step in flight: an upper bound.

    At most six buffers have the size of a round. Three belong to this round: the sent, the received
    and the orthogonalized updates. Three belong to the next one. The iterations on a matrix have
    three more buffers of its size.
    """
    sizes = [one.numel * _DTYPE_BYTES for one in parameters if one.orthogonalized]
    if not sizes:
        return 0
    if world_size == 1:
        return 4 * max(sizes)
    most_bytes = max(max(sizes), -(-sum(sizes) // world_size))
    return 6 * min(most_bytes, max(ROUND_BYTES, max(sizes))) + 3 * max(sizes)


def orthogonal_seconds(ctx: Context, plan: Plan) -> float:
    """Seconds of the busiest rank in Muon's orthogonalizations, communication included.

    Communication and compute count one after the other.
    """
    matrices = [parameter for parameter in ctx.parameters if parameter.orthogonalized]
    shared: list[Parameter] = []
    own_flops, gathered_bytes, returned_bytes = 0, 0, 0
    for parameter in matrices:
        ranks = ctx.cut(plan.decision(parameter.name)).ranks
        moved_bytes = parameter.numel * _DTYPE_BYTES
        if ranks == 1 and not (
            ctx.world_size > 1
            and replicas_have_owners(parameter.shape, ctx.hardware, ctx.world_size)
        ):
            own_flops += orthogonal_flops(parameter.shape)
            continue
        shared.append(parameter)
        returned_bytes += moved_bytes // ranks
        if ranks > 1:
            gathered_bytes += moved_bytes // ranks
    flops = [orthogonal_flops(parameter.shape) for parameter in shared]
    work = [0] * ctx.world_size
    for one, rank in zip(flops, owners(flops, ctx.world_size), strict=True):
        work[rank] += one
    seconds = (own_flops + max(work)) / ctx.hardware.flops(_DTYPE)
    for sent_bytes in (gathered_bytes, returned_bytes):
        if sent_bytes:
            seconds += ctx.hardware.collective_seconds("all_to_all", sent_bytes, ctx.world_size)
    return seconds

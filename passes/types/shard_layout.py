"""Shard layouts: the ranks that share a parameter's rows, and the rows of each rank."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """The placement of one parameter on the ranks.

    Attributes:
        ranks: ranks that share its rows; 1: every rank has all rows.
        place: this rank's index among them.
        group_name: the process group of these ranks; of all ranks for a replicated parameter.
        hosts: rows are divided among this many hosts first, then among the ranks of each host; 1:
            among all ranks at once.
        between: the process group of the ranks with the same rows, for a parameter sharded within
            hosts; gradient shards are summed over it. "" for every other parameter.
        copies: ranks in the group ``between``, or 1.
        dim: the dimension of the parameter that the ranks share; its "rows" are along it.
    """

    ranks: int
    place: int
    group_name: str
    hosts: int = 1
    between: str = ""
    copies: int = 1
    dim: int = 0

    @property
    def marks(self) -> tuple[str | int, ...]:
        """The last arguments of the markers (``passes/ops/markers.py``)."""
        if self.dim:
            return self.group_name, self.between, self.hosts, self.dim
        if not self.between and self.hosts == 1:
            return (self.group_name,)
        return self.group_name, self.between, self.hosts

    def most_rows(self, total: int) -> int:
        """Rows of the largest shard, on the first rank; ``total``: rows of the parameter."""
        return -(-total // self.ranks)

    def fewest_rows(self, total: int) -> int:
        """Rows of the smallest shard; ``total``: rows of the parameter.

        The last rank of the first host, or that of the last host, has it.
        """
        last_ones = self.ranks // self.hosts - 1, self.ranks - 1
        return min(dataclasses.replace(self, place=one).own_rows(total) for one in last_ones)

    def own_rows(self, total: int) -> int:
        """Rows of this rank; ``total``: rows of the parameter."""
        start, stop = self.rows(total)
        return stop - start

    def rows(self, total: int) -> tuple[int, int]:
        """First and last (exclusive) row of this rank; ``total``: rows of the parameter."""
        each = self.ranks // self.hosts
        first, last = _part(total, self.hosts, self.place // each)
        start, stop = _part(last - first, each, self.place % each)
        return first + start, first + stop


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """First and last (exclusive) row of one part, with the boundaries of ``torch.chunk``."""
    each = -(-total // parts)
    return min(index * each, total), min((index + 1) * each, total)

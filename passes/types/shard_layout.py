"""Cuts: which ranks share a parameter's rows, and which rows each of them has."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """How a parameter lies on the ranks.

    ``ranks``: how many share its rows; 1: every rank has all.
    ``place``: this rank's among them.
    ``group_name``: the process group of those who share; of all ranks where nobody does.
    ``hosts``: rows are cut for so many hosts first, and what a host gets for its ranks; 1: for
    all ranks at once.
    ``between``: the process group of the ranks that have the same rows, where some do and others
    do not: a gradient's parts are added up over it; "" where there is none.
    ``copies``: how many those are.
    """

    ranks: int
    place: int
    group_name: str
    hosts: int = 1
    between: str = ""
    copies: int = 1

    @property
    def marks(self) -> tuple[str | int, ...]:
        """What the markers' last arguments say of it (``passes/ops/markers.py``)."""
        if not self.between and self.hosts == 1:
            return (self.group_name,)
        return self.group_name, self.between, self.hosts

    def most_rows(self, total: int) -> int:
        """How many of so many rows the rank has that has most: the first."""
        return -(-total // self.ranks)

    def rows(self, total: int) -> tuple[int, int]:
        """First and last (exclusive) of this rank's rows; ``total``: of the whole parameter."""
        each = self.ranks // self.hosts
        first, last = _part(total, self.hosts, self.place // each)
        start, stop = _part(last - first, each, self.place % each)
        return first + start, first + stop


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """First and last of one part of rows, as ``torch.chunk`` cuts them."""
    each = -(-total // parts)
    return min(index * each, total), min((index + 1) * each, total)

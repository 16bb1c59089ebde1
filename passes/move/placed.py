"""Placed: the placement of a tensor in a graph whose weights stay where they are.

A tensor is one of these, with N ranks:

==========  =====================================================================================
local       this rank's own, as in the data-parallel graph (no placement)
a weight    this rank's slice along ``features``
tokens      the tokens of all ranks along ``tokens``, this rank's slice along ``features``
a total     this rank's slice along ``features``, summed over the tokens of all ranks
a share     this rank's part of a sum over the tokens of all ranks and over ``features``
==========  =====================================================================================

A local tensor may be a partial sum first: every rank has a part for the tokens of all ranks.

A total takes the place of this rank's own sum, which is another value. So it may only become the
gradient of a weight, by linear operators: the mean over ranks of linear functions of the own sums
is the function of the total, divided by N. A share takes the place of the own sum too: the sum over
ranks of both is equal. So it may only become the gradient of a weight that the ranks reduce. A
total with zeros in place of the other ranks' slices is a share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from passes.move.move_rules import Mover

#: Gives the own tokens of a partial sum.
Back = Callable[["Mover", "PartialSum"], fx.Node]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A tensor that is not local.

    ``node``: in the rewritten graph. ``tokens``: the dimension of the tokens of all ranks; None:
    it has none. ``features``: the dimension that this rank has a slice of. ``names``: the weights
    that it comes from. ``is_total``: it is a sum over the tokens of all ranks. ``is_share``: it is
    a part of one over tokens and features; it has neither. ``heads``: the number of heads of all
    ranks, if ``tokens`` and ``features`` are one dimension, as in ``[sequences heads, ...]``; 0:
    they are two.
    """

    node: fx.Node
    tokens: int | None
    features: int
    names: frozenset[str]
    is_total: bool = False
    is_share: bool = False
    heads: int = 0

    @property
    def is_weight(self) -> bool:
        """Whether it has no values of tokens."""
        return self.tokens is None and not self.is_total

    def of(self, node: fx.Node) -> Placed:
        """The same placement of another node."""
        return dataclasses.replace(self, node=node)


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """A local tensor that the ranks have not added up yet.

    ``part``: this rank's part, for the tokens of all ranks. ``sizes``: of the local tensor, as
    arguments of a reshape. ``others``: local tensors to add. ``back``: gives the own tokens of all
    ranks' parts, where tokens are not outermost (``token_collectives.py``).
    """

    part: fx.Node
    sizes: tuple[Any, ...]
    others: tuple[fx.Node, ...]
    names: frozenset[str]
    back: Back | None = None


class Refused(ValueError):
    """An operator has no rule. The weights that lead to it cannot stay where they are.

    ``needs``: weights, with their dimensions, that would have to stay too. ``adds``: the operator
    adds a local tensor, which the same weights of other layers may place.
    """

    def __init__(
        self,
        reason: str,
        names: frozenset[str] = frozenset(),
        needs: Sequence[tuple[str, int]] = (),
        adds: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.names = names
        self.needs = tuple(needs)
        self.adds = adds

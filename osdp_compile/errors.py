"""What can go wrong, as exceptions a person can act on."""

from __future__ import annotations


class OsdpError(RuntimeError):
    """Base of everything this package raises about a model, a plan or a run.

    ``on_every_rank``: all ranks raise it, with the same text.
    """

    on_every_rank = False


class InfeasibleLimit(OsdpError):
    """No plan fits under the memory limit; the message says the least limit that would work.

    ``least_bytes``: that limit.
    """

    on_every_rank = True

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[type[InfeasibleLimit], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)  # it is sent from rank to rank


class RanksDiffer(OsdpError):
    """Ranks differ in their models or options; the message names the first difference."""

    on_every_rank = True


class PlanMismatch(OsdpError):
    """The plan that was given is for another model or world size."""

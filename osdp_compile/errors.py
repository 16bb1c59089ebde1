"""Exceptions of this package: each message says what to do."""

from __future__ import annotations


class OsdpError(RuntimeError):
    """Base of all errors that this package raises about a model, a plan or a run.

    Attributes:
        on_every_rank: all ranks raise this error, with the same text.
    """

    on_every_rank = False


class InfeasibleLimit(OsdpError):
    """No plan fits under the memory limit; the message names the lowest feasible limit.

    Attributes:
        least_bytes: the lowest feasible limit.
    """

    on_every_rank = True

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes

    def __reduce__(self) -> tuple[type[InfeasibleLimit], tuple[str, int]]:
        return type(self), (str(self), self.least_bytes)  # ranks send it to each other


class RanksDiffer(OsdpError):
    """Ranks differ in their models or options; the message names the first difference."""

    on_every_rank = True


class PlanMismatch(OsdpError):
    """The given plan is for another model or world size."""


class OptionError(ValueError):
    """An option's value is malformed; the message names the option and the allowed values.

    Attributes:
        option: its name.
        reason: the reason alone. The command line puts the name of its own argument before it.
    """

    def __init__(self, message: str, option: str, reason: str = "") -> None:
        super().__init__(message)
        self.option = option
        self.reason = reason or message.removeprefix(f"option {option!r}: ")

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, str, str]]:
        return type(self), (str(self), self.option, self.reason)  # ranks send it to each other

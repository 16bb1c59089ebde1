"""What can go wrong, as exceptions a person can act on."""

from __future__ import annotations


class OsdpError(RuntimeError):
    """Base of everything this package raises about a model, a plan or a run."""


class InfeasibleLimit(OsdpError):
    """No plan fits under the memory limit; the message says the least limit that would work."""


class RanksDiffer(OsdpError):
    """Ranks traced different models; the message names the first difference."""


class PlanMismatch(OsdpError):
    """The plan that was given is for another model or world size."""

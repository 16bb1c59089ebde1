"""How many examples hypothesis tries, and how."""

from __future__ import annotations

from hypothesis import Phase, settings


def examples(count: int) -> settings:
    """``@examples(40)``: the same ones every run, with no limit of time for one.

    Only generated: shrinking a failure runs torch for minutes, and the phase that explains it
    traces every line of torch. What fails is printed as it was found, and is small already.
    """
    return settings(
        max_examples=count, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
    )

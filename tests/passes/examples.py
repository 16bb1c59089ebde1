"""Settings of hypothesis: the number of examples, and the phases."""

from __future__ import annotations

from hypothesis import Phase, settings


def examples(count: int) -> settings:
    """``@examples(40)``: 40 examples, the same in every run, without a deadline.

    Two phases are left out. Shrinking a failure runs torch for minutes. The phase that explains
    a failure traces every line of torch. The examples are small without shrinking.
    """
    return settings(
        max_examples=count, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
    )

"""Agreement of the ranks: a slow rank 0 does not time the others out."""

from __future__ import annotations

import datetime
import time
from unittest import mock

import pytest
import torch.distributed as dist

from osdp_compile.errors import OsdpError
from osdp_compile.model import agreement

TIMEOUT_SECONDS = 3.0
#: Longer than a collective may wait.
WORK_SECONDS = 2.5 * TIMEOUT_SECONDS


def slow_work(fails):
    time.sleep(WORK_SECONDS)
    if fails:
        raise ValueError("a wrong turn")
    return {"made": "by rank 0"}


def wait_for_rank_zero(rank, world_size, often_seconds, fails=False):
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
    dist.barrier(group)
    begin = time.monotonic()
    try:
        with mock.patch.object(agreement, "_SIGN_OF_LIFE_SECONDS", often_seconds):
            made = agreement.from_rank_zero(lambda: slow_work(fails), group)
        again = agreement.from_rank_zero(lambda: rank, group)  # no message is left over
    except (OsdpError, ValueError) as error:
        return str(error), time.monotonic() - begin
    return made, again


@pytest.mark.thorough
@pytest.mark.ranks
def test_ranks_wait_for_rank_zero_for_longer_than_the_timeout(two_ranks):
    assert two_ranks.run(wait_for_rank_zero, 1.0) == [({"made": "by rank 0"}, 0)] * 2


@pytest.mark.thorough
@pytest.mark.ranks
def test_an_error_after_the_timeout_reaches_every_rank(two_ranks):
    (own, _), (told, waited_seconds) = two_ranks.run(wait_for_rank_zero, 1.0, fails=True)
    assert (own, told) == ("a wrong turn", "rank 0: ValueError: a wrong turn")
    assert waited_seconds >= WORK_SECONDS - 0.5

"""Bucket sizes: how much travels together, of the fastest plans that were looked at."""

from __future__ import annotations

import itertools

from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.evaluator import LEAST_BUCKET_BYTES, PlanEvaluator

#: How many of the fastest plans get buckets of their own size.
SIZED_PLANS = 4
#: How near a plan is to the fastest if it is tried with that one's buckets.
_NEAR = 1.1
#: Bucket sizes that are tried: by what factors from one to the next, and how many in a row that
#: are no better end a direction.
_BUCKET_FACTORS, BUCKET_MISSES = (4, 1 / 4, 2, 1 / 2), 2


def size_buckets(evaluator: PlanEvaluator, plans: int) -> None:
    """Larger and smaller buckets for the fastest plans that fit, while that helps.

    What a bucket saves in latency, and what it costs in overlap (it leaves with its last
    gradient, and is there with its last byte) and in memory, is what the simulator says.
    Plans that are looked at later start from the size that was best.
    """
    fitting = evaluator.fitting()
    left = 2 + evaluator.affordable() // 2
    for key in sorted(fitting, key=evaluator.seconds)[:plans]:
        for factor in _BUCKET_FACTORS:
            size_bytes, misses = evaluator.seen[key][0].bucket_bytes, 0
            # A size that is no better does not say that the next one is not: one bucket more
            # or less may end at a good or a bad moment.
            while left > 0 and misses < BUCKET_MISSES:
                size_bytes = round(size_bytes * factor)
                if not LEAST_BUCKET_BYTES <= size_bytes <= evaluator.most_bucket_bytes:
                    break
                misses += 1
                if size_bytes not in evaluator.sizes[key]:
                    left -= 1
                    if evaluator.with_buckets(key, size_bytes):
                        misses = 0
    best, _ = evaluator.fastest()
    evaluator.empty = evaluator.empty.replace(bucket_bytes=evaluator.seen[best][0].bucket_bytes)


def size_buckets_of_sets(evaluator: PlanEvaluator) -> None:
    """Much smaller and larger buckets for the fastest plan of every set that is recomputed.

    Which set is the best depends on it: with smaller buckets less need be recomputed to fit.
    """
    fitting = sorted(evaluator.fitting(), key=evaluator.seconds, reverse=True)
    of_sets = {key.recompute: key for key in fitting}
    if len(of_sets) == 1:
        return
    for key in sorted(of_sets.values(), key=evaluator.seconds)[:SIZED_PLANS]:
        size_bytes = evaluator.seen[key][0].bucket_bytes
        for factor in _BUCKET_FACTORS[:2]:
            other = round(size_bytes * factor)
            allowed = LEAST_BUCKET_BYTES <= other <= evaluator.most_bucket_bytes
            if allowed and other not in evaluator.sizes[key]:
                evaluator.with_buckets(key, other)


def share_sizes(evaluator: PlanEvaluator) -> None:
    """Try the bucket sizes of the fastest plans on those that are nearly as fast.

    A plan was looked at with the size that was best then; another may be better for it.
    """
    left = evaluator.affordable() // 2
    fitting = sorted(evaluator.fitting(), key=evaluator.seconds)
    # Also those that did not fit: with smaller buckets they may.
    near = [
        key
        for key in evaluator.seen
        if evaluator.seconds(key) <= _NEAR * evaluator.seconds(fitting[0])
    ]
    near.sort(key=evaluator.seconds)
    sizes = dict.fromkeys(evaluator.seen[key][0].bucket_bytes for key in fitting[:SIZED_PLANS])
    sizes[bucket_bytes_for(evaluator.ctx)] = None
    for key, size_bytes in itertools.product(near, sizes):
        if left > 0 and size_bytes not in evaluator.sizes[key]:
            left -= 1
            evaluator.with_buckets(key, size_bytes)

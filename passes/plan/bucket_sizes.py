"""Bucket sizes: search for better bucket sizes for the fastest evaluated plans."""

from __future__ import annotations

import itertools

from passes.overlap.bucket_collectives import bucket_bytes_for
from passes.plan.evaluator import LEAST_BUCKET_BYTES, PlanEvaluator

#: Number of the fastest plans that get a bucket size of their own.
SIZED_PLANS = 4
#: Share bucket sizes with plans whose step is at most this many times the fastest step.
_NEAR = 1.1
#: Search directions: factors from one bucket size to the next. A direction ends after this many
#: sizes in a row without improvement.
_BUCKET_FACTORS, BUCKET_MISSES = (4, 1 / 4, 2, 1 / 2), 2


def size_buckets(evaluator: PlanEvaluator, plans: int) -> PlanEvaluator:
    """Try larger and smaller buckets for the fastest plans that fit, while that helps.

    A larger bucket saves latency. It costs overlap (it starts after its last gradient, and is
    complete only with its last byte) and memory. The simulator decides.

    ``plans``: the number of plans.

    Returns the evaluator whose new candidates start with the bucket size of the fastest plan.
    """
    fitting = evaluator.fitting()
    left = 2 + evaluator.affordable() // 2
    for key in sorted(fitting, key=evaluator.seconds)[:plans]:
        for factor in _BUCKET_FACTORS:
            size_bytes, misses = evaluator.seen[key][0].bucket_bytes, 0
            # The next size may be better although this one is not: with one bucket more or less,
            # a bucket may end at a good or a bad time.
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
    return evaluator.starting_with(evaluator.seen[best][0].bucket_bytes)


def size_buckets_of_sets(evaluator: PlanEvaluator) -> None:
    """Try buckets four times and a quarter as large for the fastest plan of each recompute set.

    The best set depends on the bucket size: with smaller buckets, a plan fits with less recompute.
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
    """Try the bucket sizes of the fastest plans, and the default size, on plans nearly as fast.

    A plan was evaluated with the best bucket size at that time; another may suit it better.
    """
    left = evaluator.affordable() // 2
    fitting = sorted(evaluator.fitting(), key=evaluator.seconds)
    # Include plans that do not fit: with smaller buckets they may.
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

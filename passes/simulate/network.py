"""Network: collectives in queues, beside a rank that computes or waits.

Each process group has a queue, and runs its collectives one at a time. One that is started
while its queue is empty, beside computing, comes late by a *wake* time: on a machine whose
cores all compute, the threads that send and receive must first be given one. As soon as the
computing stops to wait, nothing is late any more.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from torch import fx


@dataclasses.dataclass
class _Flight:
    node: fx.Node
    wake_seconds: float  # left
    seconds: float  # left


class Network:
    """The collectives of one rank. All times in seconds, from 0.

    ``now``: on the rank's own clock.
    ``starts``, ``ends``: of the collectives that have begun and ended so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.starts: dict[fx.Node, float] = {}
        self.ends: dict[fx.Node, float] = {}
        self._queues: dict[str, deque[_Flight]] = {}
        self._group: dict[fx.Node, str] = {}

    def free_seconds(self, group: str) -> float:
        """When all that a group has to do will have ended, if this rank computes till then."""
        flights = self._queues.get(group)
        if not flights:
            return self.now
        return self.now + sum([flight.wake_seconds + flight.seconds for flight in flights])

    def start(self, node: fx.Node, group: str, seconds: float, wake_seconds: float = 0.0) -> None:
        """Put a collective at the end of its group's queue."""
        queue = self._queues.setdefault(group, deque())
        self._group[node] = group
        if not queue:
            self.starts[node] = self.now
        queue.append(_Flight(node, 0.0 if queue else wake_seconds, seconds))

    def compute(self, seconds: float) -> None:
        """Let time pass in which this rank computes."""
        self._pass(self.now + seconds, computing=True)

    def wait(self, node: fx.Node) -> float:
        """Wait for a collective, or not if it has ended; how long."""
        if node in self.ends:
            return 0.0
        seconds = 0.0
        for flight in self._queues[self._group[node]]:
            seconds += flight.seconds
            if flight.node is node:
                break
        self._pass(self.now + seconds, computing=False)
        self._end(self._group[node], node)  # whatever rounding leaves of it
        return seconds

    def drain(self) -> float:
        """Wait for all; how long."""
        begin = self.now
        for queue in list(self._queues.values()):
            if queue:
                self.wait(queue[-1].node)
        return self.now - begin

    def _pass(self, until: float, computing: bool) -> None:
        for group, queue in self._queues.items():
            if not queue:
                continue
            now = self.now
            while queue:
                flight = queue[0]
                wake_seconds = flight.wake_seconds if computing else 0.0
                if now + wake_seconds + flight.seconds > until:
                    waking = min(wake_seconds, until - now)
                    flight.wake_seconds -= waking
                    flight.seconds -= until - now - waking
                    break
                now += wake_seconds + flight.seconds
                self._ended(group, now)
        self.now = until

    def _end(self, group: str, node: fx.Node) -> None:
        while node not in self.ends:
            self._ended(group, self.now)

    def _ended(self, group: str, now: float) -> None:
        queue = self._queues[group]
        self.ends[queue.popleft().node] = now
        if queue:
            self.starts[queue[0].node] = now

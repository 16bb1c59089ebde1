"""The network model: one queue of collectives per process group, beside one compute stream.

A process group runs its collectives one at a time, in their start order. A collective that starts
in an empty queue beside compute begins after a *start delay* (``start_delay_seconds``): on a
machine whose cores all compute, the network threads first have to get a core. While the rank waits,
there is no start delay. Its end is later by the lateness of the slowest rank
(``lateness_seconds``), whether this rank computes or waits.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from torch import fx


@dataclasses.dataclass
class _Flight:
    node: fx.Node
    start_delay_seconds: float  # remaining
    seconds: float  # remaining


class Network:
    """The collectives of one rank. All times are in seconds and count from 0.

    ``now``: the time of the compute stream.
    ``starts``, ``ends``: by collective, its begin and its end on the network, as far as reached.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.starts: dict[fx.Node, float] = {}
        self.ends: dict[fx.Node, float] = {}
        self._queues: dict[str, deque[_Flight]] = {}
        self._group: dict[fx.Node, str] = {}

    def free_seconds(self, group: str) -> float:
        """The end of all queued collectives of a group, if this rank computes until then."""
        flights = self._queues.get(group)
        if not flights:
            return self.now
        return self.now + sum([flight.start_delay_seconds + flight.seconds for flight in flights])

    def start(
        self,
        node: fx.Node,
        group: str,
        seconds: float,
        start_delay_seconds: float = 0.0,
        lateness_seconds: float = 0.0,
    ) -> None:
        """Append a collective to the queue of its group."""
        queue = self._queues.setdefault(group, deque())
        self._group[node] = group
        if not queue:
            self.starts[node] = self.now
            seconds += lateness_seconds
        queue.append(_Flight(node, 0.0 if queue else start_delay_seconds, seconds))

    def compute(self, seconds: float) -> None:
        """Advance the time while this rank computes."""
        self._pass(self.now + seconds, computing=True)

    def wait(self, node: fx.Node) -> float:
        """Wait until a collective has ended. Returns the stall in seconds, 0 if it has ended."""
        if node in self.ends:
            return 0.0
        seconds = 0.0
        for flight in self._queues[self._group[node]]:
            seconds += flight.seconds
            if flight.node is node:
                break
        self._pass(self.now + seconds, computing=False)
        self._end(self._group[node], node)  # a rounding error may leave a remainder
        return seconds

    def drain(self) -> float:
        """Wait for all collectives. Returns the stall in seconds."""
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
                start_delay_seconds = flight.start_delay_seconds if computing else 0.0
                if now + start_delay_seconds + flight.seconds > until:
                    waking = min(start_delay_seconds, until - now)
                    flight.start_delay_seconds -= waking
                    flight.seconds -= until - now - waking
                    break
                now += start_delay_seconds + flight.seconds
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

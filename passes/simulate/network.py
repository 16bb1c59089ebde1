"""The network model: one queue of collectives per process group, beside one compute stream.

A process group runs its collectives one at a time, in their start order. A collective that starts
in an empty queue beside compute begins after a *start delay* (``start_delay_seconds``): on a
machine whose cores all compute, the network threads first have to get a core. While the rank waits,
there is no start delay.

Ranks drift apart while they compute, and wait for each other in each collective. So a collective
that starts in an empty queue ends later by a share (``lateness``) of the time since the last one
ended, whether this rank computes or waits.

Queues run at the same time, each at its full rate. A collective of the model itself may use the
links of other queues (``beside``), such as two groups between the same hosts. As long as n
collectives use the links at once, each of them takes n times as long: they share the bandwidth in
equal parts, and no byte of it is lost.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection

from torch import fx


@dataclasses.dataclass
class _Flight:
    node: fx.Node
    start_delay_seconds: float  # remaining
    seconds: float  # remaining
    beside: frozenset[str]


class Network:
    """The collectives of one rank. All times are in seconds and count from 0.

    ``now``: the time of the compute stream.
    ``starts``, ``ends``: by collective, its begin and its end on the network, as far as reached.
    """

    def __init__(self, idle_seconds: float = 0.0) -> None:
        """``idle_seconds``: the time before 0 in which no collective ended."""
        self.now = 0.0
        self._last_end = -idle_seconds
        self.starts: dict[fx.Node, float] = {}
        self.ends: dict[fx.Node, float] = {}
        self._queues: dict[str, deque[_Flight]] = {}
        self._group: dict[fx.Node, str] = {}

    @property
    def idle_seconds(self) -> float:
        """The time since a collective ended."""
        return self.now - self._last_end

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
        lateness: float = 0.0,
        beside: frozenset[str] = frozenset(),
    ) -> None:
        """Append a collective to the queue of its group.

        ``beside``: other groups that use its links. It must be waited for before compute goes on.
        """
        queue = self._queues.setdefault(group, deque())
        self._group[node] = group
        if not queue:
            self.starts[node] = self.now
            seconds += lateness * self.idle_seconds
        queue.append(_Flight(node, 0.0 if queue else start_delay_seconds, seconds, beside))

    def compute(self, seconds: float) -> None:
        """Advance the time while this rank computes."""
        self._pass(self.now + seconds, computing=True)

    def wait(self, node: fx.Node) -> float:
        """Wait until a collective has ended. Returns the stall in seconds, 0 if it has ended."""
        if node in self.ends:
            return 0.0
        group = self._group[node]
        if any(flight.beside for flight in self._queues[group]):
            return self._wait_on_shared_links(node)
        seconds = 0.0
        for flight in self._queues[group]:
            seconds += flight.seconds
            if flight.node is node:
                break
        self._pass(self.now + seconds, computing=False)
        self._end(group, node)  # a rounding error may leave a remainder
        return seconds

    def drain(self) -> float:
        """Wait for all collectives. Returns the stall in seconds."""
        begin = self.now
        for queue in list(self._queues.values()):
            if queue:
                self.wait(queue[-1].node)
        return self.now - begin

    def _wait_on_shared_links(self, node: fx.Node) -> float:
        """Wait for a collective in a queue whose collectives share links, from end to end."""
        begin, group = self.now, self._group[node]
        while node not in self.ends:
            first = self._queues[group][0]
            own = {group, *first.beside}
            sharing = [one for one, queue in self._queues.items() if queue and one in own]
            heads = [self._queues[one][0] for one in sharing]
            ends_first = min(heads, key=lambda flight: flight.seconds)
            until = self.now + ends_first.seconds * len(heads)
            self._pass(until, computing=False, sharing=sharing)
            self._end(self._group[ends_first.node], ends_first.node)
        return self.now - begin

    def _pass(self, until: float, computing: bool, sharing: Collection[str] = ()) -> None:
        """Advance the time. ``sharing``: the groups that share links until then."""
        for group, queue in self._queues.items():
            if not queue:
                continue
            now = self.now
            times = len(sharing) if group in sharing else 1
            while queue:
                flight = queue[0]
                start_delay_seconds = flight.start_delay_seconds if computing else 0.0
                if now + start_delay_seconds + flight.seconds * times > until:
                    waking = min(start_delay_seconds, until - now)
                    flight.start_delay_seconds -= waking
                    flight.seconds -= (until - now - waking) / times
                    break
                now += start_delay_seconds + flight.seconds * times
                self._ended(group, now)
        self.now = until

    def _end(self, group: str, node: fx.Node) -> None:
        while node not in self.ends:
            self._ended(group, self.now)

    def _ended(self, group: str, now: float) -> None:
        queue = self._queues[group]
        self.ends[queue.popleft().node] = now
        self._last_end = max(self._last_end, now)
        if queue:
            self.starts[queue[0].node] = now

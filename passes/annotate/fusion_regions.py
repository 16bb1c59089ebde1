"""Regions: which nodes Inductor will run as one kernel, and which tensors it will really allocate.

The model: a fusible node's *depth* is the number of barriers before it on the longest
path, raised to that of its consumers where it feeds nothing shallower (Inductor computes
such a chain inside its consumer). Connected fusible nodes of one depth are one *region*:
no path between two of them can leave the region and come back, for that would cross a
barrier and raise the depth.
"""

from __future__ import annotations

from networkx.utils import UnionFind

from passes.graph.dataflow import Dataflow

#: Of a node that is in no region.
NO_REGION = -1


def _depths(dataflow: Dataflow) -> list[int]:
    depth = [0] * len(dataflow.nodes)
    last = len(dataflow.nodes) - 1
    # A kernel of its own, whose inputs must exist.
    barrier = [
        called and not fusible
        for called, fusible in zip(dataflow.called, dataflow.fusible, strict=True)
    ]
    writer = dataflow.writer
    for index in range(last):
        if dataflow.alias[index]:
            continue
        own = 0
        for source in dataflow.inputs[index]:
            root = writer[source]
            deep = depth[root] + barrier[root]
            if deep > own:
                own = deep
        depth[index] = own
    for index in range(last - 1, -1, -1):  # sink a chain into the consumers that will inline it
        if dataflow.fusible[index] and not dataflow.alias[index]:
            users = dataflow.readers[index]
            if users and all(map(dataflow.fusible.__getitem__, users)):
                depth[index] = max(depth[index], min(map(depth.__getitem__, users)))
    return depth


def regions(dataflow: Dataflow) -> list[int]:
    """The region of every fusible node: equal numbers are one kernel; else :data:`NO_REGION`.

    Numbers follow the order of the graph, so they are the same on every rank.
    """
    depth = _depths(dataflow)
    fused = [
        fusible and not alias
        for fusible, alias in zip(dataflow.fusible, dataflow.alias, strict=True)
    ]
    linked = UnionFind()
    for index, own in enumerate(fused):
        for source in dataflow.inputs[index] if own else ():
            root = dataflow.writer[source]
            if fused[root] and depth[root] == depth[index]:
                linked.union(root, index)
    number: dict[int, int] = {}
    return [
        number.setdefault(linked[index], len(number)) if own else NO_REGION
        for index, own in enumerate(fused)
    ]


def materialized(dataflow: Dataflow, region: list[int]) -> list[bool]:
    """Whether a node's output is a buffer in memory; of a view it is not.

    Everything that no kernel fuses, and of a region what someone outside it reads.
    """
    returned = dataflow.returned()
    last = len(dataflow.nodes) - 1
    return [
        index != last
        and not dataflow.alias[index]
        and (
            own == NO_REGION
            or index in returned
            or any(map(own.__ne__, map(region.__getitem__, dataflow.readers[index])))
        )
        for index, own in enumerate(region)
    ]

"""Fusion regions: nodes that Inductor fuses, and tensors that it allocates.

The model: a fusible node's *depth* is the number of barriers before it on the longest path. If all
its readers are fusible, the depth rises to that of the shallowest reader (Inductor computes such a
chain inside its consumer). Connected fusible nodes of equal depth form one *region*. A path
between two of them cannot leave the region and return: it would cross a barrier, which raises the
depth.
"""

from __future__ import annotations

from networkx.utils import UnionFind

from passes.annotate.realized import NO_REGION, read_elsewhere
from passes.graph.dataflow import Dataflow


def _depths(dataflow: Dataflow) -> list[int]:
    depth = [0] * len(dataflow.nodes)
    last = len(dataflow.nodes) - 1
    # A barrier is a kernel of its own, whose inputs must be in memory.
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
    for index in range(last - 1, -1, -1):  # sink a chain into the consumers that inline it
        if dataflow.fusible[index] and not dataflow.alias[index]:
            users = dataflow.readers[index]
            if users and all(map(dataflow.fusible.__getitem__, users)):
                depth[index] = max(depth[index], min(map(depth.__getitem__, users)))
    return depth


def regions(dataflow: Dataflow) -> list[int]:
    """The region number of every node, in graph order; :data:`NO_REGION` if not fusible.

    Regions are numbered in graph order, so the numbers are equal on all ranks.
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


def materialized(dataflow: Dataflow, region: list[int], on_cpu: bool = True) -> list[bool]:
    """Whether each node's output is a buffer in memory, in graph order.

    True for every node outside regions that is no view. True for a node in a region if the graph
    returns it, if a barrier reads it, or if Inductor realizes it for a loop of another size or in
    another region (``passes/annotate/realized.py``).
    """
    returned = dataflow.returned()
    last = len(dataflow.nodes) - 1
    elsewhere = read_elsewhere(dataflow, region, on_cpu)
    return [
        index != last
        and not dataflow.alias[index]
        and (
            own == NO_REGION
            or index in returned
            or index in elsewhere
            or NO_REGION in map(region.__getitem__, dataflow.readers[index])
        )
        for index, own in enumerate(region)
    ]

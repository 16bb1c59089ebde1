"""Dependencies: the nodes of a graph and what they read, as a networkx graph.

For questions about reachability, paths and order that are asked once for each step. Loops that run
for each candidate plan walk ``all_input_nodes`` and ``users`` themselves: such a walk visits a few
nodes, and making this graph visits all.
"""

from __future__ import annotations

import networkx as nx
from torch import fx


def dependency_graph(graph: fx.Graph) -> nx.DiGraph:
    """A directed graph of all nodes, with an edge from each input to its user.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(abs, (x,))
    >>> z = graph.call_function(abs, (y,))
    >>> sorted(nx.descendants(dependency_graph(graph), x))
    [abs_1, abs_2]
    """
    found = nx.DiGraph()
    found.add_nodes_from(graph.nodes)
    found.add_edges_from((source, node) for node in graph.nodes for source in node.all_input_nodes)
    return found

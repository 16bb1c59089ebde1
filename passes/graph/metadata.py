"""Metadata: every key that this package writes into ``node.meta`` and ``gm.meta``, declared once.

Torch's own keys (``val``, ``desc``, ``recompute``, ``nn_module_stack``) stay torch's.
"""

from __future__ import annotations

#: Of a node: what it costs, a :class:`passes.annotate.annotate_costs.Cost`. ``annotate`` writes it.
COST = "cost"
#: Of a node: :class:`passes.types.context.Phase`, forward or backward. ``annotate`` writes it.
PHASE = "phase"
#: Of a node: the number of its fused region; None: it runs alone. ``annotate`` writes it.
REGION = "region"
#: Of a collective: whom it serves, a :class:`passes.graph.fx_utils.Collective`.
COLLECTIVE = "collective"
#: Of a placeholder: the name of the parameter that it is.
PARAMETER = "parameter"
#: Of a placeholder: the name of the input that it is.
INPUT = "input"
#: Of a placeholder of a backward: True if the forward saves it.
SAVED = "saved"
#: Of a node: the parameter (or slice of one) whose whole value it holds.
GATHERED = "gathered"
#: Of a node: the parameter whose gradient it is, ready for the optimizer.
GRADIENT_OF = "gradient_of"
#: Of a node: True if it stays behind the wait that it reads.
AFTER_WAIT = "after_wait"
#: Of a placeholder whose memory is not the graph's: the name of a parameter or a buffer.
STATIC = "static"
#: Of a placeholder that others hold too: nothing is written over it.
LENT = "lent"
#: Of a node that was copied from the forward: its key if it was to be saved, else "".
RECOMPUTED = "recomputed"
#: Of what a backward is given: the forward's node that it is, if that has another name.
SAVES = "saves"
#: Of a node whose graph is a part of a step: its key in the whole.
KEY = "key"
#: Of a collective: why it does not start when the network is idle, a ``Reason``.
HELD_BACK = "held_back"
#: Of a collective: True if it is waited for early, to free memory.
DRAINED = "drained"
#: Of a node of a folded step: the number of its layer.
LAYER = "layer"
#: Of a node of a folded step: whether it belongs to the layer that stands for those left out.
ANCHOR = "anchor"
#: Of a module: the :class:`passes.simulate.memory.Memory` of its graph; the next pass takes it
#: away.
MEMORY = "memory"
#: Of a module: the :class:`passes.graph.dataflow.Dataflow` of its graph.
DATAFLOW = "dataflow"
#: Of a module: which collectives could travel together. ``bucket`` writes it.
PACKABLE = "packable"

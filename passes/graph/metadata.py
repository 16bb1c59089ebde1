"""Metadata: all keys of this package in ``node.meta`` and ``gm.meta``.

Torch's own keys (``val``, ``desc``, ``recompute``, ``nn_module_stack``) are not declared here.
"""

from __future__ import annotations

#: Of a node: its :class:`passes.annotate.annotate_costs.Cost`. ``annotate`` writes it.
COST = "cost"
#: Of a node: the value of its :class:`passes.types.context.Phase`. ``annotate`` writes it.
PHASE = "phase"
#: Of a node: the number of its fused region; None: it has none. ``annotate`` writes it.
REGION = "region"
#: Of a collective: its purpose, a :class:`passes.types.plan.Collective`.
COLLECTIVE = "collective"
#: Of a placeholder: the name of its parameter.
PARAMETER = "parameter"
#: Of a placeholder: the name of its buffer, or ``batch``.
INPUT = "input"
#: Of a placeholder of a backward: True if it is a saved tensor or an output's gradient.
SAVED = "saved"
#: Of a node: the parameter (or slice of one) whose gathered value it holds.
GATHERED = "gathered"
#: Of a node: the name of the parameter whose reduced gradient it holds.
GRADIENT_OF = "gradient_of"
#: Of a node: True if the scheduler moves it together with the wait before it.
AFTER_WAIT = "after_wait"
#: Of a placeholder: True if its memory is not the graph's (parameters, buffers, the batch).
STATIC = "static"
#: Of a placeholder of a backward: True if others hold it too; no kernel may reuse its memory.
LENT = "lent"
#: Of a recomputed node in the backward: its key if the plan recomputes it by name, else "".
RECOMPUTED = "recomputed"
#: Of a node of a backward: the name of the same value's node in the forward, if it differs.
SAVES = "saves"
#: Of a node of a partial graph (folded or one frame): its recomputation key in the whole step.
KEY = "key"
#: Of a collective: why it does not start earlier, a :class:`passes.simulate.exposure.Reason`.
HELD_BACK = "held_back"
#: Of a collective: True if its wait comes early to free memory.
DRAINED = "drained"
#: Of a node of a folded step: the number of its layer.
LAYER = "layer"
#: Of a node of a folded step: True for the node at which its layer's time is measured.
ANCHOR = "anchor"
#: Of a module: the :class:`passes.simulate.memory.Memory` of its graph; valid until the next
#: pass.
MEMORY = "memory"
#: Of a module: the :class:`passes.graph.dataflow.Dataflow` of its graph; valid until the next pass.
DATAFLOW = "dataflow"
#: Of a step module: the keys of tensors that the plan recomputes and this forward does not save, or
#: that the backward cannot recompute. ``recompute`` writes it.
NOT_RECOMPUTED = "not_recomputed"
#: Of a module: which collectives may share a bucket. ``bucket`` writes it.
PACKABLE = "packable"

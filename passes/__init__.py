"""Graph passes for sharded data-parallel training, and what they share.

Plain functions ``(GraphModule, Context) -> GraphModule``: no process group, no Dynamo, no
Inductor. ``passes.pipeline.default_passes()`` is the list of what runs in what order.
"""

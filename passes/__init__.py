"""Graph passes for sharded data-parallel training, the planner, and the simulator.

Passes are plain functions ``(GraphModule, Context) -> GraphModule``. They need no process group,
no Dynamo and no Inductor. ``passes.pipeline.default_passes()`` lists them in their order.
"""

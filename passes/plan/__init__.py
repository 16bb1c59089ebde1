"""The planner: search for the plan with the fastest step under the memory limit."""

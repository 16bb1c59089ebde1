"""Planning: what the planner is told of a model, with the machine or without it."""

"""Planning: the planner's inputs, with or without the training cluster."""

"""Candidates: parameter groups, recompute sets and slice groups for the planner's search."""

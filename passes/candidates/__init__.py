"""Candidates: what the planner may choose from."""

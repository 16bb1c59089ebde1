"""Simulate: time and memory of an annotated, ordered graph."""

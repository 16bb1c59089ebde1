"""Simulation of an annotated, ordered graph: time, memory, and exposed communication."""

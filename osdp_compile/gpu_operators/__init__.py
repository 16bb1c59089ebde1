"""Trace a step on the CPU with the operators that a GPU would run."""

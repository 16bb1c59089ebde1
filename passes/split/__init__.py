"""Operator splitting: run the operators of large weights slice by slice."""

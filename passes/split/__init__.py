"""Split: run operators of large weights slice by slice."""

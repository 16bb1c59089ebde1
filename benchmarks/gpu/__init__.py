"""A proof kit for GPUs; see :mod:`benchmarks.gpu.__main__`."""

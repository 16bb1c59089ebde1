"""All private names of torch that the package uses, each with the checked versions.

No other folder of ``osdp_compile/`` imports from ``torch._*``.
"""

from osdp_compile._torch import (
    aot_autograd,
    autograd,
    distributed,
    dtensor,
    dynamo,
    fusion,
    inductor,
    logs,
    memory,
    operators,
    optimizers,
    tensors,
)

__all__ = [
    "aot_autograd",
    "autograd",
    "distributed",
    "dtensor",
    "dynamo",
    "fusion",
    "inductor",
    "logs",
    "memory",
    "operators",
    "optimizers",
    "tensors",
]

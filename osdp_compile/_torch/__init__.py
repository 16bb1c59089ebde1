"""All private names of torch that the package uses, each with the checked versions.

No other folder of ``osdp_compile/`` imports from ``torch._*``. A module of this folder is imported
at its first use: ``TORCH_LOGS=osdp_compile`` imports this file while torch itself is imported.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

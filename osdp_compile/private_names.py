"""Import check for torch's private names: a missing one gives an error that names it."""

import importlib

from osdp_compile import _torch
from osdp_compile.torch_versions import lacks

try:
    for _name in _torch.__all__:
        importlib.import_module(f"{_torch.__name__}.{_name}")
except (ImportError, AttributeError) as error:
    if isinstance(error, ImportError) and not (error.name or "").startswith("torch."):
        raise
    from torch import __version__

    raise ImportError(lacks(__version__, error)) from None

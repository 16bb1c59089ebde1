"""Import torchvision beside a torch whose build it was not made for.

torchvision's wheels are built against CUDA builds of torch. Beside a CPU build its compiled
library does not load, and its import fails, for it describes two operators of that library. No
family here uses them; declared, they let the import go through.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []


def declare() -> None:
    """Declare the two operators where the library with them does not load."""
    found = find_spec("torchvision")
    if _declared or found is None or not found.submodule_search_locations:
        return
    for folder in found.submodule_search_locations:
        for file in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(str(file))
                return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)

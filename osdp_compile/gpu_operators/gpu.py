"""The GPU that a step is traced for: the figures that decide which operators it runs."""

from __future__ import annotations

import dataclasses

import torch

from passes.types.hardware import Hardware

#: Of a profile without a compute capability.
_USUAL = "9.0"
#: The cuDNN that is assumed if torch has none. Torch's wheels for CUDA 13 install this version.
_USUAL_CUDNN = 91900


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU and the libraries of its torch.

    Attributes:
        capability: major and minor compute capability.
        cudnn: version of cuDNN as ``torch.backends.cudnn.version()`` has it: 92600 is 9.26.0.
        assumed: what is not known and taken for granted, for people; "": nothing.
    """

    capability: tuple[int, int]
    cudnn: int
    assumed: str = ""

    def __str__(self) -> str:
        """As ``compute capability 9.0 with cuDNN 9.26 (assumed: cuDNN 9.26)``."""
        assumed = f" (assumed: {self.assumed})" if self.assumed else ""
        capability = ".".join(map(str, self.capability))
        return f"compute capability {capability} with {self.cudnn_name}{assumed}"

    @property
    def cudnn_name(self) -> str:
        """As ``cuDNN 9.26``."""
        return _cudnn_name(self.cudnn)


def gpu_of(hardware: Hardware | None) -> Gpu | None:
    """The GPU of a profile; None: a CPU's profile, or none.

    cuDNN is this build's. A build without CUDA has none: a usual version takes its place.
    """
    if hardware is None or hardware.device_type != "cuda":
        return None
    assumed = []
    if not hardware.compute_capability:
        assumed.append(f"compute capability {_USUAL}")
    version = torch.backends.cudnn.version() if torch.backends.cuda.is_built() else None
    if version is None:
        assumed.append(_cudnn_name(_USUAL_CUDNN))
    major, _, minor = (hardware.compute_capability or _USUAL).partition(".")
    return Gpu((int(major), int(minor)), version or _USUAL_CUDNN, ", ".join(assumed))


def _cudnn_name(version: int) -> str:
    return f"cuDNN {version // 10000}.{version // 100 % 100}"

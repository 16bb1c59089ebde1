"""What every rank of the sweep is forked from: the packages, imported once."""

import contextlib

import tests.imported  # noqa: F401
from benchmarks.families import torchvision_operators

torchvision_operators.declare()
for _package in ("transformers", "timm", "diffusers", "peft"):
    with contextlib.suppress(ImportError):  # their families are then left out of the sweep
        __import__(_package)

import benchmarks.families.rank  # noqa: E402, F401

"""Families of timm, small, with random weights.

Every 11th of the 98 modules of timm 1.0.31, each its smallest model, further cut where its
constructor lets one; then ResNet-18 and ViT-tiny, which were tried on earlier code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F

from benchmarks.families import torchvision_operators
from benchmarks.families.trial import Family, Trial, pictures, without_dropout

CLASSES = 5
_TINY_VIT = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}

#: Model, size of its images, arguments of its constructor.
MODELS: list[tuple[str, int, dict[str, Any]]] = [
    ("beit_base_patch16_224", 32, _TINY_VIT),
    ("cs3darknet_focus_s", 64, {}),
    ("test_efficientnet", 64, {}),
    ("hardcorenas_b", 64, {}),
    ("levit_128s", 64, {"img_size": 64}),
    ("nasnetalarge", 64, {"stem_size": 32, "num_features": 768}),
    ("repvit_m1", 64, {}),
    ("starnet_s050", 64, {}),
    ("test_vit", 32, {"img_size": 32}),
    ("resnet18", 64, {}),
    ("vit_tiny_patch16_224", 32, {"img_size": 32, "patch_size": 8, "depth": 2}),
]


def _trial(name: str, size: int, arguments: dict[str, Any]) -> Trial:
    torchvision_operators.declare()
    import timm

    model = timm.create_model(name, num_classes=CLASSES, **arguments)

    def loss(called: Any, batch: Any) -> Any:
        scores = called(batch[0])
        return F.cross_entropy(scores, batch[1])

    return Trial(without_dropout(model.train()), pictures(4, size, CLASSES), loss)


FAMILIES = [
    Family(name, "timm", functools.partial(_trial, name, size, arguments))
    for name, size, arguments in MODELS
]

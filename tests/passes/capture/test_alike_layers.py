"""The layers of a captured step."""

from __future__ import annotations

from passes.capture.alike_layers import layers_of
from tests.passes.capture.test_fold_layers import LAYERS, captured


def test_layers_are_found_in_the_order_they_run():
    layers = layers_of(captured()[0], captured()[1].parameters)
    assert len(layers) == LAYERS
    assert layers[11] == tuple(
        f"blocks.11.{name}" for name in ("scale", "up.weight", "up.bias", "down.weight")
    )

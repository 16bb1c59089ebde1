"""Parameter groups: parameters of equal layers are decided together."""

from __future__ import annotations

import torch

from passes.candidates.parameter_groups import alike
from tests.passes.graphs import parameter


def test_names_that_differ_in_numbers_are_one_group():
    names = ("layers.0.up", "layers.0.down", "layers.11.up", "layers.11.down", "head")
    assert alike([parameter(name, (4, 4)) for name in names]) == [[0, 2], [1, 3], [4]]


def test_a_number_within_a_name_is_not_that_of_a_layer():
    names = ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2")
    assert alike([parameter(name, (4,)) for name in names]) == [[0, 2], [1, 3]]


def test_shapes_dtypes_and_what_is_frozen_part_a_group():
    parameters = [
        parameter("layers.0", (4, 4)),
        parameter("layers.1", (4, 8)),
        parameter("layers.2", (4, 4), torch.bfloat16),
        parameter("layers.3", (4, 4), requires_grad=False),
        parameter("layers.4", (4, 4)),
    ]
    assert alike(parameters) == [[0, 4], [1], [2], [3]]

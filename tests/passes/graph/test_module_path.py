"""Module path: the words of users for what Dynamo writes."""

from __future__ import annotations

import pytest

from passes.graph.module_path import module_path


@pytest.mark.parametrize(
    ("expression", "path"),
    [
        ("L['self'].blocks.0.up", "blocks.0.up"),
        ("L['self']._modules['blocks']._modules['0'].up", "blocks.0.up"),
        ("L['self'].__dict__['_modules']['blocks'].0.__dict__['_modules']['up']", "blocks.0.up"),
        ("G['model'].head", "head"),
        ("L['self']", ""),
    ],
)
def test_the_innermost_module(expression, path):
    assert module_path({"outer": ("L['self']", object), "inner": (expression, object)}) == path


def test_unknown():
    assert module_path(None) == module_path({}) == ""

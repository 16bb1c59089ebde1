"""Colours of decisions, bars, causes of waits and kinds of memory, for drawings and legends."""

from __future__ import annotations

from collections.abc import Iterable

from osdp_compile.reports.page.lanes import GATHER, LEFT_OUT, REDUCE, WAIT
from osdp_compile.reports.page.module_tree import TENSOR_PARALLEL

#: By key of a decision: its colour and its words.
DECISIONS = {
    "replicate": ("#3f6fb5", "replicate"),
    "shard_keep": ("#2a9d8f", "shard, keep"),
    "shard_regather": ("#e2872b", "shard, regather"),
    "shard_host_keep": ("#8fcfc6", "shard within host, keep"),
    "shard_host_regather": ("#f2c79a", "shard within host, regather"),
    TENSOR_PARALLEL: ("#8e5ea2", "tensor parallel"),
}
#: By kind of a bar.
SPANS = {
    "forward": "#7da7d9",
    "backward": "#e9b872",
    "optimizer": "#93c493",
    LEFT_OUT: "#c9ced6",
    GATHER: "#2a9d8f",
    REDUCE: "#8e5ea2",
    WAIT: "#c8352b",
}
_MEMORY = {
    "parameters": "#3f6fb5",
    "optimizer": "#8db1de",
    "inputs": "#c3c8cf",
    "gradients": "#c8352b",
    "gathered": "#2a9d8f",
    "activations": "#e9b04e",
    "communication": "#8e5ea2",
    "workspace": "#8c6d52",
}
_OTHERS = ("#6b7785", "#99a3ae", "#4f5963", "#b8a07e", "#7f9f7f")


def memory_colours(kinds: Iterable[str]) -> dict[str, str]:
    """A colour for each kind of memory."""
    others = [kind for kind in kinds if kind not in _MEMORY]
    named = {kind: _OTHERS[number % len(_OTHERS)] for number, kind in enumerate(others)}
    return {kind: _MEMORY.get(kind) or named[kind] for kind in kinds}

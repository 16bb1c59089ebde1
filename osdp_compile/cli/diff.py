"""``osdp diff``: the differences of two plans."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console

from osdp_compile.cli.model_arguments import exit_status
from osdp_compile.reports.plan_diff import plan_diff
from passes.types.plan import Plan

#: The exit status where the plans differ, as that of ``diff``; 2: a file holds no plan.
DIFFERENT, FAILED = 1, 2


def run(given: argparse.Namespace) -> int:
    """Compare and print; the exit status."""
    differs = False

    def compare(console: Console) -> None:
        nonlocal differs
        plans = [Plan.load(path) for path in given.plans]
        parts = plan_diff(plans, _names(given.plans))
        differs = bool(parts)
        for part in parts or ["no differences"]:
            console.print(part)

    failed = exit_status("osdp diff", compare)
    return FAILED if failed else DIFFERENT if differs else 0


def _names(paths: list[Path]) -> list[str]:
    """The paths without the folders that they share."""
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    shared = os.path.commonpath([path.parent.resolve() for path in paths])
    return [os.path.relpath(path.resolve(), shared) for path in paths]

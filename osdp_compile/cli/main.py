"""The command line: ``osdp calibrate``, ``plan``, ``diff``, ``sweep`` and ``doctor``.

torchrun --nproc-per-node 8 -m osdp_compile calibrate --out profile.json
osdp plan train:model_and_batch --world-size 64 --hardware h100-sxm --memory-limit 80GB
osdp diff before.json after.json
osdp sweep train:model_and_batch --world-sizes 8,64,512 --hardware h100-sxm --bandwidths 0.5x,1x,2x
osdp doctor

A command imports torch when it runs: help and argument errors do not need it.
"""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Sequence
from typing import Any

from osdp_compile.cli.arguments import add_calibrate, add_diff, add_plan, add_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    given = argument_parser().parse_args(arguments)
    command = importlib.import_module(f"osdp_compile.cli.{given.command}")
    return int(command.run(given))


def argument_parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    parser = argparse.ArgumentParser(
        prog="osdp", description="Tools for torch.compile(model, backend='osdp')."
    )
    parser.add_argument("--version", action=_Version, help="show the versions and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    add_calibrate(commands.add_parser("calibrate", help="measure this machine and its network"))
    add_plan(commands.add_parser("plan", help="plan a model for a cluster that is elsewhere"))
    add_diff(commands.add_parser("diff", help="show the differences of two plans"))
    add_sweep(commands.add_parser("sweep", help="plan over ranks, bandwidths, memory and lengths"))
    doctor = commands.add_parser("doctor", help="show what this machine has, and what fails on it")
    doctor.description = "Show versions, process groups, compiler, devices and profiles. The exit "
    doctor.description += "status is 1 if training fails on this machine."
    return parser


class _Version(argparse.Action):
    """The option ``--version``: print the versions and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(version())
        parser.exit()


def version() -> str:
    """The versions for a bug report."""
    from importlib import metadata  # imported here: it takes longer than the rest

    try:
        ours = metadata.version("osdp-compile")
    except metadata.PackageNotFoundError:  # a checkout on the path
        ours = "(not installed)"
    torch = metadata.version("torch")
    return f"osdp-compile {ours} (torch {torch}, Python {platform.python_version()})"

"""The command line: ``osdp calibrate``, ``osdp plan`` and ``osdp sweep``.

torchrun --nproc-per-node 8 -m osdp_compile calibrate --out profile.json
osdp plan train:model_and_batch --world-size 64 --hardware h100-sxm --memory-limit 80GB
osdp sweep train:model_and_batch --world-sizes 8,64,512 --hardware h100-sxm --bandwidths 0.5x,1x,2x
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from osdp_compile import cli_calibrate, cli_plan, cli_sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="osdp", description="Tools for torch.compile(model, backend='osdp')."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    cli_calibrate.add_arguments(
        commands.add_parser("calibrate", help="measure this machine and its network")
    )
    cli_plan.add_arguments(
        commands.add_parser("plan", help="plan a model for a cluster that need not be here")
    )
    cli_sweep.add_arguments(
        commands.add_parser("sweep", help="plan over ranks, bandwidths, memory and lengths")
    )
    given = parser.parse_args(arguments)
    return int(given.run(given))

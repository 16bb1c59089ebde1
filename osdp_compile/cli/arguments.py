"""Arguments of each command. The module imports nothing slow: ``osdp --help`` answers at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from osdp_compile.cli.argument_types import (
    bytes_of,
    count_of,
    counts_of,
    factors_of,
    limits_of,
    mesh_of,
    seconds_of,
    slices_of,
)
from passes.types.hardware_presets import PRESETS

#: The values of ``osdp_compile.options.Search``, whose module imports torch.
SEARCHES = ("quick", "thorough")
#: Default number of tokens of a sample.
SEQUENCE_LENGTH = 2048
#: Part of the description of the commands that plan.
NOTHING_IS_HERE = (
    "Nothing is allocated, no process group is started. MODULE:FUNCTION returns (model, args) or "
    "(model, args, kwargs), what one rank calls the model with in training; it is called with "
    "torch's default device set to meta, with the batch size where it takes an argument, and with "
    "the sequence length where it has an argument called sequence_length."
)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp calibrate``."""
    parser.description = (
        "Measure compute, memory and every collective, for options={'hardware': 'FILE'}. "
        "Start it as training is started: torchrun ... -m osdp_compile calibrate --out FILE. "
        "Without torchrun one process is measured, and no collectives."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON profile")
    parser.add_argument(
        "--seconds", type=seconds_of, default=20.0, help="about how long to measure (default: 20)"
    )
    parser.add_argument(
        "--memory",
        type=bytes_of,
        default=1 << 30,
        metavar="BYTES",
        help="the most memory a rank may take, as 500MB (default: 1GiB, at least 8MiB)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="what the ranks train on (default: cuda where there is one)",
    )
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        default={},
        metavar="NAME=RANKS,...",
        help="measure also along each dimension of a device mesh, outermost first, such as "
        "host=2,gpu=8; options={'mesh': mesh['host']} then finds its own rates",
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp plan``."""
    parser.description = f"Plan a model for a cluster that need not be here. {NOTHING_IS_HERE}"
    _add_model(parser)
    parser.add_argument("--batch-size", type=count_of, help="of a rank (with --hf-config: 1)")
    parser.add_argument(
        "--sequence-length",
        type=count_of,
        help=f"with --hf-config, or where MODULE:FUNCTION takes it (default: {SEQUENCE_LENGTH})",
    )
    parser.add_argument("--world-size", type=count_of, metavar="RANKS")
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        metavar="NAME=RANKS,...",
        help="in place of --world-size: ranks along two dimensions, the outer first, such as "
        "host=8,gpu=8",
    )
    parser.add_argument(
        "--memory-limit", type=bytes_of, metavar="BYTES", help="of a rank, as 80GB (default: none)"
    )
    parser.add_argument(
        "--slices",
        type=slices_of,
        metavar="1|NAME=SLICES,...",
        help="as the option of that name: 1 for none, or by parameter as 'blocks.*.up.weight=4', "
        "or =4:1 to keep one of the four (default: the planner's choice)",
    )
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        default="quick",
        help="thorough: under less memory too, which takes minutes and may find a faster plan",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON")
    parser.add_argument(
        "--batch-sizes",
        type=_batch_sizes,
        metavar="1,2,4|auto",
        help="find the batch size of a rank with the highest throughput under the limit",
    )
    parser.add_argument(
        "--frontier",
        type=Path,
        metavar="PNG",
        help="also step time against memory, as a table and as this picture",
    )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp sweep``."""
    parser.description = (
        "Plan a model for every combination of ranks, bandwidth, memory and sequence length: "
        "throughput and utilisation under the best plan and under FSDP, and what bounds each. "
        + NOTHING_IS_HERE
    )
    _add_model(parser)
    parser.add_argument("--world-sizes", type=counts_of, metavar="RANKS,...", help="as 8,64,512")
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        action="append",
        metavar="NAME=RANKS,...",
        help="in place of --world-sizes: ranks along two dimensions, the outer first, such as "
        "host=8,gpu=8; once for each that is to be planned for",
    )
    parser.add_argument(
        "--bandwidths",
        type=factors_of,
        default=(1.0,),
        metavar="0.5x,1x,2x",
        help="of the network, times the profile's: between hosts, where the profile knows them "
        "(presets do, of eight GPUs each) or the mesh has two dimensions; else between all ranks",
    )
    parser.add_argument(
        "--memory-limits",
        type=limits_of,
        default=(None,),
        metavar="BYTES,...",
        help="of a rank, as 40GB,80GB (default: none)",
    )
    parser.add_argument(
        "--sequence-lengths",
        type=counts_of,
        metavar="2048,4096",
        help=f"with --hf-config, or where MODULE:FUNCTION takes it (default: {SEQUENCE_LENGTH})",
    )
    parser.add_argument(
        "--batch-sizes",
        type=counts_of,
        metavar="1,2,4",
        help="of a rank: at each point the one with the highest throughput counts, which may be "
        "another for FSDP (default: 1)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="save the points")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG", help="draw them as heat maps (png, svg, pdf)"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model, its dtypes, its optimizer and the hardware profile."""
    parser.add_argument("model", nargs="?", metavar="MODULE:FUNCTION", help="makes the model")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="in its place: a folder with a Hugging Face config.json, of a causal language model",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of the parameters, with --hf-config (default: bfloat16)",
    )
    for name, what in (
        ("param", "parameters are gathered and computed with"),
        ("reduce", "gradients travel"),
    ):
        parser.add_argument(
            f"--{name}-dtype",
            metavar="DTYPE",
            help=f"in which {what}, as bfloat16: the option of that name (default: their own)",
        )
    parser.add_argument(
        "--hardware",
        required=True,
        help=f"a profile that osdp calibrate wrote, or one of {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--optimizer", default="adamw", help="its name, or bytes of state for each element"
    )


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes; empty for ``auto``."""
    return () if text == "auto" else counts_of(text)

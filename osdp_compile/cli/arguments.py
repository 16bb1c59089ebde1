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
    "Nothing is allocated, and no process group is started. MODULE:FUNCTION returns (model, args) "
    "or (model, args, kwargs), with the arguments of one rank in training. It is called with "
    "torch's default device set to meta. Its first argument, if it has one, is the batch size; an "
    "argument called sequence_length is the sequence length."
)


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp calibrate``."""
    parser.description = (
        "Measure compute, memory and every collective, for options={'hardware': 'FILE'}. "
        "Start it like training: torchrun ... -m osdp_compile calibrate --out FILE. "
        "Without torchrun it measures one process, and no collectives."
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON profile")
    parser.add_argument(
        "--seconds",
        type=seconds_of,
        default=20.0,
        help="seconds of measurement, about (default: 20)",
    )
    parser.add_argument(
        "--memory",
        type=bytes_of,
        default=1 << 30,
        metavar="BYTES",
        help="memory that a rank may take, such as 500MB (default: 1GiB; at least 8MiB)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device of the ranks (default: cuda if there is one, else cpu)",
    )
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        default={},
        metavar="NAME=RANKS,...",
        help="also measure along each dimension of a device mesh, the outer first, such as "
        "host=2,gpu=8; options={'mesh': mesh['host']} then finds its own rates",
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp plan``."""
    parser.description = f"Plan a model for a cluster that is elsewhere. {NOTHING_IS_HERE}"
    _add_model(parser)
    parser.add_argument(
        "--batch-size", type=count_of, help="samples of a rank (default with --hf-config: 1)"
    )
    parser.add_argument(
        "--sequence-length",
        type=count_of,
        help=f"with --hf-config, or if MODULE:FUNCTION takes it (default: {SEQUENCE_LENGTH})",
    )
    parser.add_argument("--world-size", type=count_of, metavar="RANKS", help="number of ranks")
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        metavar="NAME=RANKS,...",
        help="in place of --world-size: ranks along two dimensions, the outer first, such as "
        "host=8,gpu=8",
    )
    parser.add_argument(
        "--memory-limit",
        type=bytes_of,
        metavar="BYTES",
        help="of a rank, such as 80GB (default: none)",
    )
    parser.add_argument(
        "--slices",
        type=slices_of,
        metavar="1|NAME=SLICES,...",
        help="the option slices: 1 for none; or by parameter, such as 'blocks.*.up.weight=4', or "
        "=4:1 to keep one of four slices gathered (default: the planner's choice)",
    )
    parser.add_argument(
        "--tensor-parallel",
        nargs="*",
        metavar="NAME",
        help="the planner may move activations in place of weights; with names: to the groups of "
        "these parameters, whatever the search finds (default: weights move)",
    )
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        default="quick",
        help="thorough: search under lower limits too; minutes in place of seconds",
    )
    parser.add_argument(
        "--batch-sizes",
        type=_batch_sizes,
        metavar="1,2,4|auto",
        help="find the batch size of a rank with the highest throughput under the limit",
    )
    _add_files(parser)


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp diff``."""
    parser.description = (
        "Show the predictions of two plans side by side, and the parameters, in groups of layers, "
        "with other decisions, each with the gain that its plan names. The exit status is 0 if "
        "the plans are alike, 1 if they differ, and 2 if a file holds no plan."
    )
    parser.add_argument(
        "plans", nargs=2, type=Path, metavar="PLAN", help="a file that osdp plan --out wrote"
    )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp sweep``."""
    parser.description = (
        "Plan a model for every combination of ranks, bandwidth, memory and sequence length. Print "
        "throughput and utilisation of the best plan and of FSDP, and the bound of each point. "
        + NOTHING_IS_HERE
    )
    _add_model(parser)
    parser.add_argument(
        "--world-sizes", type=counts_of, metavar="RANKS,...", help="such as 8,64,512"
    )
    parser.add_argument(
        "--mesh",
        type=mesh_of,
        action="append",
        metavar="NAME=RANKS,...",
        help="in place of --world-sizes: ranks along two dimensions, the outer first, such as "
        "host=8,gpu=8; may be given several times",
    )
    parser.add_argument(
        "--bandwidths",
        type=factors_of,
        default=(1.0,),
        metavar="0.5x,1x,2x",
        help="multiples of the profile's network bandwidth: between hosts if the profile has hosts "
        "(presets: of eight GPUs) or the mesh has two dimensions; else between all ranks",
    )
    parser.add_argument(
        "--memory-limits",
        type=limits_of,
        default=(None,),
        metavar="BYTES,...",
        help="of a rank, such as 40GB,80GB (default: none)",
    )
    parser.add_argument(
        "--sequence-lengths",
        type=counts_of,
        metavar="2048,4096",
        help=f"with --hf-config, or if MODULE:FUNCTION takes it (default: {SEQUENCE_LENGTH})",
    )
    parser.add_argument(
        "--batch-sizes",
        type=counts_of,
        metavar="1,2,4",
        help="of a rank; each point has the one with the highest throughput, FSDP its own "
        "(default: 1)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the points as CSV")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG", help="draw heat maps (png, svg, pdf)"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the model, its dtypes, its optimizer and the hardware profile."""
    parser.add_argument("model", nargs="?", metavar="MODULE:FUNCTION", help="the model")
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="in place of MODULE:FUNCTION: a folder with the config.json of a Hugging Face causal "
        "language model",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of the parameters, with --hf-config (default: bfloat16)",
    )
    for name, what in (
        ("param", "gathered parameters and of compute"),
        ("reduce", "reduced gradients"),
    ):
        parser.add_argument(
            f"--{name}-dtype",
            metavar="DTYPE",
            help=f"dtype of {what}, such as bfloat16 (default: their own)",
        )
    parser.add_argument(
        "--hardware",
        required=True,
        help=f"the profile of osdp calibrate, or one of {', '.join(PRESETS)}",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        help="name, or bytes of state for each element (default: adamw)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``osdp plan`` for what it writes."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the plan as JSON")
    parser.add_argument(
        "--frontier",
        type=Path,
        metavar="PNG",
        help="also print step time against memory, and draw this picture",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report as one page: the simulated step, its memory, the model by decision, "
        "the plan, the comparison, and the frontier if it is asked for",
    )


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes; empty for ``auto``."""
    return () if text == "auto" else counts_of(text)

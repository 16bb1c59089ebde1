"""Model arguments: make the model that a command plans; print errors and progress."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console

from osdp_compile import progress
from osdp_compile.cli.arguments import SEQUENCE_LENGTH
from osdp_compile.errors import OptionError, OsdpError
from osdp_compile.integrations.hf_models import causal_lm
from osdp_compile.options import CheckedOptions
from osdp_compile.planning.traced_step import TracedStep, trace
from passes.types.hardware import Hardware

#: The argument of MODULE:FUNCTION for the sequence length.
_LENGTH = "sequence_length"
#: A model, and its arguments and keyword arguments in training.
Made = tuple[torch.nn.Module, Sequence[Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Given:
    """The hardware profile, and the tracer of the model.

    ``traced``: traces the training step for a batch size of one rank and a sequence length; None:
    their defaults. ``batch``, ``length``: the defaults, or None if the model does not take them.
    """

    hardware: Hardware
    traced: Callable[[int | None, int | None], TracedStep]
    batch: int | None
    length: int | None


@dataclasses.dataclass(frozen=True)
class _Maker:
    """The function that makes the model and its arguments from a batch size and a length.

    ``takes_batch``, ``takes_length``: the function uses that argument.
    """

    make: Callable[[int, int], Made]
    takes_batch: bool = True
    takes_length: bool = True


def given_model(given: argparse.Namespace, batches: bool, lengths: bool) -> Given:
    """Check the arguments of the model and the profile.

    ``batches``, ``lengths``: the user gave batch sizes, or sequence lengths.

    Raises:
        ValueError: for a malformed argument, or if the model takes no batch size or no sequence
            length and the user gave one.
    """
    optimizer = int(given.optimizer) if given.optimizer.isdigit() else given.optimizer
    checked = CheckedOptions.parse(
        {
            "hardware": given.hardware,
            "optimizer": optimizer,
            "param_dtype": given.param_dtype,
            "reduce_dtype": given.reduce_dtype,
        }
    )
    assert checked.hardware is not None
    maker = _maker(given)
    if batches and not maker.takes_batch:
        raise ValueError(f"{given.model} takes no batch size: give it an argument for it")
    if lengths and not maker.takes_length:
        raise ValueError(
            f"{given.model} takes no sequence length: give it an argument called sequence_length"
        )

    def traced(batch: int | None, length: int | None) -> TracedStep:
        model, args, kwargs = maker.make(batch or 1, length or SEQUENCE_LENGTH)
        return trace(
            model,
            args,
            kwargs,
            optimizer=optimizer,
            precision=checked.precision,
            hardware=checked.hardware,
        )

    return Given(
        checked.hardware,
        traced,
        batch=1 if maker.takes_batch else None,
        length=SEQUENCE_LENGTH if maker.takes_length else None,
    )


def _maker(given: argparse.Namespace) -> _Maker:
    if (given.model is None) == (given.hf_config is None):
        raise ValueError("give MODULE:FUNCTION, or --hf-config, and not both")
    if given.hf_config is not None:
        dtype = getattr(torch, given.dtype)
        return _Maker(lambda batch, length: causal_lm(given.hf_config, batch, length, dtype))
    module_name, colon, name = given.model.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{given.model!r} is not like MODULE:FUNCTION, as train:model_and_batch")
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{given.model}: {error}") from error
    takes = list(inspect.signature(function).parameters)
    takes_length = _LENGTH in takes
    takes_batch = len(takes) > takes_length

    def make(batch: int, length: int) -> Made:
        args = [batch] if takes_batch else []
        kwargs = {_LENGTH: length} if takes_length else {}
        with torch.device("meta"):
            made = function(*args, **kwargs)
        if not (isinstance(made, tuple) and len(made) in (2, 3)):
            raise ValueError(f"{given.model} returned no (model, args) or (model, args, kwargs)")
        model, model_args = made[:2]
        return model, model_args, made[2] if len(made) == 3 else {}

    return _Maker(make, takes_batch, takes_length)


def exit_status(command: str, run: Callable[[Console], None]) -> int:
    """Run a command with a console for its tables; the exit status.

    An error is one line. An option of ``torch.compile`` has the name of the command's argument.
    """
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:  # ignore the default of 80 columns
        console.width = max(console.width, 120)
    try:
        run(console)
    except (OsdpError, ValueError, OSError, ImportError) as error:
        said = str(error)
        if isinstance(error, OptionError):
            said = f"argument --{error.option.replace('_', '-')}: {error.reason}"
        Console(stderr=True).print(f"{command}: {said}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


@contextmanager
def working(command: str, first: str) -> Iterator[Callable[[str], None]]:
    """Show the current stage on standard error.

    A terminal shows one line, which disappears at the end. Otherwise each stage prints a line.
    ``first``: the first stage.
    """

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with progress.stages(command, say):
        progress.stage(first)
        yield progress.stage

"""Uncaught errors: print an error of the backend briefly if nobody catches it.

An error for the user is one sentence. Python prints it below the frames of Dynamo and of this
package, and every rank prints all frames. This module prints the sentence first, and below it the
user's own frames only. If all ranks raise the same error, rank 0 alone prints it. torchrun repeats
the sentence in its summary, the last lines that a person sees.

After a model is sharded, some errors of torch about DTensors get a line that says what to do.

``OSDP_DEBUG=1`` or ``TORCHDYNAMO_VERBOSE=1`` shows all frames on all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import passes
from osdp_compile import _torch
from osdp_compile.errors import OsdpError

#: Time for rank 0 to print before another rank exits, which ends the job.
_PATIENCE_SECONDS = 2.0
#: Code that is not the user's.
_NOT_THE_USERS = tuple(
    str(folder) + os.sep
    for folder in (
        Path(torch.__file__).parent,
        Path(passes.__file__ or "").parent,
        Path(__file__).parents[1],
    )
)

#: Parts of torch's messages about DTensors -> what to do.
_HINTS = {
    "got mixed torch.Tensor and DTensor": (
        "since the first call parameters are DTensors: every rank has its rows. A copy of the "
        "model, an average (EMA) of it or a state dict from before is plain: make it after the "
        "first call, or after osdp_compile.shard. For a penalty of weights, add the full_tensor() "
        "of its sum, on every rank. Inside a forward read a parameter as its module's attribute "
        "(module.weight): parameters() and state_dict() give the DTensor there, too"
    ),
    "is not supported for tensor subclasses": (
        "since the first call parameters are DTensors: call full_tensor() before, on every rank"
    ),
    "does not have a sharding strategy registered": (
        "since the first call parameters are DTensors, which lack this operator: write a whole "
        "tensor with copy_, or this rank's rows through to_local()"
    ),
    "Couldn't swap": "move or convert a model before its first call",
    "it's not the same object as": (
        "a sharded module has a class of its own, which pickle does not find: save "
        "model.state_dict() in place of the model"
    ),
}

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Brief:
    """Mixin of errors that are printed briefly if nobody catches them."""


def is_verbose() -> bool:
    """Whether to show all frames."""
    asked = (os.environ.get(name, "0") for name in ("OSDP_DEBUG", "TORCHDYNAMO_VERBOSE"))
    return any(one not in ("", "0") for one in asked)


def raise_briefly(error: Exception) -> NoReturn:
    """Inside a backend: raise an error for the user with its own type.

    If nobody catches it, it is printed briefly.
    """
    if is_verbose():
        _torch.dynamo.raise_to_user(error)
    print_for_users()
    _torch.dynamo.raise_to_user(error, mixin=Brief)


def print_for_users() -> None:
    """From now on, print an uncaught :class:`Brief` error briefly, and others with a hint."""
    before = sys.excepthook
    if not isinstance(before, _Printer):
        sys.excepthook = _Printer(before)


class _Printer:
    """The ``sys.excepthook``: Python calls it with an uncaught error."""

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Brief) or is_verbose():
            self._before(kind, error, trace)
            sys.stderr.writelines(f"[osdp] {hint}.\n" for hint in _hints(error))
            return
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        shared = isinstance(error, OsdpError) and error.on_every_rank
        text = brief_text(error, trace)
        if rank and shared:
            text = f"{_name(error)}: as on rank 0"
        _tell_torchrun(text.splitlines()[0])
        if rank:  # torchrun ends this rank in this time if rank 0 has printed the error
            time.sleep(_PATIENCE_SECONDS)
        prefix = "" if ranks == 1 or (shared and not rank) else f"[rank{rank}]: "
        sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
        sys.stderr.flush()


def brief_text(error: BaseException, trace: TracebackType | None) -> str:
    """The error, and below it the user's frames."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not os.path.abspath(frame.filename).startswith(_NOT_THE_USERS)
    ]
    said = " ".join(str(error).split())
    return f"{_name(error)}: {said}\n" + "".join(traceback.format_list(frames))


def _hints(error: BaseException) -> list[str]:
    """What to do about an error of torch; often nothing."""
    return [hint for part, hint in _HINTS.items() if part in str(error)]


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _tell_torchrun(text: str) -> None:
    """Write the error file, from which torchrun prints the cause of a failure.

    Its format is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    more = {"py_callstack": text, "timestamp": str(int(time.time()))}
    said = {"message": {"message": text, "extraInfo": more}}
    try:
        Path(file).write_text(json.dumps(said))
    except OSError:
        return  # the error itself is printed anyway

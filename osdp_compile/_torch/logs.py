"""Torch's logs: the levels of TORCH_LOGS, and the entries of TORCH_TRACE."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

# 2.11.0, 2.13.0, 2.15.0: an entry of TORCH_TRACE's log, which tlparse reads; the levels of
# TORCH_LOGS, and that log.
from torch._logging import _internal as torch_logs

from osdp_compile._torch.dynamo import CompileId


def shown_by_torch(loggers: Sequence[str]) -> list[str]:
    """Those of these loggers to which TORCH_LOGS or ``torch._logging.set_logs`` gave a level."""
    return [name for name in loggers if name in torch_logs.log_state.log_qname_to_level]


def is_traced() -> bool:
    """Whether torch's structured log (TORCH_TRACE) is written.

    Without TORCH_TRACE torch's own handler has no folder, and leaves at the first entry. pytest
    adds the handlers of the root logger; they write no structured log.
    """
    return any(
        not isinstance(handler, torch_logs.LazyTraceHandler) or handler.root_dir is not None
        for handler in torch_logs.trace_log.handlers
        if handler not in logging.root.handlers
    )


def trace_artifact(
    name: str, encoding: str, payload: Callable[[], str], compiled: CompileId | None
) -> None:
    """Write an artifact to torch's structured log. tlparse shows it as a file of this name.

    Args:
        name: without an ending; tlparse adds a number and the ending.
        encoding: ``"string"`` or ``"json"``.
        payload: called only if the log is written.
        compiled: the compilation that it belongs to, if Dynamo compiles no frame now.
    """
    torch_logs.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        compile_id=compiled,
    )

"""Dynamo, from within a backend: restarts of tracing, errors for the user, sources of inputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any, NoReturn

from torch import fx

# 2.11.0 to 2.15.0: Dynamo lets a backend raise these. The restart makes it trace the frame again.
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis

# 2.11.0 to 2.15.0: the frame being traced; the floats that Dynamo makes constants when it
# traces a frame again.
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState


def restart_tracing() -> NoReturn:
    """From within a backend: make Dynamo trace the frame again from its start.

    Dynamo keeps a log of its speculations and refuses a trace that differs from it. This function
    clears the log, because the model has changed on purpose.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: the model was sharded")


#: AOTAutograd raises this to make Dynamo trace the frame again with floats as constants.
RestartTracing = TensorifyScalarRestartAnalysis


def constant_floats() -> list[str]:
    """The symbols of floats that become constants when Dynamo traces this frame again."""
    return sorted(TensorifyState.force_specializations)


def restart_with_constants(symbols: Sequence[str]) -> NoReturn:
    """From within a backend: make Dynamo trace the frame again with these floats as constants."""
    for symbol in symbols:
        TensorifyState.specialize(symbol)
    raise TensorifyScalarRestartAnalysis(restart_reason="osdp: rank 0 traces the frame again")


def raise_to_user(error: Exception, mixin: type | None = None) -> NoReturn:
    """Raise an error from a backend so that the user gets its own type.

    Dynamo wraps errors of a backend into BackendCompilerFailed, except its own ShortenTraceback.
    So the raised error is of a subclass of both. Its traceback begins at the backend, not in Dynamo
    (the whole traceback with TORCHDYNAMO_VERBOSE=1).

    ``mixin``: another base of the subclass, for errors that a user can act on. These have no
    traceback and no cause.
    """
    kind = type(error)
    if isinstance(error, ShortenTraceback):
        raise error
    said, reduced = str(error), error.__reduce__()
    own = {
        "__module__": kind.__module__,
        "__str__": lambda self: said,  # Dynamo adds advice about its traceback to ``args``
        "__reduce__": lambda self: reduced,
    }
    bases = (kind, ShortenTraceback) if mixin is None else (mixin, kind, ShortenTraceback)
    both: Any = type(kind.__name__, bases, own)
    raised = both.__new__(both)
    # Sets the attributes that Dynamo reads when it suppresses errors; newer versions have more.
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe(1))
    raised.__dict__.update(error.__dict__)
    if mixin is not None:
        raise raised from None
    raise raised.with_traceback(error.__traceback__) from error.__cause__


def ends_at_graph_break(gm: fx.GraphModule) -> bool:
    """Whether this graph ends at a graph break."""
    # 2.11.0 to 2.15.0: the reason for the end of a graph.
    return bool(gm.compile_subgraph_reason.graph_break)  # type: ignore[union-attr]


def source_chain(placeholder: fx.Node) -> list[str]:
    """The expressions of a graph input's source, outermost first: ``L['m']``, ``L['m']._mod…``."""
    source = getattr(placeholder, "_dynamo_source", None)
    names: list[str] = []
    while source is not None:
        name = source.name() if callable(source.name) else source.name
        names.append(name)
        source = getattr(source, "base", None)
    return names[::-1]


def copy_source(placeholder: fx.Node, copied: fx.Node) -> None:
    """Give a copy of a graph input the input's Dynamo source."""
    copied._dynamo_source = placeholder._dynamo_source  # type: ignore[attr-defined]


def evaluate_prefixes(placeholder: fx.Node) -> list[tuple[str, Any]]:
    """(expression, object) along a graph input's source in the traced frame, outermost first."""
    output = InstructionTranslator.current_tx().output
    scope = {"L": output.local_scope, "G": output.global_scope}
    found = []
    for name in source_chain(placeholder):
        try:
            found.append((name, eval(name, dict(output.global_scope), scope)))
        except Exception:  # uses Dynamo's own helpers; a longer prefix may evaluate
            continue
    return found


def code_being_compiled() -> CodeType:
    """From within a backend: the code of the frame that Dynamo compiles."""
    # 2.11.0 to 2.15.0
    code: CodeType = InstructionTranslator.current_tx().output.root_tx.f_code
    return code

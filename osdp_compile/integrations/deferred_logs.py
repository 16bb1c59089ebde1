"""Deferred logs: a LightningModule's ``self.log`` in a compiled step is called after the step.

``log`` reads and changes the Trainer, which Dynamo cannot trace: it would break the graph between
the forward and the loss. During the step a function that keeps the arguments takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class DeferredLogs:
    """Keeps calls of ``log`` and ``log_dict``, and makes them later.

    Args:
        module: a LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        calls: list[tuple[str, Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._calls = calls

        # Dynamo guards on these functions: they are the same at every step.
        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(("log", name, _detached(value), args, kwargs))

        def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            values = {name: _detached(value) for name, value in dictionary.items()}
            calls.append(("log_dict", None, values, args, kwargs))

        self._kept: dict[str, Callable[..., None]] = {"log": log, "log_dict": log_dict}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, calls are kept. They are made on leaving, and dropped after an error."""
        own = vars(self._module)
        before = {name: own[name] for name in self._kept if name in own}
        own.update(self._kept)
        try:
            yield
        except BaseException:
            self._calls.clear()
            raise
        finally:
            for name in self._kept:
                del own[name]
            own.update(before)
            calls = [*self._calls]
            self._calls.clear()
        for method, name, value, args, kwargs in calls:
            first = (value,) if method == "log_dict" else (name, value)
            getattr(self._module, method)(*first, *args, **kwargs)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value

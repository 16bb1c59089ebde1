"""Agreement of the ranks on the model, the options and errors, before the model changes.

If one rank fails alone, the others wait in a collective for ever. So the ranks exchange failures
first, and every rank raises them. One rank exchanges nothing, and neither does a fake group: only
this rank exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from osdp_compile import _torch
from osdp_compile.errors import InfeasibleLimit, OsdpError, PlanMismatch, RanksDiffer
from osdp_compile.model.model_parameters import ModelParameter
from osdp_compile.model.subgraphs import graphs_of
from osdp_compile.runtime.collectives import Group, all_gather_single, backend_of, size_of

T = TypeVar("T")

#: A broadcast ends with an error after the process group's timeout: 30 minutes with gloo, 10 with
#: NCCL. Rank 0 may plan for longer, so it tells the others this often that it works.
_SIGN_OF_LIFE_SECONDS = 20.0
_WORKING = "rank 0 works"


def fingerprint(gm: fx.GraphModule | None, entries: Sequence[ModelParameter]) -> list[str]:
    """Parameters and operations, which must be equal on every rank, one per line.

    Batch sizes may differ. ``gm``: None before the model's first call.
    """
    lines = [
        f"parameter {e.name}: {tuple(e.shape)} {e.parameter.dtype} "
        f"requires_grad={e.parameter.requires_grad} has_grad={e.parameter.grad is not None} "
        f"device={e.parameter.device.type}"
        + ("" if e.others is None else f" beside {e.others.placements}")
        for e in entries
    ]
    if gm is None:
        return lines
    for graph in graphs_of(gm):
        for node in graph.nodes:
            if node.op in ("call_function", "call_method", "call_module"):
                target = node.target if isinstance(node.target, str) else _qualified(node.target)
                lines.append(f"operation {target}")
    return lines


def agree(lines: list[str], group: Group) -> None:
    """Check that every rank has the same model and options. Collective.

    Raises:
        RanksDiffer: on every rank, naming the first difference.
    """
    digests = from_all(hashlib.sha256("\n".join(lines).encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        return
    texts = from_all(lines, group)
    other = next(i for i, d in enumerate(digests) if d != digests[0])
    first, second = texts[0], texts[other]
    for index in range(max(len(first), len(second))):
        ours = first[index] if index < len(first) else "nothing"
        theirs = second[index] if index < len(second) else "nothing"
        if ours != theirs:
            raise RanksDiffer(
                f"ranks differ in their models or options, first here: rank 0 has {ours!r}, "
                f"rank {other} has {theirs!r}. Build the same model, give the same options and "
                "call it the same way on every rank."
            )
    raise AssertionError("digests differ and texts do not")


def on_every_rank(make: Callable[[], T], group: Group) -> T:
    """The result of ``make()`` on this rank, if no rank raises an OsdpError. Collective.

    Raises:
        OsdpError: on every rank. The rank's own error if all ranks raise the same text, else one
            that names the first failed rank.
    """
    refused: OsdpError | None = None
    made: T | None = None
    try:
        made = make()
    except OsdpError as error:
        refused = error
    texts = from_all(None if refused is None else str(refused), group)
    if refused is not None and len(set(texts)) == 1:
        raise refused
    for rank, text in enumerate(texts):
        if text is not None:
            raise OsdpError(f"rank {rank}: {text}") from refused
    return made  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class _Restart:
    """A message: rank 0 traces the frame again with these floats as constants."""

    constant_floats: list[str]


def from_rank_zero(make: Callable[[], T], group: Group) -> T:
    """The result of ``make()`` on rank 0, on every rank. Collective.

    ``make`` runs no collective. It may take longer than the group's timeout. An error of rank 0 is
    raised on every rank, so that no rank waits for ever. If AOTAutograd makes Dynamo trace the
    frame again on rank 0 (with ``dynamic=True``, for a float that must be a constant), every rank
    traces again.
    """
    if group is None or _is_fake(group):
        return make()
    sent: list[tuple[T | None, OsdpError | _Restart | None]] = [(None, None)]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            with _signs_of_life(group):
                sent = [(make(), None)]
        except _torch.dynamo.RestartTracing as restart:
            failure = restart
            sent = [(None, _Restart(_torch.dynamo.constant_floats()))]
        except Exception as error:
            failure = error
            told = OsdpError(f"rank 0: {type(error).__name__}: {error}")
            sent = [(None, error if isinstance(error, InfeasibleLimit | PlanMismatch) else told)]
    made, refused = _from_zero(sent[0], group)
    if failure is not None:
        raise failure
    if isinstance(refused, _Restart):
        _torch.dynamo.restart_with_constants(refused.constant_floats)
    if refused is not None:
        raise refused
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def _signs_of_life(group: dist.ProcessGroup) -> Iterator[None]:
    """Keep the ranks that wait in ``_from_zero`` from their timeout while rank 0 works."""
    done = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def tell() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        while not done.wait(_SIGN_OF_LIFE_SECONDS):
            _send(_WORKING, group)

    teller = threading.Thread(target=tell, name="osdp: signs of life", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _from_zero(value: Any, group: dist.ProcessGroup) -> Any:
    """Rank 0's value, on every rank. Others wait through its signs of life."""
    value = _send(value, group)
    while value == _WORKING:
        value = _send(value, group)
    return value


def _send(value: Any, group: dist.ProcessGroup) -> Any:
    sent = [value]
    dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
    return sent[0]


def from_all(value: Any, group: Group) -> list[Any]:
    """Every rank's value, in the order of the ranks. Collective; a fake group repeats this one."""
    values: list[Any] = [value] * size_of(group)
    if group is not None and not _is_fake(group):
        dist.all_gather_object(values, value, group=group)
    return values


def equal_on_all(number: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks give the same number; each sends 8 bytes. Collective."""
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    numbers = mine.new_empty([group.size()])
    all_gather_single(numbers, mine, group=group)
    return bool((numbers == number).all())


def checksum(lines: Sequence[str]) -> int:
    """A number above zero that tells texts apart."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return int.from_bytes(digest[:7], "little") + 1


def _is_fake(group: Group) -> bool:
    return backend_of(group, "cpu") == "fake"


def _qualified(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', function)}"

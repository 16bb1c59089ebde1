"""No sync: accumulate whole gradients of several backwards on each rank, and reduce them once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from osdp_compile.errors import OsdpError
from osdp_compile.options import CheckedOptions
from osdp_compile.runtime.meshes import local_part
from osdp_compile.sharding.gradient_leaves import gradients_of, new_leaves
from osdp_compile.sharding.shard_in_place import add_gradient
from osdp_compile.tracking.session import Session, find, session_for

#: Models inside the context that were not called yet.
_waiting: list[nn.Module] = []


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backwards add up gradients on each rank and reduce none. Collective.

    Example:

        for index, (inputs, targets) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else osdp_compile.no_sync(model):
                loss_of(compiled(inputs), targets).backward()
        optimizer.step()

    On exit, the sum is reduced and added to ``parameter.grad``: outside, gradients are the same as
    without this context. Nothing overlaps that reduction: the context pays if it saves three
    reductions or more. Parameters are gathered as usual.

    Meanwhile each rank holds whole gradients, twice while a backward adds to existing ones. Under
    ``memory_limit`` the plan needs room for them: ``options={"accumulate": True}``.

    After an error inside, the sum is dropped and nothing is communicated.

    Args:
        model: the compiled model, or the result of ``torch.compile`` for it. Its first call may
            be inside.

    Raises:
        OsdpError: if the plan has no room for whole gradients.
    """
    root: nn.Module = getattr(model, "_orig_mod", model)
    session = session_for(root)
    if (session is not None and session.reading.leaves is not None) or root in _waiting:
        yield  # the outer context reduces
        return
    if session is None:
        _waiting.append(root)
    else:
        _begin(session, root)
    try:
        yield
    except BaseException:
        session = session_for(root)
        if session is not None:
            _end(session)
        raise
    finally:
        _waiting[:] = [one for one in _waiting if one is not root]
    session = session_for(root)
    if session is not None:
        _reduce(session, root, _end(session))


def begin_if_waiting(session: Session) -> None:
    """Begin to accumulate for a model whose first call is inside the context."""
    for root in _waiting:
        if session_for(root) is session:
            _begin(session, root)


def check_if_waiting(parameters: Iterable[nn.Parameter], options: CheckedOptions) -> None:
    """Check the options of a first call inside the context.

    Raises:
        OsdpError: if they leave no room for whole gradients.
    """
    own = {id(parameter) for parameter in parameters}
    for root in _waiting:
        if any(id(parameter) in own for parameter in root.parameters()):
            _check_room(options)


def _check_room(options: CheckedOptions) -> None:
    if options.memory_limit_bytes is not None and options.accumulate is not True:
        raise OsdpError(
            "no_sync keeps whole gradients on every rank, and memory_limit leaves no room for "
            "them: add options={'accumulate': True}, or leave no_sync out"
        )


def _begin(session: Session, root: nn.Module) -> None:
    _check_room(session.options)
    trained = [(name, one) for name, one in _own(session, root) if one.requires_grad]
    dtype_of = session.reading.precision.gradient_dtype
    shape_of = {one.name: one.shape for one in session.context.parameters}
    leaves = [(name, shape_of[name], dtype_of(one)) for name, one in trained]
    session.reading.use_leaves(new_leaves(leaves, trained[0][1].device) if trained else {})


def _end(session: Session) -> dict[str, Tensor]:
    """End the accumulation; returns the gradients by name."""
    leaves = session.reading.leaves
    session.reading.use_leaves(None)
    return gradients_of(leaves or {})


def _own(session: Session, root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module that belong to a session, with the session's names."""
    found = [(find(parameter), parameter) for parameter in root.parameters()]
    return [(one[0], parameter) for one, parameter in found if one and one[1] is session]


def _reduce(session: Session, root: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Add the mean over ranks of the accumulated gradients to ``.grad``, one at a time."""
    own = _own(session, root)
    # A rank may have no gradient of a parameter, for which other ranks have one.
    there = torch.tensor([name in gradients for name, _ in own], dtype=torch.int32)
    there = there.to(own[0][1].device)
    if session.mesh is not None:
        dist.all_reduce(there, op=dist.ReduceOp.MAX, group=session.mesh.get_group())
    for (name, parameter), is_there in zip(own, there.tolist(), strict=True):
        if not is_there:
            continue
        local = local_part(parameter.detach())
        decision = session.plan.decision(name)
        gradient = gradients.pop(name, None)
        if gradient is None:
            dtype = session.reading.precision.gradient_dtype(parameter)
            shape = session.context.parameter(name).shape
            gradient = torch.zeros(shape, dtype=dtype, device=parameter.device)
        marks = session.context.layout_of(name).marks
        mean = torch.ops.osdp.reduce_grad(gradient, local, name, decision.sharded, *marks)
        add_gradient(parameter, mean)

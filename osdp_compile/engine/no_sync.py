"""No sync: the gradients of several backwards, added up on each rank and reduced once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp_compile.errors import OsdpError
from osdp_compile.model import gradient_leaves
from osdp_compile.model.shard_in_place import add_gradient
from osdp_compile.options import Options
from osdp_compile.tracking.session import Session, find, session_for

#: Models that are inside and were not called yet.
_waiting: list[nn.Module] = []


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backwards communicate no gradients: they add up on each rank. Collective.

    ::

        for index, (inputs, targets) in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else osdp_compile.no_sync(model):
                loss_of(compiled(inputs), targets).backward()
        optimizer.step()

    On leaving, the sum is reduced and added to ``parameter.grad``, so outside gradients are always
    what they would be without this context. That reduction is not hidden behind anything: it pays
    where it is left out three times or more. Parameters are gathered as always.

    Whole gradients are there meanwhile, twice where a backward adds to what there is. Under
    ``memory_limit`` the plan must have been made with room for them:
    ``options={"accumulate": True}``.

    After an error inside, what was added up is dropped and nothing is communicated.

    Args:
        model: the model that was compiled, or what ``torch.compile`` returned for it. It may be
            called for the first time inside.

    Raises:
        OsdpError: if the plan has no room for whole gradients.
    """
    root: nn.Module = getattr(model, "_orig_mod", model)
    session = session_for(root)
    if (session is not None and gradient_leaves.is_active(session.reading.key)) or root in _waiting:
        yield  # the outer one reduces
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
            gradient_leaves.end(session.reading.key)
        raise
    finally:
        _waiting[:] = [one for one in _waiting if one is not root]
    session = session_for(root)
    if session is not None:
        _reduce(session, root, gradient_leaves.end(session.reading.key))


def begin_if_waiting(session: Session) -> None:
    """What the first call of a model does that is inside, once it is laid out."""
    for root in _waiting:
        if session_for(root) is session:
            _begin(session, root)


def check_if_waiting(parameters: Iterable[nn.Parameter], options: Options) -> None:
    """Refuse a first call inside with options that leave no room for whole gradients.

    Raises:
        OsdpError
    """
    own = {id(parameter) for parameter in parameters}
    for root in _waiting:
        if any(id(parameter) in own for parameter in root.parameters()):
            _check_room(options)


def _check_room(options: Options) -> None:
    if options.memory_limit_bytes is not None and options.accumulate is not True:
        raise OsdpError(
            "no_sync keeps whole gradients on every rank, and memory_limit leaves no room for "
            "them: add options={'accumulate': True}, or leave no_sync out"
        )


def _begin(session: Session, root: nn.Module) -> None:
    _check_room(session.options)
    trained = [(name, one) for name, one in _own(session, root) if one.requires_grad]
    dtype_of = session.reading.precision.gradient_dtype
    gradient_leaves.begin(
        session.reading.key, [(name, one, dtype_of(one)) for name, one in trained]
    )


def _own(session: Session, root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters in a module that a session laid out, by the names it has for them."""
    found = [(find(parameter), parameter) for parameter in root.parameters()]
    return [(one[0], parameter) for one, parameter in found if one and one[1] is session]


def _reduce(session: Session, root: nn.Module, gradients: dict[str, Tensor]) -> None:
    """Add the mean over ranks of what each has added up to what there is, one after the other."""
    own = _own(session, root)
    group = session.mesh.get_group()
    # A rank may not have come by a parameter that others have.
    there = torch.tensor([name in gradients for name, _ in own], dtype=torch.int32)
    there = there.to(own[0][1].device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
    for (name, parameter), is_there in zip(own, there.tolist(), strict=True):
        if not is_there:
            continue
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        decision = session.plan.decision(name)
        gradient = gradients.pop(name, None)
        if gradient is None:
            dtype = session.reading.precision.gradient_dtype(parameter)
            gradient = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        marks = session.context.cut(decision).marks
        mean = torch.ops.osdp.reduce_grad(gradient, local, name, decision.sharded, *marks)
        add_gradient(parameter, mean)

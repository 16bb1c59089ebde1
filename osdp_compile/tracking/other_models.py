"""Other models of the process: the bytes they hold on a rank, and a model's share of the limit.

One limit covers everything that a rank holds. Bytes counted for the models beside the planned one,
on this rank:

=========================  =================================================================
planned already            parameters, gradients and optimizer state by their plans, and
                           activations saved for a backward that has not run yet
compiled, not yet called   the larger of two figures: the same state if all is sharded, or their
                           parameters now, whole until their first call
=========================  =================================================================

Models that are not compiled with this backend are not counted, nor are other tensors of the user:
a plan does not depend on which objects happen to be alive.

The model shares the rest of the limit with the models not yet called, in proportion to their
parameters. If the model needs more than its share, it gets the least limit that it needs. So the
first model leaves room for the others, also for their gathered weights and activations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from osdp_compile import _torch
from osdp_compile.errors import InfeasibleLimit
from osdp_compile.model.model_parameters import ModelParameter
from osdp_compile.optim.rebind import OptimizerIndex
from osdp_compile.runtime.collectives import Group, backend_of, size_of
from osdp_compile.tracking.memory_watch import watches
from osdp_compile.tracking.session import find
from passes.types.plan import Plan
from passes.types.units import format_bytes


@dataclasses.dataclass(frozen=True)
class OtherModels:
    """Bytes; each field is the maximum over ranks.

    ``watched_bytes``: held by planned models. ``pending_bytes``: the least that models compiled
    and not called yet will hold; ``pending_parameter_bytes``: their parameters, whole.
    ``running_bytes``: the most that one planned model needs in addition while it runs.
    """

    watched_bytes: int = 0
    pending_bytes: int = 0
    pending_parameter_bytes: int = 0
    running_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.watched_bytes + self.pending_bytes

    def share_bytes(self, limit_bytes: int, own_parameter_bytes: int) -> int:
        """The limit to plan under. It includes the bytes that the other models hold."""
        if not self.pending_parameter_bytes:
            return limit_bytes
        left_bytes = max(0, limit_bytes - self.held_bytes)
        all_bytes = own_parameter_bytes + self.pending_parameter_bytes
        return self.held_bytes + left_bytes * own_parameter_bytes // all_bytes


def other_models(
    entries: Sequence[ModelParameter],
    group: Group,
    compiled: Callable[[], Iterable[nn.Module]],
) -> OtherModels:
    """Bytes of the models beside this one: each field the maximum over ranks. Collective.

    ``compiled``: finds the live models that this backend compiles.
    """
    if backend_of(group, "cpu") == "fake":  # tracing only: the ranks are not here
        return OtherModels()
    gc.collect()  # do not count dropped models
    device = entries[0].parameter.device
    seen = {None, *(_storage(entry.parameter) for entry in entries)}
    pending: list[nn.Parameter] = []
    for root in compiled():
        own = list(root.parameters())
        if not any(one.requires_grad for one in own):
            continue  # it is never planned
        for parameter in own:
            storage = _storage(parameter)
            # The Watch of a session counts the parameters of that session.
            if storage in seen or parameter.device.type != device.type or find(parameter):
                continue
            seen.add(storage)
            pending.append(parameter)
    optimizers = OptimizerIndex(pending)
    ranks = size_of(group)
    least_bytes = sum(_least_bytes(one, optimizers, ranks) for one in pending)
    whole_bytes = sum(map(_local_bytes, pending))
    figures = torch.tensor(
        [
            sum(watch.held_bytes for watch in watches()),
            max(whole_bytes, least_bytes),
            whole_bytes,
            max((watch.transient_bytes for watch in watches()), default=0),
        ],
        dtype=torch.int64,
        device=device,
    )
    if group is not None:
        dist.all_reduce(figures, op=dist.ReduceOp.MAX, group=group)
    return OtherModels(*figures.tolist())


def planned_under_share(
    plan: Callable[[int], Plan], others: OtherModels, limit_bytes: int, own_parameter_bytes: int
) -> Plan:
    """The plan under the model's share of the limit, or under the least limit that it needs.

    ``plan``: plans under a limit that includes the bytes of the other models.

    Raises:
        InfeasibleLimit: if the model needs more than the limit.
    """
    share_bytes = others.share_bytes(limit_bytes, own_parameter_bytes)
    try:
        return plan(share_bytes)
    except InfeasibleLimit as error:
        refused = error
    if share_bytes < refused.least_bytes < limit_bytes:
        with contextlib.suppress(InfeasibleLimit):
            return plan(refused.least_bytes)
    try:
        return plan(limit_bytes)  # the error names the limit that was given
    except InfeasibleLimit as error:
        if not others.held_bytes:
            raise
        raise InfeasibleLimit(
            f"{error} {format_bytes(others.held_bytes)} of it are for other models of this "
            "process. A lower memory_limit at their first calls makes them take less, and one "
            "plan covers all models that one compiled function calls.",
            error.least_bytes,
        ) from None


def _storage(tensor: Tensor) -> int | None:
    """The address of a tensor's local storage; None: there is no memory to count."""
    local = _local(tensor)
    if isinstance(local, _torch.tensors.FakeTensor):
        return None
    try:
        return local.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
        return None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _local_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's storage on this rank; for a view, of the whole base."""
    return _local(tensor).untyped_storage().nbytes()


def _training_bytes(parameter: nn.Parameter, optimizers: OptimizerIndex) -> int:
    """Gradient and optimizer state of a trained parameter on this rank."""
    holding = optimizers.holding(parameter)
    if not holding or not parameter.numel():
        return 0
    local = _local(parameter)
    share = local.numel() / parameter.numel()
    state = sum(optimizers.state_bytes(parameter, one) for one in holding)
    return local.numel() * local.element_size() + round(state * share)


def _least_bytes(parameter: nn.Parameter, optimizers: OptimizerIndex, ranks: int) -> int:
    """Parameter, gradient and optimizer state on one rank, sharded over all ranks."""
    own = parameter.numel() * parameter.element_size()
    return -(-(own + _training_bytes(parameter, optimizers)) // ranks)

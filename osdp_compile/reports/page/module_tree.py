"""Module tree: the model's parameters by module, alike modules as one; and the plan's rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from osdp_compile.reports.alike_layers import grouped, joined, ranged
from osdp_compile.reports.page.contents import Module, Row
from osdp_compile.reports.plan_table import decided, shape_text
from passes.types.decision import Moves
from passes.types.plan import ParameterPlan, Plan

#: The key of a decision whose weight stays where it is.
TENSOR_PARALLEL = "tensor_parallel"


def module_tree(plan: Plan, name: str) -> Module:
    """The parameters of a plan as a tree of modules, below a root of this name."""
    tree: dict[str, Any] = {}
    for row in plan.parameters:
        *path, last = row.name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = row
    return _module(name, list(_children(tree)))


def plan_rows(plan: Plan) -> tuple[Row, ...]:
    """The rows of the printed plan table."""
    return tuple(
        Row(
            name=joined([row.name for row in rows]),
            parameters=len(rows),
            shape=shape_text(rows[0].shape),
            decision=decided(rows[0]),
            key=_key(rows[0]),
            size_bytes=sum(map(_bytes, rows)),
            saved_bytes=sum(row.saved_bytes for row in rows),
            reason=ranged([row.reason for row in rows]),
        )
        for rows in grouped(plan.parameters)
    )


def _children(tree: dict[str, Any]) -> Iterator[Module]:
    """The members of a module; neighbours that are numbers and alike are one."""
    made = [
        _parameter(name, one)
        if isinstance(one, ParameterPlan)
        else _module(name, list(_children(one)))
        for name, one in tree.items()
    ]
    for (_, is_number), run in itertools.groupby(
        made, lambda one: (_form(one), one.name.isdigit())
    ):
        members = list(run)
        if is_number and len(members) > 1:
            yield _times(members[0], len(members), _range(members))
        else:
            yield from members


def _range(members: Sequence[Module]) -> str:
    return f"{{{members[0].name}..{members[-1].name}}}"


def _form(module: Module) -> tuple[object, ...]:
    """Equal for modules that differ in their own name only."""
    own = module.shape, module.decision, module.copies, tuple(module.bytes_by_decision.items())
    return (*own, tuple((child.name, _form(child)) for child in module.children))


def _times(module: Module, copies: int, name: str) -> Module:
    """A module that stands for several. Its children stand for theirs."""
    return Module(
        name,
        module.copies * copies,
        module.parameters * copies,
        {key: size * copies for key, size in module.bytes_by_decision.items()},
        module.shape,
        module.decision,
        tuple(_times(child, copies, child.name) for child in module.children),
    )


def _parameter(name: str, row: ParameterPlan) -> Module:
    sizes = {_key(row): _bytes(row)}
    return Module(name, 1, math.prod(row.shape), sizes, shape_text(row.shape), decided(row))


def _module(name: str, children: Sequence[Module]) -> Module:
    return Module(
        name,
        1,
        sum(child.parameters for child in children),
        _sum(child.bytes_by_decision for child in children),
        children=tuple(children),
    )


def _sum(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for key, size_bytes in part.items():
            total[key] = total.get(key, 0) + size_bytes
    return total


def _key(row: ParameterPlan) -> str:
    return TENSOR_PARALLEL if row.moves is Moves.ACTIVATIONS else row.decision.name


def _bytes(row: ParameterPlan) -> int:
    """Bytes of the whole parameter."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    return math.prod(row.shape) * dtype.itemsize

"""Inductor's fusion: its choices, and a pass over its kernels afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import fx

# 2.11.0 to 2.15.0: Inductor's settings, and those of each mode of torch.compile.
from torch._inductor import config as inductor_config

# 2.11.0 to 2.14.1: base classes of Inductor's custom passes.
from torch._inductor import custom_graph_pass

# 2.11.0 to 2.15.0: Inductor's fusion hooks (``InductorChoices.can_fuse_vertical``); the hooks read
# ``name_to_node``, ``ancestors``, ``min_order``, ``is_extern``, ``users``.
from torch._inductor.choices import InductorChoices

# 2.13.0, 2.15.0: ``should_prefer_unfused_addmm`` decides whether a product and a sum become one
# ``addmm``.
from torch._inductor.fx_passes import post_grad

# 2.11.0 to 2.15.0: the nodes of fusion.
from torch._inductor.scheduler import BaseSchedulerNode

# 2.11.0 to 2.15.0: holds Inductor's InductorChoices object.
from torch._inductor.virtualized import V

__all__ = [
    "BaseSchedulerNode",
    "InductorChoices",
    "KernelPass",
    "V",
    "after_fusion",
    "with_choices",
    "with_products_apart",
]

#: Takes and returns Inductor's kernels in their order.
KernelPass = Callable[[list[BaseSchedulerNode]], list[BaseSchedulerNode]]


#: 2.13.0, 2.14.1: Inductor's cache refuses other passes after fusion. 2.11.0 and 2.12.0 lack it and
#: take any function.
_CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


class _AfterFusion(_CustomSchedulerPass):  # type: ignore[misc]
    """A plain function as Inductor's pass over its kernels after fusion.

    ``name``: stands for the function in the keys of Inductor's cache.
    """

    def __init__(self, function: KernelPass, name: str) -> None:
        self.function, self.name = function, name

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return self.function(nodes)

    def uuid(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)  # enough for the cache's key


def after_fusion(function: KernelPass, name: str) -> AbstractContextManager[None]:
    """A context in which a function rewrites the list of Inductor's kernels after fusion.

    ``name``: changes with the function; stands for it in the keys of Inductor's cache.
    """
    # 2.11.0 to 2.14.1: the hook; it takes and returns the kernels in their order.
    context: AbstractContextManager[None] = inductor_config.patch(
        _post_fusion_custom_pass=_AfterFusion(function, name)
    )
    return context


def with_choices(choices: InductorChoices) -> AbstractContextManager[None]:
    """A context in which Inductor uses these choices, on this thread."""
    context: AbstractContextManager[None] = V.set_choices_handler(choices)
    return context


@contextlib.contextmanager
def with_products_apart(apart: Callable[[fx.Node, fx.Node], bool]) -> Iterator[None]:
    """A context in which Inductor adds to a product in an operator of its own if ``apart`` says so.

    ``apart``: of a product and of the sum that reads it, which come in the order of the graph.
    """
    prefers: Any = post_grad.should_prefer_unfused_addmm

    def prefers_apart(match: Any) -> Any:
        total = match.output_node()
        products = [one for one in match.nodes if one is not total]
        return any(apart(product, total) for product in products) or prefers(match)

    post_grad.should_prefer_unfused_addmm = prefers_apart
    try:
        yield
    finally:
        post_grad.should_prefer_unfused_addmm = prefers

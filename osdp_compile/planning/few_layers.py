"""Few layers: trace a model with a long list of alike layers through a few of them.

Tracing takes time for each layer, and one layer says all about another one that is alike. So only
the first and the last layers run while the model is traced. The layers between return what they are
called with. The model's own code calls all of them. This is the trace of a model of few layers,
with the names of the real ones; :func:`passes.capture.fold_layers.stretched` makes the folded step
of all layers from it.

Layers are alike if their modules are (:func:`long_list`), and if the model calls them one after the
other, on nothing but the result of the layer before and on what all layers get (:meth:`FewLayers.
connect`). A number that an attribute gives a layer may differ. It is absent during the trace, so
that no layer can do other work for its number.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from osdp_compile.errors import OsdpError
from osdp_compile.model.mixed_precision import subclass
from passes.capture.fold_layers import FEWEST_LAYERS

#: Number of layers that run at the beginning, and at the end: just enough for folding.
_ENDS = FEWEST_LAYERS // 2
#: Least number of layers of a long list.
_LONG = 12


class LayersDiffer(OsdpError):
    """The model does not call its layers as equal links of one chain."""


@torch.compiler.allow_in_graph
def _before(x: Any, layer: int, args: Any, kwargs: Any) -> Any:
    """Marks the call of a layer that runs."""
    return x


@torch.compiler.allow_in_graph
def _after(x: Any, layer: int) -> Any:
    """Marks the result of a layer that runs."""
    return x


@torch.compiler.allow_in_graph
def _in_place_of(x: Any, layer: int, args: Any, kwargs: Any) -> Any:
    """Marks the call of a layer that does not run."""
    return x


class FewLayers:
    """A model's list of alike layers.

    ``prefix``: the list's name with its dot. ``layers``: all of them, in their order.
    ``numbers``: (path inside a layer, attribute) of each attribute that numbers the layers.
    """

    def __init__(
        self, prefix: str, layers: Sequence[nn.Module], numbers: Sequence[tuple[str, str]]
    ) -> None:
        self.prefix, self.layers, self.numbers = prefix, tuple(layers), tuple(numbers)

    def runs(self, layer: int) -> bool:
        """Whether a layer runs in the trace."""
        return not _ENDS <= layer < len(self.layers) - _ENDS

    @contextmanager
    def only(self) -> Iterator[None]:
        """Context: the layers between the first and the last ones return what they get."""
        classes = [type(layer) for layer in self.layers]
        places = [
            (layer.get_submodule(path), attribute)
            for number, layer in enumerate(self.layers)
            if self.runs(number)
            for path, attribute in self.numbers
        ]
        values = [vars(module)[attribute] for module, attribute in places]
        try:
            for number, layer in enumerate(self.layers):
                forward = _marked if self.runs(number) else _passed
                subclass(layer, {"forward": forward(type(layer), number)})
            for module, attribute in places:
                del vars(module)[attribute]
            yield
        finally:
            for layer, cls in zip(self.layers, classes, strict=True):
                layer.__class__ = cls
            for (module, attribute), value in zip(places, values, strict=True):
                vars(module)[attribute] = value

    def connect(self, gm: fx.GraphModule) -> None:
        """Check a graph of Dynamo that was traced in :meth:`only`, and erase its marks.

        Raises:
            LayersDiffer: naming the difference.
        """
        calls = [node for node in gm.graph.nodes if node.target in (_before, _in_place_of)]
        results = {node.args[1]: node for node in gm.graph.nodes if node.target is _after}
        difference = _difference(calls, results, len(self.layers))
        if difference is not None:
            raise LayersDiffer(difference)
        for node in (*calls, *results.values()):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        gm.recompile()


def _difference(
    calls: Sequence[fx.Node], results: Mapping[Any, fx.Node], layers: int
) -> str | None:
    """Why the calls of the layers are not equal links of one chain; None: they are."""
    if [node.args[1] for node in calls] != list(range(layers)):
        return "the layers are not called once each, in their order"
    if any(node.args[2:] != calls[0].args[2:] for node in calls):
        return "the layers are called with different arguments"
    ends = [results.get(number, call) for number, call in enumerate(calls)]
    for end, call in zip(ends, calls[1:], strict=False):
        if call.args[0] is not end or len(end.users) > 1:
            return "something stands between two layers"
    if len({_kind(node) for node in (*calls, *ends)}) > 1:
        return "the layers' results are not like their inputs"
    if any(_escapes(calls[number], result) for number, result in results.items()):
        return "more than the result of a layer is read outside of it"
    return None


def _marked(cls: type[nn.Module], number: int) -> Any:
    """The forward of a layer that runs."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        x = _before(x, number, args, kwargs)
        return _after(cls.forward(self, x, *args, **kwargs), number)

    return forward


def _passed(cls: type[nn.Module], number: int) -> Any:
    """The forward of a layer that does not run."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        return _in_place_of(x, number, args, kwargs)

    return forward


def _escapes(call: fx.Node, result: fx.Node) -> bool:
    """Whether a node between two marks of a layer is read outside of them."""
    inside = {result: None}
    node = call
    while node is not result:
        inside[node] = None
        node = node.next
    return any(user not in inside for one in inside if one is not result for user in one.users)


def _kind(mark: fx.Node) -> tuple[object, ...]:
    """What the tensors between layers have in common."""
    value = mark.meta["example_value"]
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (mark,)


def long_list(model: nn.Module) -> FewLayers | None:
    """The list of modules with the most parameters, if it is long and its modules are alike.

    Its modules have the same classes, tensors (by shape and type) and other attributes, no hooks
    for calls, and no module or parameter that occurs anywhere else.
    """
    lists = [
        (name, tuple(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    if not lists:
        return None
    name, layers = max(lists, key=lambda one: sum(map(_parameter_bytes, one[1])))
    if len(layers) < _LONG or not _are_on_their_own(layers, model) or _have_hooks(layers):
        return None
    numbers = _numbers(layers)
    return None if numbers is None else FewLayers(f"{name}." if name else "", layers, numbers)


def _parameter_bytes(module: nn.Module) -> int:
    return sum(one.nbytes for one in module.parameters())


def _are_on_their_own(layers: Sequence[nn.Module], model: nn.Module) -> bool:
    """Whether each module and parameter of the layers has one place in the model."""
    places = Counter(id(one) for _, one in model.named_modules(remove_duplicate=False))
    places.update(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return all(
        places[id(one)] == 1
        for layer in layers
        for module in layer.modules()
        for one in (module, *module.parameters(recurse=False))
    )


def _have_hooks(layers: Sequence[nn.Module]) -> bool:
    """Whether calls of the layers run hooks."""
    return any(
        value and name.endswith("_hooks") and ("forward" in name or "backward" in name)
        for layer in layers
        for module in layer.modules()
        for name, value in vars(module).items()
    )


def _numbers(layers: Sequence[nn.Module]) -> list[tuple[str, str]] | None:
    """(path, attribute) of each attribute that numbers the layers; None: the layers differ."""
    found = [_description(layer) for layer in layers]
    first = found[0]
    if any(one.keys() != first.keys() for one in found):
        return None
    numbers = []
    for key, value in first.items():
        values = [one[key] for one in found]
        if all(one == value for one in values):
            continue
        path, attribute, (kind, start) = *key, value
        if kind is not int or values != [(int, start + n) for n in range(len(layers))]:
            return None
        numbers.append((path, attribute))
    return numbers


def _description(layer: nn.Module) -> dict[tuple[str, str], tuple[Any, Any]]:
    """By (path inside the layer, attribute), the description of each attribute."""
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    for path, module in layer.named_modules():
        found[path, ""] = (type, type(module))
        for name, value in vars(module).items():
            if name != "_modules" and not name.endswith("_hooks"):
                found[path, name] = _described(value)
    return found


def _described(value: Any) -> tuple[Any, Any]:
    """A description of an attribute; equal for attributes of the same effect.

    Plain values count by value, tensors by shape and type, and other objects by identity.
    """
    if isinstance(value, Tensor):
        stride = value.stride() if value.layout is torch.strided else None
        return type(value), (value.shape, stride, value.dtype, value.device, value.requires_grad)
    if isinstance(value, Mapping):
        return type(value), tuple((name, _described(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_described, value))
    if isinstance(value, str | bool | int | float | set | frozenset | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, functools.partial):
        return type(value), (value.func, *map(_described, (value.args, value.keywords)))
    return object, id(value)

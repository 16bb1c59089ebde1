"""Inductor's real output code for small models' training steps, and facts read from it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering

from osdp_compile import Plan, _torch
from osdp_compile.engine.backend import compile_graph
from osdp_compile.options import CheckedOptions
from osdp_compile.trace import fake_world
from passes.graph.fx_utils import is_collective
from tests.training import SLOW


@dataclasses.dataclass
class Buffer:
    """A buffer of Inductor's: its name in the code, and its bytes.

    ``nodes``: the name of the node whose result it is; else of all nodes that it is computed from.
    """

    name: str
    size_bytes: int
    nodes: set[str]


@dataclasses.dataclass
class Kernel:
    """A kernel after fusion, or an operator that Inductor calls.

    ``origins``: the names of the graph's nodes that it computes.
    """

    is_operator: bool
    buffers: list[Buffer]
    origins: set[str]


@dataclasses.dataclass
class Compiled:
    """One lowered graph with its costs, in its final order, and Inductor's code for it."""

    phase: str
    graph: fx.Graph
    kernels: list[Kernel]
    code: str

    def written(self, writer: dict[str, str]) -> dict[str, tuple[int, int]]:
        """By node: the number of the kernel that writes its buffer, and the buffer's bytes.

        ``writer``: for each node, in graph order, the node that writes its result. Of several
        nodes a buffer is the last one's.
        """
        found = {}
        for number, kernel in enumerate(self.kernels):
            for buffer in kernel.buffers:
                names = [name for name in writer if name in buffer.nodes]
                if names and not kernel.is_operator and self._is_in_code(buffer):
                    found[writer[names[-1]]] = (number, buffer.size_bytes)
        return found

    def operators(self) -> dict[str, int]:
        """By node that Inductor calls as an operator: the number of the call.

        A collective's call is left out: its wait counts as a later write of its result.
        """
        started = {node.name for node in self.graph.nodes if is_collective(node)}
        return {
            name: number
            for number, kernel in enumerate(self.kernels)
            if kernel.is_operator
            for name in kernel.origins - started
        }

    def functions(self) -> list[int]:
        """For every kernel the number of its C++ function: operators end functions."""
        found, number = [], 0
        for kernel in self.kernels:
            number += kernel.is_operator
            found.append(number)
        return found

    def peak_bytes(self, inputs: dict[str, int]) -> int:
        """The most bytes that the code holds at once. ``inputs``: bytes of inputs that it frees."""
        size = {b.name: b.size_bytes for kernel in self.kernels for b in kernel.buffers}
        results = self._results()
        named = {name for names in results.values() for name in names}
        alive = dict(inputs)
        peak_bytes = sum(alive.values())
        for statement, reuses in self._statements():
            if freed := re.fullmatch(r"del (\w+)", statement):
                alive.pop(freed[1], None)
            elif reuses and (
                moved := re.match(r"(\w+) = (?:reinterpret_tensor\()?(\w+)", statement)
            ):
                alive[moved[1]] = alive.pop(moved[2], 0)
            elif made := re.match(r"(buf\d+) = (?!reinterpret_tensor)", statement):
                for name in results.get(made[1], [] if made[1] in named else [made[1]]):
                    assert name not in alive, f"made twice: {statement}"
                    alive[name] = size[name]
            peak_bytes = max(peak_bytes, sum(alive.values()))
        return peak_bytes

    def _results(self) -> dict[str, list[str]]:
        """The buffers that are results of a call, by the name that the code gives the call first.

        The code of some versions of torch names the results in later statements. The call has
        allocated them.
        """
        found: dict[str, list[str]] = {}
        for statement, reuses in self._statements():
            named = re.fullmatch(r"(buf\d+) = (buf\d+)(?:\[\d+\])?", statement)
            if named and not reuses:
                found.setdefault(named[2], []).append(named[1])
        return found

    def _statements(self) -> Iterator[tuple[str, bool]]:
        """The statements of the code's call, each with True if it gives a buffer a new name."""
        for line in self._body().splitlines():
            text, _, comment = line.partition("#")
            if text.strip().startswith("return"):
                return
            for number, statement in enumerate(text.split(";")):
                yield statement.strip(), number == 0 and "reuse" in comment

    def _body(self) -> str:
        return self.code[self.code.index("args.clear()") :]

    def _is_in_code(self, buffer: Buffer) -> bool:
        return re.search(rf"\b{buffer.name}\b", self._body()) is not None


class _Generated(Exception):
    """Ends a compilation when its code is there, before the C++ compiler: no kernel is to run."""


def code_of(compiles: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """Inductor's code for the one graph that ``compiles(*args, **kwargs)`` compiles."""
    codes: list[str] = []

    def save(code: str) -> None:
        codes.append(code)
        raise _Generated

    with (
        config.patch(fx_graph_cache=False),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(save)),
    ):
        try:
            compiles(*args, **kwargs)
        except Exception:  # Inductor and Dynamo raise it as one of their own
            if not codes:
                raise
    (code,) = codes
    return code


def compiled_step(
    model: nn.Module, *batch: torch.Tensor, given: Plan | None = None
) -> list[Compiled]:
    """Inductor's code for the forward and the backward of a model on two ranks.

    ``given``: the plan; None: all parameters are sharded.
    """
    found: list[Compiled] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kernels: list[Kernel] = []
        order = config._post_fusion_custom_pass
        assert order is not None  # the backend's own

        def keep(fused: list[Any]) -> list[Any]:
            scheduled = order(fused)
            kernels.extend(map(_kernel, scheduled))
            return scheduled

        with config.patch(_post_fusion_custom_pass=keep):
            code = code_of(_torch.inductor.compile_fx_inner, copy.deepcopy(gm), inputs, **kwargs)
        phase = "backward" if kwargs.get("is_backward") else "forward"
        found.append(Compiled(phase, gm.graph, kernels, code))
        return make_boxed_func(gm.forward)  # the fake ranks' collectives give no values

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        sharded = Plan.uniform(model.named_parameters(), "shard_regather", world_size=2)
        plan = sharded if given is None else given
        options = CheckedOptions.parse({"hardware": SLOW, "plan": plan})
        return compile_graph(gm, inputs, options, inner)

    torch.compiler.reset()
    with fake_world(2):
        torch.compile(model, backend=backend, dynamic=False)(*batch).backward()
    torch.compiler.reset()
    return found


def _kernel(scheduled: Any) -> Kernel:
    """A node of Inductor's scheduler, as data."""
    origins = {o.name for one in scheduled.get_nodes() if one.node for o in one.node.origins}
    buffers = []
    for output in scheduled.get_outputs():
        buffer, origin = output.node, output.node.get_origin_node()
        nodes = {one.name for one in ([origin] if origin is not None else buffer.origins)}
        buffers.append(Buffer(output.get_name(), _size_bytes(buffer), nodes))
    return Kernel(scheduled.is_extern(), buffers, origins)


def _size_bytes(buffer: Any) -> int:
    """Bytes of a buffer; 0 for a tuple of them and for one that is written in place."""
    try:
        return int(buffer.get_numel()) * buffer.get_dtype().itemsize
    except (AttributeError, NotImplementedError):
        return 0

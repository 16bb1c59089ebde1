"""Reading a parameter: the whole tensor inside a forward, elsewhere the parameter as it lies."""

from __future__ import annotations

import copy
import io
import threading
import warnings
from contextlib import redirect_stdout

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import osdp_compile
from osdp_compile import OsdpError
from osdp_compile.runtime.inside_forward import is_inside_forward
from tests.chosen import thorough
from tests.training import Recipe, normal_batch, plan_options, whole


class Says(nn.Module):
    """Says whether its forward and another method run inside a forward."""

    def forward(self, x=None):
        return is_inside_forward()

    def encode(self):
        return is_inside_forward()

    def encode_inside(self):
        return self()


def test_a_call_of_a_module_is_a_forward():
    says = Says()
    assert says() and says.forward() and says.encode_inside()
    assert nn.Sequential(says)(None)
    assert not is_inside_forward() and not says.encode()


def test_a_call_of_a_compiled_function_is_a_forward():
    said = []

    @torch.compiler.disable
    def say():
        said.append(is_inside_forward())

    def step(x):
        say()
        return x + 1

    say()
    step(torch.ones(2))
    torch.compile(step, backend="eager")(torch.ones(2))
    assert said == [False, False, True]


class SaysInBackward(torch.autograd.Function):
    said: bool | None = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        SaysInBackward.said = is_inside_forward()
        return grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_backward_thread_computes_again_is_a_forward(use_reentrant):
    said, hooked = [], []

    def block(x):
        said.append(is_inside_forward())
        return SaysInBackward.apply(x.sin())

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: hooked.append(is_inside_forward()))
    loss = checkpoint(block, x, use_reentrant=use_reentrant).sum()
    thread = threading.Thread(target=loss.backward)  # of its own, as on a GPU
    thread.start()
    thread.join()
    assert said == [True, True] and hooked == [False]
    assert SaysInBackward.said


class SaysWhenComputed(nn.Module):
    """A parametrization, which is a module that is called whenever the weight is read."""

    said: bool | None = None

    def forward(self, weight):
        type(self).said = is_inside_forward()
        return weight


def test_a_parametrization_is_inside_where_its_weight_is_read_inside():
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", SaysWhenComputed())
    assert linear.weight is not None and SaysWhenComputed.said is False
    linear(torch.ones(1, 2))
    assert SaysWhenComputed.said is True
    linear.forward(torch.ones(1, 2))
    assert SaysWhenComputed.said is True


class Model(nn.Module):
    """Parameters of a linear, in a list, behind a parametrization, of a layer in eager mode and
    of a recurrent one, whose frames Dynamo skips; and methods beside ``forward``."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.eager = nn.Linear(8, 8)
        self.recurrent = nn.LSTM(8, 8)
        self.down = nn.Linear(8, 4)

    @torch.compiler.disable
    def in_eager_mode(self, x):
        return torch.tanh(self.eager(x))

    def encode(self, x):
        return F.linear(x, self.up.weight, self.up.bias)

    def forward(self, x):
        x = self.normed(torch.tanh(self.encode(x)) @ self.listed[0])
        return self.down(self.in_eager_mode(x))


def trained_once(rank, world_size, decision):
    """A model after its first step, what ``torch.compile`` returned for it, and a plain copy."""
    model = Model()
    reference = copy.deepcopy(model)
    options = plan_options(model, decision, Recipe(), world_size)
    compiled = torch.compile(model, backend="osdp", options=options)
    compiled(normal_batch(0, 0, rank)).square().mean().backward()
    return model, compiled, reference


def read_on_one_rank(rank, world_size, decision):
    model, compiled, _ = trained_once(rank, world_size, decision)
    parameters = dict(model.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient = model.up.weight.grad
    if rank == 0:  # where reading is a collective, the others never answer
        with redirect_stdout(io.StringIO()) as out:
            print(model.up.weight, model.listed, model, model.normed.weight)
        assert "tensor" in out.getvalue()
        assert hasattr(model.down, "weight") and "weight" in dir(model.down)
    compiled(normal_batch(1, 0, rank)).square().mean().backward()
    kind = nn.Parameter if decision == "replicate" else DTensor
    assert isinstance(model.up.weight, kind) and isinstance(model.up.weight, nn.Parameter)
    assert model.up.weight is parameters["up.weight"] and model.up.weight.is_leaf
    assert model.listed[0] is parameters["listed.0"]
    assert gradient is not None and isinstance(gradient, DTensor) == (kind is DTensor)
    torch.optim.SGD([model.up.weight, *model.down.parameters()], lr=0.1).step()
    # What every rank computes of the weights alone needs no average.
    if decision == "replicate":
        (model.down.weight.norm() + model.encode(torch.ones(2, 8)).sum()).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.encode(normal_batch(0, 0, rank)).sum().backward()
        with pytest.raises(OsdpError, match=r"parameter 'up\.weight' differs between ranks"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    if decision != "replicate":
        with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
            model.encode(normal_batch(0, 0, rank))


@pytest.mark.parametrize("decision", ["shard_regather", *thorough("replicate")])
def test_one_rank_alone_reads_the_parameter_itself(two_ranks, decision):
    two_ranks.run(read_on_one_rank, decision, timeout_seconds=150)


class ReadsInBackward(torch.autograd.Function):
    """The product with a module's weight, which the backward reads from the module."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.module.weight, None


def in_backward(model, x):
    class Product(nn.Module):
        def forward(self, x):
            return ReadsInBackward.apply(x, model.up)

    return Product()(x)


def compiled(function, model):
    """Compiled with the model's backend."""
    return torch.compile(
        function, backend="eager" if osdp_compile.plan_of(model) is None else "osdp"
    )


def loss_with_a_weight(model, x):
    return model.up(x) + F.linear(x, model.up.weight).square() + 0.1 * model.down.weight.norm()


#: Ways to run a model, or a part of it, outside of a compiled graph.
WAYS = {
    "call": lambda model, x: model(x),
    "forward": lambda model, x: model.forward(x),
    "checkpoint": lambda model, x: checkpoint(model.encode, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model.encode, x, use_reentrant=True),
    "skipped": lambda model, x: model.recurrent(x)[0],
    "compiled method": lambda model, x: compiled(model.encode, model)(x),
    "compiled loss": lambda model, x: compiled(loss_with_a_weight, model)(model, x),
    "functional": lambda model, x: torch.func.functional_call(
        model, dict(model.named_parameters()), x
    ),
    "backward": in_backward,
}


def run_eagerly(rank, world_size, decision):
    """The ways that differ from a plain model on all ranks' batches: outputs, gradients."""
    model, _, reference = trained_once(rank, world_size, decision)
    differ = []
    for name, way in WAYS.items():
        model.zero_grad()
        reference.zero_grad()
        batches = [normal_batch(1, 0, other).requires_grad_() for other in range(world_size)]
        for other, batch in enumerate(batches):
            wanted = way(reference, batch)
            (wanted.square().mean() / world_size).backward()
            if other == rank:
                mine = batch.detach().clone().requires_grad_()
                got = way(model, mine)
                got.square().mean().backward()
                torch.testing.assert_close(got, wanted)
                torch.testing.assert_close(mine.grad / world_size, batch.grad)
        for (parameter, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if (p.grad is None) != (q.grad is None):
                differ.append((name, parameter, p.grad is None))
            elif p.grad is not None and not torch.allclose(whole(p.grad), q.grad, atol=1e-6):
                differ.append((name, parameter))
    model.eval()
    with torch.no_grad():
        batch = normal_batch(2, 0, rank)
        torch.testing.assert_close(model(batch), reference.eval()(batch))
    return differ


@pytest.mark.parametrize("decision", ["shard_regather", *thorough("replicate")])
def test_eager_code_computes_with_whole_tensors(two_ranks, decision):
    assert two_ranks.run(run_eagerly, decision, timeout_seconds=150) == [[], []]

"""Steps are traced with a GPU's operators on any machine, and planned with them."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import osdp_compile
from examples.gpt import GPT, GPTConfig
from osdp_compile.gpu_operators.tracing import attentions
from osdp_compile.planning import traced_step
from osdp_compile.planning.offline import offline_step
from osdp_compile.planning.traced_step import TracedStep, predicted, trace
from passes.graph.captured import Captured
from passes.graph.metadata import PARAMETER
from passes.types.decision import Decision
from passes.types.hardware_presets import preset

pytestmark = pytest.mark.usefixtures("short_search")

BF16 = torch.bfloat16
H100, A100 = preset("h100-sxm"), preset("a100-80gb")
CUDNN = "_scaled_dot_product_cudnn_attention"
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"
RANKS = {"ranks": 8}


def gpt(dtype: torch.dtype = BF16, layers: int = 1, **config: float) -> tuple[nn.Module, tuple]:
    sizes = GPTConfig(vocab=64, layers=layers, width=128, heads=2, context=32, **config)
    with torch.device("meta"):
        model = GPT(sizes).to(dtype)
    tokens = torch.zeros(2, 33, dtype=torch.long)
    return model, (tokens[:, :-1], tokens[:, 1:])


def llama(layers: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=128,
        intermediate_size=160,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=128,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(BF16).train()
    tokens = torch.zeros(2, 32, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}


class Attending(nn.Module):
    """One attention and a loss; x: [2, 32, 64]. ``how``: options of the attention."""

    def __init__(self, mask: str = "", **how: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.how, self.mask = how, mask

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 1, 64).permute(2, 0, 3, 1, 4)
        mask = None
        if self.mask:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            if self.mask == "three dimensions":
                mask = mask[None].expand(1, length, length)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.how)
        return self.out(y.transpose(1, 2).reshape(batch, length, 64)).float().square().mean()


def attention_of(step: TracedStep) -> tuple[list[str], list[str]]:
    """The attention operators of the forward and of the backward."""
    captured: Captured = step.captured
    return attentions(captured.forward.graph), attentions(captured.backward.graph)


def both(name: str) -> tuple[list[str], list[str]]:
    return [name], [f"{name}_backward"]


def test_a_gpt_has_the_attention_of_its_gpu():
    model, args = gpt()
    for hardware, wanted in ((H100, CUDNN), (A100, FLASH), (None, OF_CPU)):
        step = trace(model, args, hardware=hardware)
        assert attention_of(step) == both(wanted)
        assert wanted in step.operators
    model, args = gpt(torch.float32)
    assert attention_of(trace(model, args, hardware=H100)) == both(EFFICIENT)


@pytest.mark.thorough
def test_a_llama_has_the_attention_of_its_gpu():
    model, kwargs = llama()
    step = trace(model, (), kwargs, hardware=H100)
    assert attention_of(step) == both(CUDNN)


HOW = {
    "causal": (Attending(is_causal=True), CUDNN),
    "with a mask": (Attending("two dimensions"), CUDNN),
    "with a mask of three dimensions": (Attending("three dimensions"), EFFICIENT),
    "with dropout of sixteenths": (Attending(dropout_p=0.125), CUDNN),
    "with dropout": (Attending(dropout_p=0.1), FLASH),
}


@pytest.mark.parametrize("how", HOW)
def test_masks_and_dropout_decide(how):
    model, wanted = HOW[how]
    step = trace(model.to(BF16), (X.to(BF16),), hardware=H100)
    assert attention_of(step) == both(wanted)


class ByHand(nn.Module):
    """An attention of products and a softmax; x: [2, 32, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows = self.qkv(x).view(batch, length, 3, 4, 16).unbind(2)
        q, k, v = (one.transpose(1, 2) for one in rows)
        scores = torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(-1)
        return (scores @ v).float().square().mean()


def test_inductor_fuses_an_attention_that_is_written_out_as_on_the_gpu():
    """In float32 it does not, where products may not use TF32; on a CPU it does."""
    x = torch.zeros(2, 32, 64)
    assert attention_of(trace(ByHand().to(BF16), (x.to(BF16),), hardware=H100)) == both(CUDNN)
    assert attention_of(trace(ByHand(), (x,), hardware=H100)) == ([], [])
    assert attention_of(trace(ByHand(), (x,))) == both(OF_CPU)
    torch.set_float32_matmul_precision("high")
    try:
        assert attention_of(trace(ByHand(), (x,), hardware=H100)) == both(EFFICIENT)
    finally:
        torch.set_float32_matmul_precision("highest")


def saved_bytes(step: TracedStep) -> int:
    """Bytes that the forward of a step saves, without parameters."""
    placeholders = step.captured.backward.graph.find_nodes(op="placeholder")
    values = [one.meta["val"] for one in placeholders if PARAMETER.get(one) is None]
    tensors = [one for one in values if isinstance(one, Tensor)]
    return sum(one.numel() * one.element_size() for one in tensors)


def test_a_float32_attention_saves_what_the_gpus_kernel_saves():
    """The memory-efficient kernel keeps a multiple of 32 rows, the CPU's as many as there are."""
    x = torch.zeros(2, 33, 64)
    on_gpu, on_cpu = (
        trace(Attending(is_causal=True), (x,), hardware=hardware) for hardware in (H100, None)
    )
    rows = {
        node.meta["val"].shape
        for node in on_gpu.captured.backward.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], Tensor) and node.meta["val"].dim() == 3
    }
    assert torch.Size([2, 1, 64]) in rows
    assert saved_bytes(on_gpu) > saved_bytes(on_cpu)


class Normed(nn.Module):
    """A layer norm between two linears; x: [4, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).exp()).float().square().mean()


def test_statistics_of_a_layer_norm_have_the_type_of_its_computation():
    x = torch.zeros(4, 64, dtype=BF16)
    for hardware, wanted in ((H100, torch.float32), (None, BF16)):
        step = trace(Normed().to(BF16), (x,), hardware=hardware)
        saved = [
            one.meta["val"] for one in step.captured.backward.graph.find_nodes(op="placeholder")
        ]
        statistics = {one.dtype for one in saved if one.dim() == 2 and one.shape[-1] == 1}
        assert statistics == {wanted}


class Layer(nn.Module):
    """A layer norm and an attention; x: [2, 32, 64]. ``casts``: it enters autocast for GPUs."""

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), Attending(is_causal=True)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        if not self.casts:
            return self.inner(self.norm(x))
        with torch.autocast("cuda", BF16):
            return self.inner(self.norm(x))


X = torch.zeros(2, 32, 64)


def test_a_model_that_enters_autocast_for_gpus_is_cast():
    step = trace(Layer(casts=True), (X,), hardware=H100)
    assert attention_of(step) == both(CUDNN)
    products = [
        node.meta["val"].dtype
        for node in step.captured.forward.graph.nodes
        if "mm" in str(node.target)
    ]
    assert products and set(products) == {BF16}


def test_autocast_around_the_plan_is_the_gpus():
    """On a GPU, a layer norm gives float32 under autocast; on a CPU, what it gets."""
    x = torch.zeros(2, 64)
    for hardware, wanted in ((H100, torch.float32), (None, BF16)):
        with torch.autocast("cpu", BF16):
            step = trace(Normed(), (x,), hardware=hardware)
        nodes = step.captured.forward.graph.nodes
        assert {n.meta["val"].dtype for n in nodes if "exp.default" in str(n.target)} == {wanted}


def test_all_is_as_before():
    model, args = gpt(torch.float32)
    with torch.device("cpu"):
        mine = GPT(dataclasses.replace(model.config))
    before = torch.ops.aten.scaled_dot_product_attention.default.py_kernels.copy()
    loss = mine(*args)
    trace(model, args, hardware=H100)
    with pytest.raises(ZeroDivisionError):
        trace(Broken(), (torch.zeros(2, 4),), hardware=H100)
    assert torch.ops.aten.scaled_dot_product_attention.default.py_kernels == before
    assert torch.equal(mine(*args), loss)
    assert attention_of(trace(model, args)) == both(OF_CPU)


class Broken(nn.Module):
    """A model whose own code fails."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 // 0)


@pytest.mark.thorough
def test_few_layers_and_all_of_them_have_the_same_operators():
    model, args = gpt(layers=14)
    with mock.patch.object(traced_step, "_MOST_NODES", 100):
        few = trace(model, args, hardware=H100)
        with mock.patch.object(traced_step, "long_list", return_value=None):
            full = trace(model, args, hardware=H100)
        assert few.few is not None and full.few is None
        assert few.folded.operators == full.folded.operators
        assert CUDNN in few.operators and few.operators == full.operators
        assert attention_of(few) == both(CUDNN)  # the whole step, which is traced later
        plan = few.uniform(Decision.SHARD_REGATHER, RANKS, H100)
        assert plan == full.uniform(Decision.SHARD_REGATHER, RANKS, H100)


class Breaking(nn.Module):
    """Two attentions with a graph break between them; x: [2, 32, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attending(is_causal=True), Attending(is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.first(x)
        torch._dynamo.graph_break()
        return loss + self.second(x)


def test_all_frames_of_a_step_have_them():
    step = trace(Breaking().to(BF16), (X.to(BF16),), hardware=H100)
    assert step.captured.is_joined
    assert attention_of(step) == both(CUDNN)


def test_the_predicted_peak_is_that_of_the_gpus_operators():
    """In bf16, the GPU keeps statistics of layer norms in float32, and states of random numbers."""
    peaks = []
    for traced_for in (H100, None):
        step = trace(Layer().to(BF16), (X.to(BF16),), hardware=traced_for)
        uniform = step.uniform(Decision.SHARD_REGATHER, RANKS, H100)
        peaks.append(predicted(uniform).peak_bytes)
    assert peaks[1] < peaks[0] < 1.05 * peaks[1]


@pytest.mark.thorough
def test_the_plan_of_a_cpus_trace_is_for_the_gpus_step():
    """Plans of before, and of a torch that traced otherwise."""
    model, args = gpt()
    on_cpu, on_gpu = trace(model, args), trace(model, args, hardware=H100)
    peak_bytes = predicted(on_cpu.uniform(Decision.SHARD_REGATHER, RANKS, H100)).peak_bytes
    least_bytes = on_cpu.least_bytes(RANKS, H100)
    plan = on_cpu.plan(RANKS, H100, (peak_bytes + least_bytes) // 2)
    own = on_gpu.priced(plan, RANKS, H100)
    assert own.peak_bytes == pytest.approx(predicted(plan).peak_bytes, rel=0.05)
    if plan.recompute:
        assert own.recomputed_bytes > 0


def test_planning_without_the_machine_plans_for_the_gpu():
    model, x = Layer().to(BF16), X.to(BF16)
    given = {"world_size": 8, "hardware": "h100-sxm"}
    step = offline_step(model, (x,), **given)
    assert attention_of(step.step) == both(CUDNN)
    assert step.plan() == osdp_compile.plan(model, (x,), **given)
    assert "compute capability 9.0" in step.step.operators


def test_a_model_of_its_own_device_is_said():
    assert trace(nn.Linear(4, 4), (torch.zeros(2, 4),)).operators == (
        "Traced with the operators of cpu."
    )

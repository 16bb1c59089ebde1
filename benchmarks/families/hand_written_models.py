"""Families written by hand: models of kinds that no package has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.families.small_parts import (
    CLASSES,
    VOCABULARY,
    WIDTH,
    layers,
    scored,
    sequences,
    vectors,
)
from benchmarks.families.trial import (
    STEPS,
    Family,
    Step,
    Trial,
    Wrap,
    adamw,
    clipped,
    pictures,
    seeded,
)


def _mlp() -> Trial:
    return Trial(layers(WIDTH, 256, 256, CLASSES), vectors, scored)


def _convolutions() -> Trial:
    made: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        convolution = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        made += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*made, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))
    return Trial(model, pictures(8, 16, CLASSES), scored)


class _UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last = nn.Conv2d(64, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = F.relu(self.first(images))
        up = F.relu(self.up(F.relu(self.down(first))))
        pixels: Tensor = self.last(torch.cat([first, up], dim=1))
        return pixels


def _unet() -> Trial:
    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        images, _ = pictures(2, 16, CLASSES)(step, rank)
        return images, images.mean(1).mul(2).long().clamp(0, CLASSES - 1)

    return Trial(_UNet(), batch, lambda called, b: F.cross_entropy(called(b[0]), b[1]))


class _Recurrent(nn.Module):
    """A language model on an LSTM or a GRU, which Dynamo leaves to eager mode."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(self.words(tokens))[0])
        return logits


def _lstm() -> Trial:
    return Trial(_Recurrent(nn.LSTM), sequences, scored)


def _lstm_allowed() -> Trial:
    """With the setting that the refusal of the plain one names."""
    torch._dynamo.config.allow_rnn = True
    return _lstm()


def _gru() -> Trial:
    return Trial(_Recurrent(nn.GRU), sequences, scored)


class _DLRM(nn.Module):
    """Embedding bags, dense features, pairwise dot products, a tower."""

    def __init__(self, tables: int = 3, rows: int = 1000, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width) for _ in range(tables))
        self.bottom = layers(13, 64, width)
        pairs = tables * (tables + 1) // 2
        self.top = layers(width + pairs, 64, 1)
        self.register_buffer("upper", torch.triu_indices(tables + 1, tables + 1, 1))
        self.upper: Tensor

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        features = [bottom, *(table(ids[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        products = products[:, self.upper[0], self.upper[1]]
        clicks: Tensor = self.top(torch.cat([bottom, products], dim=1)).squeeze(1)
        return clicks


def _dlrm() -> Trial:
    def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = seeded(step, rank)
        dense = torch.randn(16, 13, generator=generator)
        ids = torch.randint(0, 1000, (16, 3, 4), generator=generator)
        return dense, ids, torch.randint(0, 2, (16,), generator=generator).float()

    def loss(called: Any, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(called(*batch[:2]), batch[2])

    return Trial(_DLRM(), batch, loss)


class _TwoModels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = layers(16, 256, 256, WIDTH)
        self.critic = layers(WIDTH, 256, 256, 1)


class _Gan(Trial):
    """Two models with an optimizer each, wrapped apart; the critic is called three times a step."""

    penalty = 0.0

    def train(self, wrap: Wrap, rank: int, steps: int = STEPS) -> Iterator[Step]:
        model = self.model
        assert isinstance(model, _TwoModels)
        generator, critic = wrap(model.generator), wrap(model.critic)
        optimizers = [adamw(m.parameters()) for m in (model.generator, model.critic)]
        for step in range(steps):
            real, noise = self.batch(step, rank)
            fake = generator(noise).detach()
            score = F.softplus(critic(fake)).mean() + F.softplus(-critic(real)).mean()
            if self.penalty:
                score = score + self.penalty * _gradient_penalty(critic, real, fake)
            score.backward()
            norm = clipped(model.critic)
            optimizers[1].step()
            optimizers[1].zero_grad()
            deceived = F.softplus(-critic(generator(noise))).mean()
            deceived.backward()
            norm += clipped(model.generator)
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield Step(score.item() + deceived.item(), norm)


class _GanWithPenalty(_Gan):
    penalty = 1.0


def _gradient_penalty(critic: Any, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP: a backward through a backward."""
    between = (0.5 * real + 0.5 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def _gan_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = seeded(step, rank)
    real = torch.randn(16, WIDTH, generator=generator)
    return real, torch.randn(16, 16, generator=generator)


def _gan() -> Trial:
    return _Gan(_TwoModels(), _gan_batch, scored, unused=False)


def _gan_with_penalty() -> Trial:
    return _GanWithPenalty(_TwoModels(), _gan_batch, scored, unused=False)


class _Scale(torch.autograd.Function):
    """Identity whose backward halves the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight * 0.5, (grad * x).sum(0)


class _WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = layers(WIDTH, 256)
        self.weight = nn.Parameter(torch.randn(256))
        self.last = layers(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = _Scale
        scores: Tensor = self.last(scale.apply(self.first(x), self.weight))
        return scores


def _autograd_function() -> Trial:
    return Trial(_WithFunction(), vectors, scored)


@torch.library.custom_op("osdp_families::shifted_relu", mutates_args=())
def _shifted_relu(x: Tensor, shift: Tensor) -> Tensor:
    return torch.relu(x + shift)


@_shifted_relu.register_fake
def _(x: Tensor, shift: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _shifted_relu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    (output,) = ctx.saved_tensors
    through = grad * (output > 0)
    return through, through.sum(0)


_shifted_relu.register_autograd(_shifted_relu_backward, setup_context=_keep)


class _WithOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 256)
        self.shift = nn.Parameter(torch.randn(256))
        self.last = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(_shifted_relu(self.first(x), self.shift))
        return scores


def _library_operator() -> Trial:
    return Trial(_WithOperator(), vectors, scored)


class _Experts(nn.Module):
    """Each token goes to one expert, chosen at run time."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(layers(WIDTH, 128, WIDTH) for _ in range(experts))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        weights, chosen = gates.max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        scores: Tensor = self.head(out)
        return scores


def _experts() -> Trial:
    return Trial(_Experts(), vectors, scored)


class _Graph(nn.Module):
    """Two rounds of message passing over edges, then a mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(layers(2 * WIDTH, 128, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for message in self.messages:
            sent = message(torch.cat([nodes[edges[0]], nodes[edges[1]]], dim=-1))
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[1], sent)
        scores: Tensor = self.head(nodes)
        return scores


def _graph_network() -> Trial:
    def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = seeded(step, rank)
        nodes = torch.randn(20, WIDTH, generator=generator)
        edges = torch.randint(0, 20, (2, 40), generator=generator)
        return nodes, edges, torch.randint(0, CLASSES, (20,), generator=generator)

    return Trial(_Graph(), batch, lambda called, b: F.cross_entropy(called(b[0], b[1]), b[2]))


def _normalised() -> Trial:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    layers = [weight_norm(nn.Linear(WIDTH, 256)), nn.GELU(), spectral_norm(nn.Linear(256, 128))]
    return Trial(nn.Sequential(*layers, nn.GELU(), nn.Linear(128, CLASSES)), vectors, scored)


class _Translator(nn.Module):
    """``nn.Transformer`` with its own layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        logits: Tensor = self.head(self.inner(x, x))
        return logits


def _translator() -> Trial:
    return Trial(_Translator(), sequences, scored)


class _Fourier(nn.Module):
    """A Fourier neural operator: complex parameters."""

    def __init__(self, modes: int = 8) -> None:
        super().__init__()
        self.modes = modes
        self.lift = nn.Linear(1, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, modes, dtype=torch.cfloat) / WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).transpose(1, 2)
        spectrum = torch.fft.rfft(x)
        mixed = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        out: Tensor = self.last(torch.fft.irfft(mixed, n=x.shape[-1]).transpose(1, 2))
        return out


def _fourier() -> Trial:
    def batch(step: int, rank: int) -> Tensor:
        return torch.randn(4, 32, 1, generator=seeded(step, rank))

    return Trial(_Fourier(), batch, lambda called, x: F.mse_loss(called(x), x.cumsum(1)))


class _Vae(nn.Module):
    """A variational autoencoder; its noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(WIDTH, 256, 32), layers(16, 256, WIDTH)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        again = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.mse_loss(again, x) + divergence


def _vae() -> Trial:
    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = seeded(step, rank)
        x = torch.randn(8, WIDTH, generator=generator)
        return x, torch.randn(8, 16, generator=generator)

    return Trial(_Vae(), batch, lambda called, b: called(*b))


_MADE = {
    "MLP": _mlp,
    "convolutions, batch norm": _convolutions,
    "U-Net": _unet,
    "LSTM language model": _lstm,
    "LSTM language model, allow_rnn": _lstm_allowed,
    "GRU language model": _gru,
    "DLRM": _dlrm,
    "GAN": _gan,
    "autograd.Function": _autograd_function,
    "torch.library operator": _library_operator,
    "experts routed at run time": _experts,
    "graph network": _graph_network,
    "weight norm, spectral norm": _normalised,
    "nn.Transformer": _translator,
    "Fourier operator, complex": _fourier,
    "variational autoencoder": _vae,
}

#: What torch cannot compile, by the words of the refusal.
_REFUSED = {
    "LSTM language model": "no graph that was compiled",
    "GRU language model": "no graph that was compiled",
    "experts routed at run time": "no graph that was compiled",
}

FAMILIES = [
    *(Family(name, "by hand", make, refused=_REFUSED.get(name)) for name, make in _MADE.items()),
    Family(
        "WGAN-GP, double backward",
        "by hand",
        _gan_with_penalty,
        refused="a second derivative goes through the compiled model",
    ),
]

"""Models written with torch alone."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.architectures.case import Use, Uses, fixed, images, layer_of, like
from tests.architectures.decoders import IDS, SYMBOLS

WIDTH = 32


def next_token(model: Any) -> Tensor:
    """The loss of a language model that returns logits."""
    logits = model(IDS[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())


# ---- nn.Transformer ------------------------------------------------------------------------------


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(torch.randn(12, WIDTH) / 10)
        self.transformer = nn.Transformer(
            WIDTH, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48,
            dropout=0.0, batch_first=True,
        )  # fmt: skip
        self.generator = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        logits: Tensor = self.generator(self.transformer(x.flip(1), x, tgt_mask=mask))
        return logits


class PlainAttention(nn.Module):
    """nn.MultiheadAttention by linear layers."""

    batch_first = True

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads, d = attention.num_heads, attention.embed_dim
        weight, bias = attention.in_proj_weight.detach(), attention.in_proj_bias.detach()
        self.joint = layer_of(weight, bias)
        self.query = layer_of(weight[:d], bias[:d])
        self.others = layer_of(weight[d:], bias[d:])
        self.out = layer_of(attention.out_proj.weight.detach(), attention.out_proj.bias.detach())

    def uses(self, prefix: str) -> Iterator[tuple[str, list[Use]]]:
        d = self.query.out_features
        blocks = [Use(self.query, outputs=3 * d), Use(self.others, begin=d, outputs=3 * d)]
        yield f"{prefix}.in_proj_weight", [Use(self.joint), *blocks]
        yield f"{prefix}.out_proj.weight", [Use(self.out)]

    def forward(
        self, x: Tensor, z: Tensor, _: Tensor, attn_mask: Tensor | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        if x is z:
            q, k, v = self.joint(x).chunk(3, -1)
        else:
            q, (k, v) = self.query(x), self.others(z).chunk(2, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask)
        return self.out(mixed.transpose(1, 2).flatten(-2)), None


def attention_as_layers(model: nn.Module) -> Uses:
    uses: Uses = {}
    for prefix, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            parent, _, own = prefix.rpartition(".")
            plain = PlainAttention(module)
            setattr(model.get_submodule(parent), own, plain)
            uses |= dict(plain.uses(prefix))
    return uses


# ---- recurrent -----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.project(self.lstm(self.tokens(ids))[0]).tanh())
        return logits


# ---- images --------------------------------------------------------------------------------------


class UNet(nn.Module):
    """A diffusion model's, with an embedding of the time and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.arange(1, 5, dtype=x.dtype)
        waves = torch.cat([(time * frequencies).sin(), (time * frequencies).cos()], -1)
        first = F.silu(self.enter(x))
        low = F.silu(self.down(first)) + self.time_mlp(waves)[:, :, None, None]
        high = self.up(F.silu(self.middle(low)))
        noise: Tensor = self.out(F.silu(self.leave(torch.cat([first, high], 1))))
        return noise


def denoise(model: Any) -> Tensor:
    time = like(model, torch.linspace(0.1, 0.9, 4)[:, None])
    clean, noise = like(model, images()), like(model, fixed(4, 3, 16, 16, seed=2))
    mixed = (1 - time[:, :, None, None]) * clean + time[:, :, None, None] * noise
    return F.mse_loss(model(mixed, time), noise)


class Adversaries(nn.Module):
    """A generator, and a discriminator whose layers are normalised spectrally but for one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 16 * 4 * 4), nn.Unflatten(1, (16, 4, 4)), nn.ReLU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(16, 8, 3, padding=1), nn.BatchNorm2d(8),
            nn.ReLU(), nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Conv2d(3, 8, 3, padding=1)), nn.LeakyReLU(0.2),
            nn.Conv2d(8, 8, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(16 * 4 * 4, 1),
        )  # fmt: skip


def judged(model: Any) -> Tensor:
    """The discriminator's loss."""
    made = model.generator(like(model, fixed(4, 8, seed=3))).detach()
    real = F.softplus(-model.discriminator(like(model, images()))).mean()
    loss: Tensor = real + F.softplus(model.discriminator(made)).mean()
    return loss


def deceived(model: Any) -> Tensor:
    """The generator's loss."""
    made = model.generator(like(model, fixed(4, 8, seed=3)))
    return F.softplus(-model.discriminator(made)).mean()


class Autoencoder(nn.Module):
    """A variational one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 32), nn.ReLU())
        self.fc_mu, self.fc_logvar = nn.Linear(32, 4), nn.Linear(32, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 48))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mu, logvar = self.fc_mu(hidden), self.fc_logvar(hidden)
        z = mu + torch.randn_like(mu) * (logvar / 2).exp()
        return self.decoder(z), mu, logvar


def evidence(model: Any) -> Tensor:
    x = like(model, fixed(16, 48))
    made, mu, logvar = model(x)
    divergence: Tensor = (mu.square() + logvar.exp() - logvar - 1).mean() / 2
    return F.mse_loss(made, x) + 0.01 * divergence


# ---- decisions, graphs, tables -------------------------------------------------------------------


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(72, 32), nn.ReLU(),
        )  # fmt: skip
        self.actor = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 6))
        self.critic = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.eyes(x)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def advantage(model: Any) -> Tensor:
    logits, value = model(like(model, images()))
    actions, gains = torch.tensor([0, 3, 5, 1]), like(model, torch.tensor([1.0, 0.5, 2.0, -1.0]))
    chosen = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    loss: Tensor = F.mse_loss(value, gains) - (gains.clamp(min=0) * chosen).mean()
    return loss


class GraphLayer(nn.Module):
    """Y = Â X W, with W stored inputs × outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges @ (x @ self.weight)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphLayer(12, 32), GraphLayer(32, 24)
        self.classifier = nn.Linear(24, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.second(self.first(x, edges).relu(), edges).relu())
        return scores


def node_classes(model: Any) -> Tensor:
    near = (fixed(20, 20).abs() < 0.3).double() + torch.eye(20)
    edges = like(model, near / near.sum(1, keepdim=True))
    return F.cross_entropy(model(like(model, fixed(20, 12)), edges), torch.arange(20) % 4)


def graph_as_layers(model: GraphNetwork) -> Uses:
    uses: Uses = {}
    for name in ("first", "second"):
        graph = getattr(model, name)
        layer = layer_of(graph.weight.mT)
        graph.forward = lambda x, edges, layer=layer: edges @ layer(x)
        uses[f"{name}.weight"] = [Use(layer)]
    return uses


class Recommender(nn.Module):
    """Embeddings of categories beside numbers, as in DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(30, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        vectors = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        together = torch.stack([dense, *vectors], 1)
        products = (together @ together.mT)[:, *torch.triu_indices(4, 4, 1)]
        score: Tensor = self.top(torch.cat([dense, products], 1)).squeeze(1)
        return score


def clicks(model: Any) -> Tensor:
    numbers, categories = like(model, fixed(16, 6)), torch.arange(16 * 3 * 2).view(16, 3, 2) % 30
    clicked = like(model, (torch.arange(16) % 3 == 0).double())
    return F.binary_cross_entropy_with_logits(model(numbers, categories), clicked)

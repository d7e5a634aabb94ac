"""Output heads found by a forward pass, which changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon import GoMuon, Scion
from gomuon.parameters.traced_heads import traced_heads
from tests.models import mlp, tokens, transformer


def found(model: nn.Module, example_input: Any) -> set[str]:
    heads = traced_heads(model, example_input)
    return {name for name, module in model.named_modules() if module in heads}


class ActorCritic(nn.Module):
    """Heads with names no rule knows, registered before the body."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 1)
        self.body = nn.Sequential(
            nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 4)
        )

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        h = self.body(x)
        return {"out": [self.first(h).softmax(-1), self.second(h)]}


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
        self.encoder, self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x).relu()
        mean, log_var = self.a(h), self.b(h)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return self.decoder(z), mean, log_var


class UNet(nn.Module):
    """Ends in a 3×3 convolution into a tensor that is filled in place; the time comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 3, 3, padding=1)
        self.time = nn.Linear(1, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.down(x) + self.time(t)[..., None, None]
        noise = torch.zeros_like(x)
        noise[:, :, 1:] = self.out(self.up(torch.cat([h, h.relu()], 1)))[:, :, 1:]
        return x - noise


class Functional(nn.Module):
    """Weights that no module applies: the head by `F.linear`, a hidden one by `@`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bare = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x) @ self.bare, 2 * self.last.weight.t().t(), self.last.bias)


class Encoder(nn.Module):
    """Torch's encoder has a fast path in evaluation, which calls no module."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.into = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.into(x)))


class Adapted(nn.Module):
    """A head with an adapter: both reach the output, and neither feeds the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        return self.head(h) + self.b(self.a(h))


CASES: dict[str, tuple[Any, Any, set[str]]] = {
    "actor-critic": (ActorCritic, torch.randn(3, 5), {"first", "second"}),
    "VAE": (VAE, torch.randn(3, 6), {"decoder.2", "a", "b"}),
    "U-Net": (UNet, (torch.randn(2, 3, 6, 6), torch.randn(2, 1)), {"out"}),
    "weights without a call": (Functional, torch.randn(3, 4), {"last"}),
    "torch's encoder": (lambda: Encoder(head=True), torch.randn(2, 5, 4), {"out"}),
    "a residual stream": (lambda: Encoder(head=False), torch.randn(2, 5, 4), set()),
    "adapted": (Adapted, {"x": torch.randn(3, 4)}, {"head", "b"}),
    "a lone layer": (lambda: nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_heads(name: str) -> None:
    make, example_input, expected = CASES[name]
    assert found(make(), example_input) == expected


def test_a_tied_head_stays_an_embedding() -> None:
    table = GoMuon(transformer(), example_input=tokens(0)).routing_table()
    row = next(row for row in table if row.name == "embedding.weight")
    assert (row.treatment, row.reason, row.kind) == ("adamw", "embedding", "embedding")
    assert not [row.name for row in table if row.kind == "head"]


def test_the_optimizer_uses_it() -> None:
    optimizer = GoMuon(ActorCritic(), example_input=torch.randn(3, 5))
    rows = {row.name: (row.treatment, row.reason) for row in optimizer.routing_table()}
    assert rows["first.weight"] == ("adamw", "output head (reaches the output)")
    assert rows["second.weight"] == ("adamw", "output head (reaches the output)")
    assert rows["body.4.weight"] == ("matrix", "linear layer")
    signs = Scion(ActorCritic(), example_input=torch.randn(3, 5)).routing_table()
    assert "output head: sign" in str(signs)
    overridden = GoMuon(
        ActorCritic(), example_input=torch.randn(3, 5), routes={"first.weight": "matrix"}
    )
    assert next(r for r in overridden.routing_table() if r.name == "first.weight").treatment == (
        "matrix"
    )


class Changeable(ActorCritic):
    """Everything a forward pass can change, also in evaluation."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.cache: Any = None

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        self.calls += 1
        self.replaced = torch.rand(())
        self.cache = x
        self.fresh = x
        assert not self.training
        assert not torch.is_grad_enabled()
        return super().forward(x)


def test_nothing_stays_changed() -> None:
    model = Changeable()
    model.body[3].eval()  # a mode of its own
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    attributes = dict(vars(model))
    random = torch.get_rng_state()
    traced_heads(model, torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert vars(model) == attributes
    for name, buffer in model.named_buffers():
        same, value = buffers[name]
        assert buffer is same, name
        assert torch.equal(buffer, value), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.backends.mha.get_fastpath_enabled()


def test_nothing_stays_changed_if_it_fails() -> None:
    model = Changeable()
    attributes = dict(vars(model))
    with pytest.raises(ValueError, match=r"forward pass on example_input=.*\(3, 7\).*failed"):
        GoMuon(model, example_input=torch.randn(3, 7))
    assert vars(model) == attributes
    assert model.training
    assert float(model.calls) == 0


def test_an_output_without_tensors_is_refused() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> int:
            return len(self.layer(x))

    with pytest.raises(ValueError, match="which has no tensor"):
        GoMuon(Counts(), example_input=torch.randn(2, 3))


def test_it_needs_the_model() -> None:
    with pytest.raises(ValueError, match="need the model"):
        GoMuon(mlp(3, 4, 2).parameters(), example_input=torch.randn(2, 3))


def test_a_compiled_part_is_run_as_written() -> None:
    model = mlp(3, 4, 4, 2, dtype=torch.float32)
    model[2] = torch.compile(model[2])  # type: ignore[assignment]
    assert found(model, torch.randn(2, 3)) == {"4"}

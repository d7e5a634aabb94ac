"""Models and loops as people write them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gomuon import GoMuon
from gomuon.lab.bench.memory import peak_bytes
from tests.models import language_loss, mlp, train, transformer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12, msg=name)


class Checkpointed(nn.Module):
    """Two blocks whose activations are recomputed in the backward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = mlp(6, 8, 8, seed=1), mlp(8, 8, 6, seed=2)
        self.head = mlp(6, 2, seed=3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.head(self.second(self.first(x)))
        if self.how == "nested":
            return self.head(self._saved(lambda y: self.second(self._saved(self.first, y)), x))
        return self.head(self._saved(self.second, self._saved(self.first, x)))

    def _saved(self, block: object, x: Tensor) -> Tensor:
        options: dict[str, object] = {"use_reentrant": self.how == "reentrant"}
        if self.how == "selective":

            def policy(
                ctx: object, op: object, *args: object, **kwargs: object
            ) -> CheckpointPolicy:
                keep = op is torch.ops.aten.addmm.default
                return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

            options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(block, x, **options)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "nested", "selective"])
def test_activation_checkpointing_changes_nothing(how: str) -> None:
    saved, plain = Checkpointed(how), Checkpointed("plain")
    first, second = GoMuon(saved, refresh_every=2), GoMuon(plain, refresh_every=2)
    for step in range(6):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).double()
        for model, optimizer in ((saved, first), (plain, second)):
            optimizer.zero_grad()
            model(x.clone().requires_grad_()).square().mean().backward()
            optimizer.step()
    assert_same(saved, plain)


def test_a_refresh_under_checkpointing_costs_its_moments_and_no_activation() -> None:
    model = Checkpointed("not reentrant")
    x = torch.randn(4096, 6, dtype=torch.float64).requires_grad_()

    def cost() -> int:
        peak = peak_bytes(lambda: model(x).square().mean().backward())
        model.zero_grad()
        return peak

    cost()
    without = cost()
    optimizer = GoMuon(model)
    refresh = cost()
    statistics = optimizer._capture.groups[0].collect().values()
    moments = {id(m): m.total.nbytes for s in statistics for m in (s.inputs, s.gradients) if m}
    one_activation = 4096 * 8 * 8
    # At most the copy of one output, while it replaces the original.
    assert refresh - without < sum(moments.values()) + one_activation


class Experts(nn.Module):
    """Tokens go to one of two experts, by sign."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.head(torch.tanh(self.experts[chosen](x)))


def test_an_expert_that_saw_no_token_keeps_its_geometry() -> None:
    model = Experts()
    optimizer = GoMuon(model, refresh_every=1)

    def step(chosen: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(9, 4), chosen).square().mean().backward()
        optimizer.step()

    step(0)
    step(1)
    idle, busy = (expert.get_parameter("weight") for expert in model.experts)
    before = {
        name: value.clone()
        for name, value in optimizer.state[idle].items()
        if isinstance(value, Tensor)
    }
    renewed = optimizer.state[busy]["left_map"].clone()
    weight = idle.detach().clone()
    step(1)
    for name, value in before.items():
        assert torch.equal(optimizer.state[idle][name], value), name
    assert torch.equal(idle, weight)
    assert not torch.equal(optimizer.state[busy]["left_map"], renewed)


class Tied(nn.Module):
    """One weight in two modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_one_weight_in_two_modules_has_both_modules_statistics() -> None:
    model = Tied()
    optimizer = GoMuon(model)
    x = torch.randn(8, 5, dtype=torch.float64)
    model(x).sum().backward()
    moment = optimizer._capture.groups[0].collect()[model.a.weight].inputs
    assert moment is not None
    hidden = torch.tanh(model.a(x)).detach()
    torch.testing.assert_close(moment.total, x.T @ x + hidden.T @ hidden)
    assert float(moment.count) == 16
    optimizer.step()
    assert model.a.weight is model.b.weight


@pytest.mark.filterwarnings("error::gomuon.GeometryWarning")
def test_multihead_attention_trains_with_its_geometry() -> None:
    """torch applies its projections without calling a module; functions are watched for them."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.attention(x, x, x, need_weights=False)
            return self.head(torch.tanh(self.hidden(x + y)))

    model = Model()
    optimizer = GoMuon(model, lr=0.02)
    x, y = torch.randn(6, 5, 8), torch.randint(0, 3, (30,))
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    projections = model.attention.in_proj_weight, model.attention.out_proj.weight
    for weight in (model.hidden.weight, *projections):
        assert "left_map" in optimizer.state[weight]


def test_parametrized_weights_go_to_adamw() -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Tanh(),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    )
    treatments = {row.name: row.treatment for row in GoMuon(model).routing_table()}
    assert treatments["2.weight"] == "matrix"
    assert {t for name, t in treatments.items() if "parametrizations" in name} == {"adamw"}


def test_low_rank_adapters_train_with_a_frozen_base() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Tanh(), nn.Linear(6, 2))
    base = model[0].base.weight.clone()  # type: ignore[union-attr,operator]
    optimizer = GoMuon(model, lr=0.02)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(9, 6)).square().mean().backward()
        optimizer.step()
    assert torch.equal(model[0].get_parameter("base.weight"), base)
    assert model[0].get_parameter("up.weight").abs().sum() > 0


def test_an_evaluation_between_forward_and_backward_changes_nothing() -> None:
    watched, plain = transformer(layers=1), transformer(layers=1)
    first, second = GoMuon(watched), GoMuon(plain)
    for step in range(6):
        first.zero_grad()
        loss = language_loss(watched, step)
        with torch.no_grad():
            language_loss(watched, 99)
        watched.eval()
        language_loss(watched, 98)
        watched.train()
        loss.backward()
        first.step()
        train(plain, second, range(step, step + 1))
    assert_same(watched, plain)


def test_an_exception_in_the_middle_of_a_forward_pass_leaves_no_trace() -> None:
    hurt, plain = transformer(layers=2), transformer(layers=2)
    first, second = GoMuon(hurt), GoMuon(plain)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    for step in range(5):
        handle = hurt.trunk.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            language_loss(hurt, 50)
        handle.remove()
        train(hurt, first, range(step, step + 1))
        train(plain, second, range(step, step + 1))
    assert_same(hurt, plain)


def test_two_optimizers_on_one_model() -> None:
    both, alone = transformer(layers=1), transformer(layers=1)
    first, idle, second = GoMuon(both), GoMuon(both, lr=0.5, refresh_every=3), GoMuon(alone)
    train(both, first, range(6))
    train(alone, second, range(6))
    assert_same(both, alone)
    assert not idle.state


def test_zero_grad_that_keeps_zeros() -> None:
    kept, plain = transformer(layers=1), transformer(layers=1)
    first, second = GoMuon(kept), GoMuon(plain)
    for step in range(6):
        first.zero_grad(set_to_none=False)
        language_loss(kept, step).backward()
        first.step()
        train(plain, second, range(step, step + 1))
    assert_same(kept, plain)

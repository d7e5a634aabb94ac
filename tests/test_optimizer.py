"""GoMuon behaves as a torch.optim.Optimizer should."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import KFAC, GoMuon, Muon, Shampoo
from tests.models import language_loss, mlp, train, transformer


def assert_same(one: nn.Module, other: nn.Module, rtol: float = 1e-7, atol: float = 1e-9) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=name)


def test_is_an_optimizer_and_trains() -> None:
    model = transformer()
    optimizer = GoMuon(model, adamw={"lr": 3e-2})
    assert isinstance(optimizer, torch.optim.Optimizer)
    losses = [train(model, optimizer, range(1))[0] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]


def test_adamw_is_torchs() -> None:
    """Everything that is no matrix moves as under torch.optim.AdamW with the same settings."""
    model, twin = transformer(), transformer()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = GoMuon(model, lr=0.0, adamw=settings)
    names = {row.name for row in optimizer.routing_table().treated("adamw")}
    other = torch.optim.AdamW(
        [p for name, p in twin.named_parameters() if name in names], **settings
    )
    train(model, optimizer, range(6))
    train(twin, other, range(6))
    assert_same(model, twin, rtol=1e-12, atol=1e-14)


def test_weight_decay_is_decoupled() -> None:
    model = mlp(4, 4, 4, 2)
    optimizer = GoMuon(model, lr=0.1, weight_decay=0.5)
    weight = model.get_parameter("0.weight")
    before = weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    torch.testing.assert_close(weight, (1 - 0.1 * 0.5) * before)


def test_a_tensor_learning_rate() -> None:
    model, twin = transformer(layers=1), transformer(layers=1)
    train(model, GoMuon(model, lr=torch.tensor(0.05, dtype=torch.float64)), range(5))
    train(twin, GoMuon(twin, lr=0.05), range(5))
    assert_same(model, twin)


def test_an_unfrozen_layer_is_captured_at_the_next_refresh() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    frozen = model.get_parameter("trunk.blocks.0.mlp.up.weight")
    frozen.requires_grad_(False)
    train(model, optimizer, range(5))
    frozen.requires_grad_(True)
    train(model, optimizer, range(5, 9))
    assert "left_map" in optimizer.state[frozen]


def test_gradients_are_never_written_to() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    language_loss(model, 0).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, old)


def test_groups_added_later_are_captured() -> None:
    model = transformer(layers=2)
    late = [
        (n, p)
        for n, p in model.named_parameters()
        if n.startswith("trunk.blocks.1") and p.ndim == 2
    ]
    optimizer = GoMuon(model, routes={name: "frozen" for name, _ in late})
    train(model, optimizer, range(3))
    given = {"params": late, "treatment": "matrix", "lr": 0.04, "refresh_every": 2}
    optimizer.add_param_group(given)
    assert set(given) == {"params", "treatment", "lr", "refresh_every"}
    before = late[0][1].detach().clone()
    train(model, optimizer, range(3, 4))
    assert "left_map" in optimizer.state[late[0][1]], "a new group refreshes at once"
    assert not torch.equal(late[0][1], before)
    assert optimizer.param_groups[2]["momentum"] == 0.8


def test_groups_keep_their_order_and_their_settings() -> None:
    model = mlp(3, 4, 4, 2)
    parameters = dict(model.named_parameters())
    optimizer = Muon(
        [
            {"params": [parameters["2.weight"]], "lr": 0.3, "momentum": 0.5},
            {"params": [parameters["0.weight"], parameters["0.bias"]]},
            {"params": [parameters["2.bias"]], "treatment": "adamw", "lr": 0.7},
        ],
        lr=0.1,
        adamw={"lr": 0.01},
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1, 0.7]
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.8, 0.8]
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = {name: float((p - before[name]).abs().max().detach()) for name, p in parameters.items()}
    # AdamW's first step is lr·sign; in a mixed group its rate follows the group's in proportion.
    assert moved["0.bias"] == pytest.approx(0.01, rel=1e-6)
    assert moved["2.bias"] == pytest.approx(0.7, rel=1e-6)


def test_base_class_hooks_fire() -> None:
    model = mlp(3, 4, 4, 2)
    optimizer = GoMuon(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    model(torch.randn(9, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", "saved", "loaded"]


def run(
    scale: float = 1.0, *, reduction: str = "mean", batches: tuple[int, ...] = (6,)
) -> nn.Module:
    """Eight updates; `batches` cycles through batch sizes."""
    model = transformer(layers=1)
    optimizer = GoMuon(model, loss_reduction=reduction, refresh_every=2, adamw={"lr": 0.0})
    for step in range(8):
        optimizer.zero_grad()
        batch = batches[step // 2 % len(batches)]
        (scale * language_loss(model, step, batch, reduction)).backward()
        optimizer.step()
    return model


def test_a_constant_factor_on_the_loss_changes_nothing() -> None:
    assert_same(run(1.0), run(1024.0), rtol=1e-10, atol=1e-12)
    assert_same(run(1.0), run(1e-3), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("batches", [(6,), (6, 3, 6)])
def test_sum_and_mean_losses_are_one_optimizer(batches: tuple[int, ...]) -> None:
    """The reduction is undone exactly, so a short batch does not reweight B̄ either way.

    Momentum sees the gradients as they are, so it is off here.
    """

    def trained(reduction: str) -> nn.Module:
        model = transformer(layers=1)
        optimizer = GoMuon(
            model, momentum=0.0, loss_reduction=reduction, refresh_every=2, adamw={"lr": 0.0}
        )
        for step in range(8):
            optimizer.zero_grad()
            batch = batches[step // 2 % len(batches)]
            language_loss(model, step, batch, reduction).backward()
            optimizer.step()
        return model

    assert_same(trained("mean"), trained("sum"), rtol=1e-9, atol=1e-11)


def test_saying_the_wrong_reduction_shows_with_unequal_batches() -> None:
    """The test above can fail: undoing a mean as if it were a sum reweights B̄."""
    right = run(reduction="mean", batches=(6, 2))
    model = transformer(layers=1)
    optimizer = GoMuon(model, loss_reduction="sum", refresh_every=2, adamw={"lr": 0.0})
    for step in range(8):
        optimizer.zero_grad()
        language_loss(model, step, (6, 2)[step // 2 % 2], "mean").backward()
        optimizer.step()
    name = "trunk.blocks.0.attention.q.weight"
    assert not torch.allclose(right.get_parameter(name), model.get_parameter(name), rtol=1e-6)


def test_elapsed_steps_decay_a_layer_that_missed_a_refresh() -> None:
    """B̄ ← β^(2K)·B̄ + (1 − β^(2K))·B after one missed refresh."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False).double()
    optimizer = GoMuon(layer, refresh_every=2, shrinkage=0.0, factor_decay=0.9, lr=0.01)

    def step(x: Tensor, *, used: bool = True) -> None:
        optimizer.zero_grad()
        if used:
            layer(x).square().mean().backward()
        else:  # gradients that come from elsewhere
            loss = layer(x).square().mean()
            (layer.weight.grad,) = torch.autograd.grad(loss, layer.weight)
        optimizer.step()

    x = torch.randn(8, 4, dtype=torch.float64)
    step(x)
    first = optimizer.state[layer.weight]["left_factor"].clone()
    step(x)
    step(x, used=False)  # a refresh step nothing was captured in
    step(x)
    y = layer(x)
    g = torch.autograd.grad(y.square().mean(), y)[0]
    step(x)
    B = (8 * g).T @ (8 * g) / 8
    expected = 0.9**4 * first + (1 - 0.9**4) * B
    torch.testing.assert_close(optimizer.state[layer.weight]["left_factor"], expected)


def test_a_model_converted_in_mid_training_takes_its_state_along() -> None:
    model = transformer(layers=1, dtype=torch.float32)
    optimizer = GoMuon(model)
    losses = train(model, optimizer, range(6))
    model.double()
    losses += train(model, optimizer, range(6, 12))
    state = optimizer.state[model.get_parameter("trunk.blocks.0.mlp.up.weight")]
    assert {value.dtype for value in state.values() if isinstance(value, Tensor)} == {torch.float64}
    assert losses[-1] < losses[0]


def test_degenerate_shapes_train() -> None:
    for sizes in ((1, 5, 1, 4, 2), (5, 1, 1, 3)):
        model = mlp(*sizes)
        optimizer = GoMuon(model, lr=0.01)
        x = torch.randn(7, sizes[0], dtype=torch.float64)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())
        assert any(
            not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
        )


def test_a_zero_initialised_layer_trains() -> None:
    """δ of the layers below is zero at first: their B is the zero matrix."""
    model = transformer(layers=2)
    for block in model.trunk.blocks:
        nn.init.zeros_(block.get_parameter("mlp.down.weight"))
        nn.init.zeros_(block.get_parameter("attention.o.weight"))
    optimizer = GoMuon(model, adamw={"lr": 3e-2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [train(model, optimizer, range(1))[0] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]


# ---- groups that come later ----------------------------------------------------------------------


def test_a_group_of_a_models_parameters_needs_no_names() -> None:
    model = mlp(6, 5, 5, 3)
    optimizer = GoMuon(model)
    model.append(nn.Linear(3, 3).double())
    optimizer.add_param_group({"params": model[-1].parameters()})
    assert optimizer.param_groups[-1]["param_names"] == ["5.weight", "5.bias"]
    foreign = nn.Parameter(torch.zeros(2, 2))
    optimizer.add_param_group({"params": foreign})
    assert optimizer.param_groups[-1]["param_names"] == ["parameter 8"]


def test_a_layer_added_later_is_cut_as_its_module_says() -> None:
    class Grown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(4, 8, 3)
            self.second: nn.Module = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Grown()
    optimizer = GoMuon(model)
    model.second = nn.Conv2d(8, 8, 3, groups=4, bias=False)
    optimizer.add_param_group({"params": model.second.parameters()})
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 7, 7)).square().mean().backward()
        optimizer.step()
    weight = model.get_parameter("second.weight")
    assert optimizer.state[weight]["left_map"].shape == (4, 2, 2)


def test_a_rate_of_one_entry_is_a_number() -> None:
    model, twin = mlp(6, 5, 3, 3), mlp(6, 5, 3, 3)
    rate = torch.tensor([0.08], dtype=torch.float64)
    optimizer, plain = GoMuon(model, lr=rate, weight_decay=0.1), GoMuon(twin, weight_decay=0.1)
    for one, other in ((model, optimizer), (twin, plain)):
        for _ in range(2):
            other.zero_grad()
            one(torch.ones(4, 6, dtype=torch.float64)).square().mean().backward()
            other.step()
    assert_same(model, twin)
    rate.zero_()  # a scheduler writes into the tensor it was given
    assert float(optimizer.param_groups[0]["lr"]) == 0


# ---- factors that were shared --------------------------------------------------------------------


class Crossed(nn.Module):
    """Queries and keys that read one tensor, or two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.head = (nn.Linear(6, n, bias=False) for n in (6, 6, 2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.q(x) + self.k(y))


def test_layers_that_no_longer_share_an_average_have_one_each() -> None:
    model = Crossed()
    optimizer = GoMuon(model, refresh_every=1, input_decay=0.5, shrinkage=0.0)
    x, y = torch.randn(2, 8, 6).double()
    model(x, x).square().mean().backward()
    optimizer.step()
    factors = [optimizer.state[layer.weight]["right_factor"] for layer in (model.q, model.k)]
    assert factors[0] is factors[1]
    before = factors[0].clone()
    optimizer.zero_grad()
    model(x, y).square().mean().backward()
    optimizer.step()
    for layer, read in ((model.q, x), (model.k, y)):
        want = 0.5 * before + 0.5 * (read.mT @ read / 8)
        torch.testing.assert_close(optimizer.state[layer.weight]["right_factor"], want)


def test_a_frozen_layers_average_stays_while_its_siblings_moves() -> None:
    model = Crossed()
    optimizer = KFAC(model)
    x, y = torch.randn(2, 8, 6).double()
    model(x, x).square().mean().backward()
    optimizer.step()
    before = optimizer.state[model.k.weight]["right_factor"].clone()
    model.k.weight.requires_grad_(False)
    optimizer.zero_grad()
    model(y, y).square().mean().backward()
    optimizer.step()
    assert torch.equal(optimizer.state[model.k.weight]["right_factor"], before)
    assert not torch.equal(optimizer.state[model.q.weight]["right_factor"], before)


def test_shampoo_waits_for_a_layers_first_statistics() -> None:
    model = mlp(6, 5, 5, 3)
    optimizer = Shampoo(model, statistics_every=3, refresh_every=2)
    late = model.get_parameter("0.weight")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(4, 6, dtype=torch.float64)).square().mean().backward()
        if step == 0:
            late.grad = None
        optimizer.step()
        assert ("left_map" in optimizer.state[late]) == (step > 3)


def test_a_bias_added_later_does_not_join_a_weight_that_is_there() -> None:
    """K-FAC's weights take their biases along, but not after they have begun without."""
    layer = nn.Linear(4, 5).double()
    model = nn.Sequential(layer)
    optimizer = KFAC([{"params": [("0.weight", layer.weight)], "treatment": "matrix"}])
    optimizer.attach(model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()

    step()
    optimizer.add_param_group({"params": [("0.bias", layer.bias)], "treatment": "adamw"})
    before = layer.bias.detach().clone()
    for _ in range(3):
        step()
    assert not torch.equal(layer.bias, before)


def test_a_set_of_parameters_is_refused_as_torch_does() -> None:
    model = mlp(6, 5, 3)
    optimizer = GoMuon(model)
    with pytest.raises(TypeError, match="ordered collection"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.zeros(2, 2))}})

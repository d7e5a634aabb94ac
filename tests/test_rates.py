"""`lr_scale="adamw"`: AdamW's rate, decay and schedule carry over. And cautious decay."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GeometryWarning, GoMuon, Muon, Scion, functional
from gomuon.optimizer import MatrixOptimizer
from gomuon.recipes.registry import METHODS
from gomuon.watching.layer_updates import LayerUpdate
from tests.models import language_loss, mlp, transformer

SCALED = [name for name, method in METHODS.items() if "lr_scale" in method.recipe.settings]

# As published, five steps leave singular values some percent off one; nine take them there.
EXACT: dict[str, dict[str, Any]] = {"PolarExpressMuon": {"polar_steps": 9}}


def rms(X: Tensor) -> float:
    return float(X.square().mean().sqrt())


def updates(optimizer: MatrixOptimizer, step: Callable[[], None]) -> list[Tensor]:
    """The updates U of all matrices in one step, each [m, n]."""
    seen: list[Tensor] = []

    def observe(layer: LayerUpdate) -> None:
        seen.extend(layer.update)

    stop = optimizer.add_observer(observe)
    step()
    stop()
    return seen


def test_the_methods_that_have_it() -> None:
    """Those whose directions come from a polar factor, and have no length of their own."""
    other_directions = {"KFAC", "SINGD", "Shampoo", "SOAP", "KLShampoo", "KLSOAP"}
    # SOAP-Muon's steps have a root mean square of one by definition, so its rates are AdamW's in
    # kind already; a hyperball's are shares of the weights' norm.
    own_lengths = {"SOAPMuon", "MuonHyperball"}
    assert set(METHODS) - set(SCALED) == other_directions | own_lengths


@pytest.mark.parametrize("name", SCALED)
def test_every_updates_rms_is_adamws(name: str) -> None:
    """.2 at full rank; a tall, a wide and a square matrix, by captured geometry if there is one."""
    model = transformer(layers=1)
    settings = EXACT.get(name, {})
    optimizer = METHODS[name](model, lr=1e-4, lr_scale="adamw", **settings)

    def step() -> None:
        language_loss(model, 0).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn_like(parameter))  # of full rank
        optimizer.step()

    seen = updates(optimizer, step)
    assert {U.shape for U in seen} >= {(24, 16), (16, 24)}
    for U in seen:
        assert rms(U) == pytest.approx(0.2, rel=0.01), (name, U.shape)


@pytest.mark.parametrize(("m", "n"), [(6, 6), (9, 4), (4, 9)])
def test_it_is_torchs_and_moonlights_scale(m: int, n: int) -> None:
    weight = nn.Parameter(torch.randn(m, n, dtype=torch.float64))
    before = weight.detach().clone()
    optimizer = Muon([weight], lr=0.01, lr_scale="adamw", momentum=0.0, nesterov=False)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    step = 0.01 * 0.2 * math.sqrt(max(m, n)) * functional.polar(weight.grad, "svd")
    assert torch.allclose(weight.detach(), before - step, atol=1e-12)


def test_the_graft_is_taken_into_account() -> None:
    """‖D‖_F = √rank, so the RMS is .2·√(rank/min(m, n)); without a graft it is not known."""

    def updated(graft: str | None) -> tuple[Tensor, Tensor]:
        model = mlp(8, 6, 5)
        optimizer = GoMuon(model, lr=1e-4, lr_scale="adamw", graft=graft)

        def step() -> None:
            model(torch.randn(3, 8, dtype=torch.float64)).square().sum().backward()  # rank 3
            optimizer.step()

        torch.manual_seed(1)
        (scaled,) = updates(optimizer, step)
        plain = GoMuon(other := mlp(8, 6, 5), lr=1e-4, graft=graft)

        def plain_step() -> None:
            other(torch.randn(3, 8, dtype=torch.float64)).square().sum().backward()
            plain.step()

        torch.manual_seed(1)
        (unscaled,) = updates(plain, plain_step)
        return scaled, unscaled

    scaled, unscaled = updated("frobenius")
    assert rms(scaled) == pytest.approx(0.2 * math.sqrt(3 / 6))
    assert torch.allclose(scaled, 0.2 * math.sqrt(8) * unscaled)  # 6×8: √max(1, m/n) is 1
    scaled, unscaled = updated(None)
    assert torch.allclose(scaled, 0.2 * math.sqrt(8) * unscaled)
    assert rms(scaled) != pytest.approx(0.2 * math.sqrt(3 / 6), rel=0.01)


# ---- one rate for everything ---------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def nanogpt(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * (step + 1) / 5


Schedule = Callable[[torch.optim.Optimizer], Callable[[int], Any]]


def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-3, total_steps=9, cycle_momentum=False
    )
    return lambda step: scheduler.step()


def swa(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-4, anneal_epochs=3)
    return lambda step: scheduler.step()


def warm_up(optimizer: torch.optim.Optimizer) -> Callable[[int], Any]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
    return lambda step: scheduler.step()


SCHEDULES: dict[str, Schedule] = {
    "nanoGPT": lambda optimizer: lambda step: nanogpt(optimizer, step),
    "OneCycleLR": one_cycle,
    "SWALR": swa,
    "LambdaLR": warm_up,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_adamws_part_follows_the_one_rate_and_decay(name: str) -> None:
    """Bit for bit torch's AdamW, whose groups decay as nanoGPT's: weights do, vectors do not."""
    ours, theirs = Small(), Small()
    optimizer = Muon(ours, lr=6e-4, lr_scale="adamw", weight_decay=0.1)
    weights = [theirs.tokens.weight, theirs.lm_head.weight]
    vectors = [theirs.hidden.bias, *theirs.norm.parameters()]
    adamw = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=6e-4, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    schedules = [SCHEDULES[name](one) for one in (optimizer, adamw)]
    for step in range(5):
        for model, one, schedule in zip((ours, theirs), (optimizer, adamw), schedules, strict=True):
            gradients(model, step)
            schedule(step) if name == "nanoGPT" else None
            one.step()
            schedule(step) if name != "nanoGPT" else None
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
    assert not torch.equal(ours.hidden.bias, Small().hidden.bias)
    for key, value in theirs.named_parameters():
        if key != "hidden.weight":
            assert torch.equal(ours.get_parameter(key), value), key


@pytest.mark.filterwarnings("ignore:.*was given parameters")
@pytest.mark.parametrize("lr", [6e-4, 0.0])
def test_bare_parameters_follow_it_too(lr: float) -> None:
    """In one group with the matrices, also if the rate starts at zero."""
    ours, theirs = mlp(3, 4, 2), mlp(3, 4, 2)
    optimizer = Muon(ours.parameters(), lr=lr, lr_scale="adamw", weight_decay=0.1)
    biases = [p for p in theirs.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(biases, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, adamw)):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(
                    parameter.shape, generator=generator, dtype=torch.float64
                )
            one.step()
            one.param_groups[0]["lr"] = 1e-3 / (step + 1)
    for key in ("0.bias", "2.bias"):
        assert torch.equal(ours.get_parameter(key), theirs.get_parameter(key)), key


def test_rates_that_are_not_given() -> None:
    def rates(**settings: Any) -> list[float]:
        optimizer = GoMuon(Small(), **settings)
        return [float(group["lr"]) for group in optimizer.param_groups]

    assert rates() == [0.08, 3e-3]  # unscaled, as it was
    assert rates(lr_scale="adamw") == [3e-3, 3e-3, 3e-3]
    assert rates(lr_scale="adamw", lr=1e-3) == [1e-3, 1e-3, 1e-3]
    assert rates(lr_scale="adamw", adamw={"lr": 1e-4}) == [1e-4, 1e-4, 1e-4]
    assert rates(lr_scale="adamw", lr=1e-3, adamw={"lr": 1e-4}) == [1e-3, 1e-4, 1e-4]
    shared = torch.tensor(1e-3)
    optimizer = GoMuon(Small(), lr=shared, lr_scale="adamw")
    shared.fill_(5e-4)  # what a compiled scheduler does
    assert {float(group["lr"]) for group in optimizer.param_groups} == {float(shared)}


def test_added_groups_have_the_one_rate() -> None:
    optimizer = GoMuon(Small(), lr=1e-3, lr_scale="adamw", weight_decay=0.1)
    for settings, expected in (({}, (1e-3, 0.1)), ({"lr": 5e-4}, (5e-4, 0.1))):
        vector = nn.Parameter(torch.zeros(3))
        optimizer.add_param_group({"params": [vector], "treatment": "adamw", **settings})
        added = optimizer.param_groups[-1]
        assert (added["lr"], added["weight_decay"]) == expected
    matrix = nn.Parameter(torch.zeros(3, 3))
    optimizer.add_param_group({"params": [matrix], "lr": 5e-4})
    added = optimizer.param_groups[-1]
    assert added["adamw"]["lr"] == added["base_lr"] == 5e-4
    assert added["adamw"]["weight_decay"] == 0.0


def test_a_checkpoint_keeps_it_and_older_ones_leave_it() -> None:
    def trained(optimizer: MatrixOptimizer, model: nn.Module, steps: range) -> None:
        for step in steps:
            gradients(model, step)
            optimizer.step()

    first, whole = Small(), Small()
    settings: dict[str, Any] = {"lr": 1e-2, "lr_scale": "adamw", "weight_decay": 0.1}
    optimizer, reference = Muon(first, **settings), Muon(whole, **settings)
    trained(reference, whole, range(4))
    trained(optimizer, first, range(2))
    saved = optimizer.state_dict()
    resumed = Muon(first, **settings)
    resumed.load_state_dict(saved)
    trained(resumed, first, range(2, 4))
    assert all(map(torch.equal, first.parameters(), whole.parameters()))
    for group in saved["param_groups"]:
        del group["lr_scale"], group["cautious_decay"]
    older = Muon(Small(), **settings)
    older.load_state_dict(saved)
    assert {group["lr_scale"] for group in older.param_groups} == {"adamw"}


def test_what_decays_is_said() -> None:
    def line(**settings: Any) -> str:
        return str(Muon(Small(), **settings).routing_table()).split("\n")[-1]

    assert line(weight_decay=0.1) == (
        "weight decay: 0.1 for matrices; 0 for embedding, biases and vectors, head"
    )
    assert line(weight_decay=0.1, lr_scale="adamw") == (
        "weight decay: 0.1 for embedding, matrices, head; 0 for biases and vectors"
    )
    assert "weight decay" not in line()


def test_scions_head_has_the_same_rms() -> None:
    model = Small()
    optimizer = Scion(model, lr=1e-3, lr_scale="adamw", radius=50.0, head_radius=3000.0)

    def step() -> None:
        gradients(model, 0)
        optimizer.step()

    seen = {tuple(U.shape): U for U in updates(optimizer, step)}
    assert rms(seen[7, 4]) == pytest.approx(0.2)  # the head, whose directions are signs
    assert rms(seen[4, 4]) == pytest.approx(0.2, rel=0.01)
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


# ---- cautious decay ------------------------------------------------------------------------------


def test_cautious_decay_is_the_published_rule() -> None:
    """x ← x − η(u + λ·𝕀(u⊙x ≥ 0)⊙x), for matrices and for AdamW's part (arXiv 2510.12402)."""
    lr, decay = 0.01, 0.5
    model, plain = Small(), Small()
    settings: dict[str, Any] = {"lr": lr, "lr_scale": "adamw"}
    cautious = Muon(model, weight_decay=decay, cautious_decay=True, **settings)
    without = Muon(plain, **settings)
    masked = 0
    for step in range(4):
        starts = [p.detach().clone() for p in model.parameters()]
        plain.load_state_dict(model.state_dict())  # its moments depend on gradients alone
        for one, optimizer in ((model, cautious), (plain, without)):
            gradients(one, step)
            optimizer.step()
        for ours, other, x in zip(model.parameters(), plain.parameters(), starts, strict=True):
            moved = other.detach() - x  # −η·u
            aligned = moved * x <= 0
            masked += int((~aligned).sum())
            expected = x + moved - lr * (decay if x.ndim == 2 else 0.0) * aligned * x
            assert torch.allclose(ours.detach(), expected, atol=1e-7)
    assert masked > 50


def test_cautious_decay_in_the_steps_geometry() -> None:
    """Coordinates whose geometric decay opposes the update are left out, and only these."""

    def moved(**settings: Any) -> tuple[Tensor, Tensor]:
        model = mlp(5, 4, 3)
        optimizer = GoMuon(model, lr=0.1, **settings)
        before = model.get_parameter("0.weight").detach().clone()

        def step() -> None:
            torch.manual_seed(2)
            model(torch.randn(30, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()

        (U,) = updates(optimizer, step)
        return model.get_parameter("0.weight").detach() - before, U

    still, U = moved()
    decay = still - moved(weight_decay=0.5, geometry_decay=True)[0]
    masked = still - moved(weight_decay=0.5, geometry_decay=True, cautious_decay=True)[0]
    assert torch.allclose(masked, torch.where(U * decay >= 0, decay, 0.0), atol=1e-12)
    assert 0 < int((masked == 0).sum()) < masked.numel()


# ---- one rate in all groups ----------------------------------------------------------------------


def with_rates(later: list[float], **settings: Any) -> list[str]:
    """The warnings of steps in which a loop writes these rates into all groups."""
    model = transformer(layers=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = Muon(model, **settings)
        for step, lr in enumerate(later):
            for group in optimizer.param_groups:
                group["lr"] = lr
            language_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if issubclass(one.category, GeometryWarning)]


def test_a_loop_that_writes_one_rate_into_groups_of_different_rates_is_told() -> None:
    (told,) = with_rates([0.0, 2e-4, 4e-4], lr=0.02)
    assert "all parameter groups now have the rate 0.0002" in told
    assert "0.02 for matrices, 0.003 for AdamW's part" in told
    assert 'pass lr_scale="adamw"' in told


def test_a_loop_that_may_write_one_rate_is_not_told() -> None:
    assert with_rates([2e-4, 4e-4], lr=1e-3, lr_scale="adamw") == []
    assert with_rates([2e-4, 4e-4], lr=3e-3, adamw={"lr": 3e-3}) == []


def test_a_schedule_that_ends_in_one_rate_is_not_told() -> None:
    model = transformer(layers=1)
    optimizer = Muon(model, lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = []
        for step in range(14):
            language_loss(model, step).backward()
            optimizer.step()
            schedule.step()
            counts.append(len({group["lr"] for group in optimizer.param_groups}))
    assert counts[0] == 2
    assert counts[11] == 1


@pytest.mark.parametrize("name", ["betas", "eps"])
def test_adamws_settings_are_found_where_they_are(name: str) -> None:
    with pytest.raises(TypeError, match=f"GoMuon has no setting '{name}'; .* adamw=.'{name}'"):
        GoMuon(transformer(layers=1), **{name: 0.9})  # type: ignore[arg-type]

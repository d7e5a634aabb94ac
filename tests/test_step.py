"""The optimizer is the paper's "Complete update"."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gomuon import GoMuon, Muon
from gomuon.lab.bench import plain_loop
from gomuon.lab.bench.plain_loop import plain_go_muon
from tests.models import cosine, language_loss, train, transformer

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def relative_errors(model: nn.Module, other: nn.Module) -> dict[str, float]:
    theirs = dict(other.named_parameters())
    return {
        name: float(((p.double() - theirs[name]).norm() / theirs[name].norm()).detach())
        for name, p in model.named_parameters()
    }


def train_reference(model: nn.Module, steps: int, *, K: int, alpha: float = 0.25) -> None:
    plain = plain_go_muon(model, 0.08, refresh_every=K, alpha=alpha, adamw=ADAMW)
    assert plain.adamw is not None
    for step in range(steps):
        schedule = cosine(step, steps)
        plain.lr = 0.08 * schedule
        plain.adamw.param_groups[0]["lr"] = 3e-3 * schedule
        plain.zero_grad()
        language_loss(model, step).backward()
        plain.step()


def test_the_plain_loop_uses_nothing_of_gomuon() -> None:
    tree = ast.parse(Path(plain_loop.__file__).read_text(encoding="utf-8"))
    froms = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    assert {str(name).partition(".")[0] for name in (*froms, *plain)} == {
        *("__future__", "collections", "math", "torch", "typing")
    }


def train_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    scheduler = LambdaLR(optimizer, lambda step: cosine(step, steps))
    for step in range(steps):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"), [(torch.float64, 50, 1e-8), (torch.float32, 10, 1e-3)]
)
def test_follows_the_plain_loop(K: int, dtype: torch.dtype, steps: int, tolerance: float) -> None:
    model, plain = transformer(dtype=dtype), transformer()
    plain.load_state_dict(model.state_dict())  # the same start, also where float32 rounds
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    # The paper's polar factor by name: early sources have directions at float32's roundoff, which
    # the default leaves alone.
    train_optimizer(model, GoMuon(model, lr=0.08, refresh_every=K, polar="svd"), steps)
    train_reference(plain, steps, K=K)
    errors = relative_errors(model, plain)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < tolerance, f"{worst}: {errors[worst]:.2e}"
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) == len(before), "every parameter is trained"


def test_the_default_polar_factor_follows_the_plain_loop_too() -> None:
    """In float64 every source of this model has full rank, where all polar factors are one."""
    model, plain = transformer(), transformer()
    train_optimizer(model, GoMuon(model, lr=0.08), 50)
    train_reference(plain, 50, K=4)
    assert max(relative_errors(model, plain).values()) < 1e-8


def test_a_different_K_is_a_different_run() -> None:
    """The comparison above can fail: one wrong setting shows."""
    model, plain = transformer(), transformer()
    train_optimizer(model, GoMuon(model, lr=0.08, refresh_every=4), 6)
    train_reference(plain, 6, K=1)
    assert max(relative_errors(model, plain).values()) > 1e-4


def test_alpha_zero_is_muon_and_both_follow_the_plain_loop() -> None:
    go, muon, plain = transformer(), transformer(), transformer()
    train_optimizer(go, GoMuon(go, lr=0.08, alpha=0.0), 10)
    train_optimizer(muon, Muon(muon, lr=0.08), 10)
    train_reference(plain, 10, K=4, alpha=0.0)
    assert max(relative_errors(go, muon).values()) < 1e-10
    assert max(relative_errors(muon, plain).values()) < 1e-10


def test_stacking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal shapes in one call, or each layer alone: the same result."""
    stacked, alone = transformer(), transformer()
    train(stacked, GoMuon(stacked), range(6))

    def one_by_one(items: list[object], key: object) -> list[list[object]]:
        return [[item] for item in items]

    monkeypatch.setattr("gomuon.parameters.stacks.group_by_key", one_by_one)
    train(alone, GoMuon(alone), range(6))
    assert max(relative_errors(stacked, alone).values()) < 1e-12


def test_one_side_can_be_switched_off() -> None:
    """alpha = (0, ¼) never forms B, alpha = (¼, 0) never forms A."""
    for alpha, absent in (((0.0, 0.25), "left_map"), ((0.25, 0.0), "right_map")):
        model = transformer()
        optimizer = GoMuon(model, alpha=alpha)
        train(model, optimizer, range(2))
        state = optimizer.state[model.trunk.blocks[0].get_parameter("attention.q.weight")]
        maps: set[str] = {key for key in state if key.endswith("_map")}
        assert maps == {"left_map", "right_map"} - {absent}
        assert isinstance(state["momentum"], Tensor)

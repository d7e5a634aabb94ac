"""Gradients on an accelerator are checked without waiting for it; the CPU stands in for one."""

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, Muon, NonFiniteGradientError
from gomuon.functional import linalg
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters import late_check
from gomuon.parameters.late_check import LateCheck


def named(*gradients: Tensor) -> list[tuple[str, Tensor]]:
    return [(f"g{i}", gradient) for i, gradient in enumerate(gradients)]


NAN, GOOD = torch.tensor([1.0, float("nan")]), torch.ones(2, 3)


def test_an_answer_names_step_and_gradients() -> None:
    check = LateCheck()
    assert check.answers() == []
    assert bool(check.ask(1, named(GOOD, GOOD), []))
    assert not check.ask(2, named(GOOD, NAN, NAN), [])
    first, second = check.answers()
    assert (first.step, first.bad, first.overflowed) == (1, (), False)
    assert (second.step, second.bad, second.overflowed) == (2, ("g1", "g2"), False)
    assert check.answers() == []  # each is read once


def test_results_left_out_by_the_last_step_are_not_the_gradients_fault() -> None:
    check = LateCheck()
    masks = [torch.tensor([False, True]), torch.tensor([False])]
    assert bool(check.ask(1, named(GOOD), masks))
    assert check.answers()[0].overflowed
    assert bool(check.ask(2, named(GOOD), masks[1:]))
    assert not check.answers()[0].overflowed


@pytest.mark.parametrize(
    ("gradient", "usable"),
    [
        (torch.full((2,), 1e4, dtype=torch.float16), True),  # squares overflow float16 only
        (torch.full((2,), 1e30), False),
        (torch.full((2,), 1e30, dtype=torch.float64), True),
        (torch.tensor([float("inf")]), False),
    ],
)
def test_a_gradient_is_usable_if_its_squares_can_be_summed(gradient: Tensor, usable: bool) -> None:
    assert bool(LateCheck().ask(1, named(gradient), [])) is usable


def test_an_answer_that_has_not_arrived_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened = False

    class Event:
        def query(self) -> bool:
            return happened

    monkeypatch.setattr(late_check, "_recorded_event", lambda device: Event())
    check = LateCheck()
    check.ask(1, named(NAN), [])
    check.ask(2, named(GOOD), [])
    assert check.answers() == []
    happened = True
    assert [answer.step for answer in check.answers()] == [1, 2]
    check.ask(3, named(NAN), [])
    check.forget()
    assert check.answers() == []


# ---- in a step -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "decomposes_well", lambda device: False)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: MatrixOptimizer, *, bad: bool = False) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if bad:
        gradient = model.get_parameter("2.weight").grad
        assert gradient is not None
        gradient[0, 0] = float("nan")
    optimizer.step()


@pytest.mark.parametrize("kind", [GoMuon, Muon])
def test_the_error_comes_at_the_next_step_and_no_weight_is_lost(
    kind: type[MatrixOptimizer],
) -> None:
    model = net()
    optimizer = kind(model)
    step(model, optimizer)
    step(model, optimizer, bad=True)  # nothing is read, so nothing is raised
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteGradientError, match=r"'2\.weight' was not finite in step 2; all"):
        step(model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    step(model, optimizer)  # the user may go on
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_bad_step_is_a_step_without_gradients() -> None:
    model, twin = net(), net()
    ours, theirs = (Muon(m, nonfinite="skip") for m in (model, twin))
    for _ in range(2):
        step(model, ours)
        step(twin, theirs)
    step(model, ours, bad=True)
    theirs.zero_grad()
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)
    theirs.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_skipped_steps_are_counted_when_they_are_known() -> None:
    model = net()
    optimizer = GoMuon(model, nonfinite="skip")
    step(model, optimizer, bad=True)
    assert all("skipped" not in group for group in optimizer.param_groups)
    with pytest.warns(UserWarning, match="taken as zero"):
        step(model, optimizer)
    assert all(group["skipped"] == 1 for group in optimizer.param_groups)
    step(model, optimizer)
    assert all(group["skipped"] == 1 for group in optimizer.param_groups)


def test_who_allows_them_gets_them() -> None:
    model = net()
    optimizer = Muon(model, nonfinite="allow")
    step(model, optimizer, bad=True)
    step(model, optimizer)
    assert not all(bool(p.isfinite().all()) for p in model.parameters())

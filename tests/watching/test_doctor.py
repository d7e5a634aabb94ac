"""Each finding is provoked, and a healthy run has none."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gomuon import GoMuon, Muon
from gomuon.optimizer import MatrixOptimizer
from gomuon.watching import doctor
from gomuon.watching.findings import WIDTH, Diagnosis, Finding
from gomuon.watching.watch import Watch
from tests.models import train, transformer

ROOT = Path(__file__).parents[2]


def teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


class Regression:
    """A small problem without norms: a network of two hidden matrices learns another network."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        sizes = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
        self.model = nn.Sequential(*sizes).to(dtype)
        self.teacher, self.dtype = teacher(), dtype

    def step(
        self, optimizer: MatrixOptimizer, seed: int, *, scale: float = 1.0, rows: int = 64
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 12, generator=generator)
        target = self.teacher(x).detach().to(self.dtype)
        optimizer.zero_grad()
        (scale * (self.model(x.to(self.dtype)) - target).square().mean()).backward()
        optimizer.step()


def run(
    settings: dict[str, Any],
    steps: int = 60,
    *,
    dtype: torch.dtype = torch.float32,
    change: Callable[[nn.Sequential], Any] = lambda model: None,
    outlier: int = -1,
    rows: int = 64,
    method: type[MatrixOptimizer] = GoMuon,
) -> Diagnosis:
    problem = Regression(dtype)
    change(problem.model)
    optimizer = method(problem.model, **{"lr": 0.02, **settings})
    optimizer.watch(every=5, spectra=1)
    for step in range(steps):
        problem.step(optimizer, step, scale=1e3 if step == outlier else 1.0, rows=rows)
    return optimizer.doctor()


def kinds(found: Diagnosis) -> dict[str, list[str]]:
    by_kind: dict[str, list[str]] = {}
    for finding in found:
        by_kind.setdefault(finding.kind, []).append(finding.layer)
    return by_kind


def test_a_healthy_run_has_no_findings() -> None:
    found = run({})
    assert found == ()
    assert str(found) == "Nothing looks wrong."


@pytest.mark.parametrize("method", ["Muon", "KFAC", "Shampoo", "SOAP"])
def test_nor_have_other_methods(method: str) -> None:
    import gomuon

    assert kinds(run({"lr": 0.01}, method=getattr(gomuon, method))) == {}


def test_without_a_watch_only_states_are_looked_at() -> None:
    problem = Regression()
    optimizer = GoMuon(problem.model, lr=1e-9)
    for step in range(5):
        problem.step(optimizer, step)
    found = optimizer.doctor()
    assert found == ()
    assert "call optimizer.watch() before training" in str(found).replace("\n", " ")


def test_before_the_first_step_nothing_is_said() -> None:
    assert GoMuon(Regression().model).doctor() == ()


def test_a_layer_that_is_never_captured() -> None:
    """Its weight is used without the module, by a function that is no product."""
    with pytest.warns(match="nothing was captured"):
        problem = Regression()
        layer = problem.model[2]
        weight = layer.get_parameter("weight")

        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.layer, self.last = problem.model[0], layer, problem.model[4]

            def forward(self, x: Tensor) -> Tensor:
                hidden = torch.tanh(self.first(x)).unsqueeze(-2)
                return self.last(torch.tanh((hidden * weight).sum(-1)))

        problem.model = Around()  # type: ignore[assignment]
        optimizer = GoMuon(problem.model, lr=0.02)
        optimizer.watch(every=5)
        for step in range(10):
            problem.step(optimizer, step)
    found = optimizer.doctor()
    assert kinds(found) == {"never captured": ["layer.weight"]}
    assert found[0].do.startswith("Its module was not called")


def test_rates() -> None:
    low = run({"lr": 1e-7})
    assert set(kinds(low)) == {"rate far too low"}
    assert "lr_scale" in low[0].do
    high = run({"lr": 20.0})
    assert "rate far too high" in kinds(high)


def test_a_rate_that_a_schedule_has_lowered_is_no_finding() -> None:
    problem = Regression()
    optimizer = GoMuon(problem.model, lr=0.02)
    optimizer.watch(every=2)
    for step in range(30):
        optimizer.param_groups[0]["lr"] = 0.02 if step < 15 else 1e-9
        problem.step(optimizer, step)
    assert kinds(optimizer.doctor()) == {}


def test_updates_that_bfloat16_rounds_away() -> None:
    found = run({"lr": 2e-5}, dtype=torch.bfloat16)
    assert "updates lost to rounding" in kinds(found)
    assert "updates lost to rounding" not in kinds(run({"lr": 0.02}, dtype=torch.bfloat16))


def test_one_batch_dominates() -> None:
    found = run({}, outlier=56)
    by_kind = kinds(found)
    assert set(by_kind) == {"average of one batch"}
    assert "one like the others would be 11%" in found[0].what
    short = run({"factor_decay": 0.5})
    assert set(kinds(short)) == {"average of one batch"}
    assert "factor_decay=0.5 over 4 steps leaves 6%" in short[0].what


def test_a_constant_null_space() -> None:
    """Inputs of the first layer that are always zero."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(12)
            mask[:4] = 0
            return super().forward(x * mask)

    def change(model: nn.Sequential) -> None:
        torch.manual_seed(0)
        model[0] = Masked(12, 16)

    found = run({"polar": "exact"}, change=change)
    assert kinds(found) == {"constant null space": ["0.weight"]}
    assert "4 of 12 directions" in found[0].what
    completed = run({"polar": "svd"}, change=change)
    assert "moves them nevertheless" in completed[0].what
    assert 'polar="exact"' in completed[0].do


def test_fewer_rows_than_dimensions() -> None:
    found = run({}, rows=14)
    assert "fewer rows than dimensions" in kinds(found)
    assert "A has 14 rows for a side of 16" in found[-1].what
    averaged = run({"input_decay": 0.97}, rows=14)
    assert "fewer rows than dimensions" not in kinds(averaged)


def test_failures_and_skipped_steps() -> None:
    problem = Regression()
    optimizer = Muon(problem.model, nonfinite="skip")
    optimizer.watch()
    for step in range(12):
        problem.step(optimizer, step)
    assert kinds(optimizer.doctor()) == {}
    optimizer.state[problem.model.get_parameter("0.weight")]["failures"] = 3
    optimizer.param_groups[0]["skipped"] = 2
    found = optimizer.doctor()
    assert kinds(found) == {
        "results that were not finite": ["0.weight"],
        "many skipped steps": ["0.weight", "2.weight"],
    }


def test_it_prints_at_80_columns() -> None:
    one = Finding(
        "trunk.blocks.0.mlp.up.weight", "rate far too low", "x " * 60, "y " * 50, "z " * 99
    )
    others = [replace(one, layer=f"trunk.blocks.{i}.mlp.up.weight") for i in range(1, 9)]
    text = str(Diagnosis.of([one, *others], "n " * 70))
    assert max(map(len, text.splitlines())) <= WIDTH == 80
    assert text.startswith("Rate far too low (9 layers)")
    assert "trunk.blocks.8.mlp.up.weight" in text
    assert "why" in text


def test_the_spans_are_those_that_were_measured() -> None:
    found = json.loads((ROOT / "results" / "watch" / "ratios.json").read_text())["span"]
    for span, name in ((doctor.RATIOS, "ratio"), (doctor.LENGTHS, "length")):
        assert span == pytest.approx(found[name], rel=0.05)


def test_a_transformer_with_norms_has_no_other_finding_than_its_null_space() -> None:
    model = transformer(dtype=torch.float32)
    optimizer = GoMuon(model)
    watch = optimizer.watch(every=5, spectra=1)
    train(model, optimizer, range(40))
    assert isinstance(watch, Watch)
    assert set(kinds(optimizer.doctor())) <= {"constant null space"}

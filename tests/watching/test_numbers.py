"""Every number of a record is what it is said to be, computed from the optimizer's state."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gomuon import GoMuon, Muon
from gomuon.functional import frobenius_graft, matched_direction, oas, theory, weighted_norm
from gomuon.functional.block_diagonal import whole_matrix
from gomuon.lab.verification.drift_statements import efficiency
from gomuon.optimizer import MatrixOptimizer
from gomuon.watching.records import WatchRecord
from tests.methods.table import make
from tests.models import language_loss, mlp, train, transformer

K = 2
RTOL = 2e-3  # ‖X‖_op is estimated to .1 %; the steps compute in float64


@dataclass(frozen=True)
class Taken:
    """A layer after a step: what the step used, by plain formulas."""

    W: Tensor
    G: Tensor
    M: Tensor
    maps: list[Tensor]

    @classmethod
    def of(cls, optimizer: MatrixOptimizer, W: Tensor) -> "Taken":
        state, beta = optimizer.state[W], optimizer.param_groups[0]["momentum"]
        assert W.grad is not None
        M = (1 - beta) * W.grad + beta * state["momentum"].reshape(W.shape)
        maps = [
            whole_matrix(state[name], d)[0] if name in state else torch.eye(d).double()
            for name, d in zip(("left_map", "right_map"), W.shape, strict=True)
        ]
        return cls(W.detach().clone(), W.grad.clone(), M, maps)

    @property
    def D(self) -> Tensor:
        return direction(self.M, self.maps)


def direction(M: Tensor, maps: list[Tensor]) -> Tensor:
    return frobenius_graft(matched_direction(M, *maps))


def close(found: float | None, exact: Any, rtol: float = RTOL) -> None:
    assert found is not None
    assert math.isclose(found, float(exact), rel_tol=rtol, abs_tol=1e-12), (found, float(exact))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 7},
        {"block_size": None},
        {"max_side": 16, "long_sides": "diagonal"},
        {"alpha": (0.0, 0.25)},
    ],
    ids=str,
)
def test_go_muon_by_theory_and_plain_svds(settings: dict[str, Any]) -> None:
    """Two windows of two steps. The second one's first step renews maps that are two steps old."""
    model = transformer(layers=1)
    optimizer = GoMuon(model, lr=0.05, refresh_every=K, polar="svd", **settings)
    watch = optimizer.watch(every=K, spectra=1)
    weights = {row.name: row.parameter for row in optimizer.routing_table().treated("matrix")}
    taken: list[dict[str, Taken]] = []
    for step in range(2 * K):
        train(model, optimizer, range(step, step + 1))
        taken.append({name: Taken.of(optimizer, W) for name, W in weights.items()})
    assert watch.latest.keys() == weights.keys()
    for name, record in watch.latest.items():
        assert (record.step, record.measured, record.age, record.covered) == (4, 3, 1, 2)
        check_lengths(record, taken[3][name])
        check_spectra(record, taken[2][name])
        check_drift(record, taken[1][name], taken[2][name])
    assert all(first.drift is None for first, _ in watch.history.values()), "there were no maps"


def check_lengths(record: WatchRecord, at: Taken) -> None:
    m, n = at.W.shape
    U = math.sqrt(max(1.0, m / n)) * at.D
    close(record.source_alignment, (at.M * at.D).sum(), 1e-8)
    close(record.gradient_alignment, (at.G * at.D).sum(), 1e-8)
    close(record.source_cosine, (at.M * U).sum() / (at.M.norm() * U.norm()), 1e-8)
    close(record.gradient_cosine, (at.G * U).sum() / (at.G.norm() * U.norm()), 1e-8)
    close(record.update_norm, U.norm(), 1e-8)
    close(record.weight_norm, at.W.norm(), 1e-8)
    close(record.update_ratio, 0.05 * U.norm() / at.W.norm(), 1e-8)
    close(record.lr, 0.05, 1e-8)
    close(record.polar_rank, min(m, n), 1e-6)


def check_spectra(record: WatchRecord, at: Taken) -> None:
    close(record.oracle_value, theory.oracle_value(at.M, *at.maps))
    close(record.radius, weighted_norm(at.D, *at.maps))
    assert record.duality_gap is not None
    assert abs(record.duality_gap) < RTOL
    assert record.source_rank == record.full_rank == min(at.M.shape)
    left, right = at.maps  # κ₂(P) = κ₂ of its factor to the power α
    C = torch.linalg.svdvals(left @ at.M @ right)
    close(record.source_spread, C.sum() ** 2 / C.square().sum())
    bound = theory.grafted_alignment_bound(right, left, at.M, 1.0)
    close(record.alignment_bound, bound)
    close(record.tightness, bound / (at.M * at.D).sum())
    sigma = torch.linalg.svdvals(at.W)
    close(record.weight_rank, sigma.sum() ** 2 / sigma.square().sum())
    close(record.input_map_condition, theory.condition_number(right))
    close(record.input_condition, theory.condition_number(right) ** 4, 4 * RTOL)
    assert record.input_raised == 0
    if torch.equal(left, torch.eye(len(left)).double()):
        assert record.output_condition is record.output_map_condition is None
    else:
        close(record.output_map_condition, theory.condition_number(left))
        assert record.output_raised == 0


def check_drift(record: WatchRecord, before: Taken, at: Taken) -> None:
    bound = theory.cached_efficiency_bound(*at.maps, *before.maps)
    close(record.drift, 1 / bound)
    close(record.efficiency_bound, bound)
    close(record.efficiency, efficiency(direction(at.M, before.maps), at.M, *at.maps))
    assert record.efficiency is not None
    assert float(bound) * (1 - RTOL) <= record.efficiency < 1 - 1e-6  # Proposition 7


def test_intensities_rows_and_the_share_of_one_batch() -> None:
    model = mlp(6, 9, 5, 2, bias=False)
    optimizer = GoMuon(model, refresh_every=1, factor_decay=0.75, block_size=None)
    watch = optimizer.watch(every=1, spectra=1)
    x, y = torch.randn(2, 11, 6, dtype=torch.float64), torch.randint(0, 2, (2, 11))
    layer = model[0]
    deltas: list[Tensor] = []
    layer.register_forward_hook(lambda m, _, out: out.register_hook(deltas.append) and None)
    name, before = "0.weight", None
    for step in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[step]), y[step]).backward()
        optimizer.step()
        record = watch.latest[name]
        delta = 11 * deltas[-1]
        A, B = x[step].T @ x[step] / 11, delta.T @ delta / 11
        close(record.input_intensity, oas(A, 11)[1], 1e-9)
        close(record.output_intensity, oas(B, 11)[1], 1e-9)
        assert (record.input_rows, record.output_rows) == (11, 11)
        assert (record.input_side, record.output_side) == (6, 9)
        averaged = optimizer.state[layer.get_parameter("weight")]["left_factor"][0].trace()
        share = 1.0 if before is None else 0.25 * B.trace() / averaged
        close(record.output_share, share, 1e-9)
        before = averaged


def test_what_the_polar_factor_does_with_the_null_space() -> None:
    """A gradient of rank 3 in a layer 6 × 8: "svd" completes it, "exact" leaves the rest alone."""
    for polar, moved in (("svd", 6), ("exact", 3)):
        layer = torch.nn.Linear(8, 6, bias=False)
        optimizer = Muon(torch.nn.Sequential(layer), polar=polar, routes={"*": "matrix"})
        watch = optimizer.watch(every=1, spectra=1)
        generator = torch.Generator().manual_seed(0)
        layer.weight.grad = torch.randn(6, 3, generator=generator) @ torch.randn(
            3, 8, generator=generator
        )
        optimizer.step()
        record = watch.latest["0.weight"]
        assert (record.source_rank, record.full_rank) == (3, 6)
        close(record.polar_rank, moved, 1e-4)


def test_methods_have_what_they_have() -> None:
    """Muon's oracle is the unweighted one; Shampoo has maps that drift, and no oracle."""
    found: dict[str, WatchRecord] = {}
    for name, settings in (("Muon", {}), ("Shampoo", {"refresh_every": 2})):
        model = transformer(layers=1)
        optimizer = make(name, model, **settings)
        watch = optimizer.watch(every=2, spectra=1)
        train(model, optimizer, range(6))
        found[name] = watch.latest["trunk.blocks.0.mlp.up.weight"]
    muon, shampoo = found["Muon"], found["Shampoo"]
    assert muon.oracle_value is not None
    close(muon.alignment_bound, muon.oracle_value)
    assert (muon.age, muon.drift, muon.input_condition, muon.input_rows) == (None,) * 4
    assert (shampoo.oracle_value, shampoo.efficiency, shampoo.polar_rank) == (None,) * 3
    assert shampoo.drift is not None
    assert shampoo.drift > 1
    assert shampoo.output_condition is not None


def test_failures_and_fallbacks_are_those_of_the_state() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    watch = optimizer.watch(every=1)
    train(model, optimizer, range(1))
    name = "trunk.blocks.0.mlp.up.weight"
    W = dict(model.named_parameters())[name]
    optimizer.state[W] |= {"failures": 2, "root_fallbacks": 3}
    train(model, optimizer, range(1, 2))
    assert (watch.latest[name].failures, watch.latest[name].fallbacks) == (2, 3)


def test_the_rate_may_be_a_tensor() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model, lr=torch.tensor(0.03))
    watch = optimizer.watch(every=1)
    language_loss(model, 0).backward()
    optimizer.step()
    close(next(iter(watch.latest.values())).lr, 0.03, 1e-6)


def test_records_and_dicts() -> None:
    model = transformer(layers=1)
    optimizer = GoMuon(model)
    watch = optimizer.watch(every=1, spectra=1)
    train(model, optimizer, range(1))
    record = next(iter(watch.latest.values()))
    assert WatchRecord.from_dict({**record.as_dict(), "of a later version": 1}) == record
    with pytest.raises(ValueError, match="this is no record of a watched layer"):
        WatchRecord.from_dict({"step": 3})
    numbers = record.numbers()
    assert numbers["oracle_value"] == record.oracle_value
    assert not {"layer", "step", "rows", "drift"} & set(numbers)

"""`gomuon verify`: checks the paper's theorems numerically on this machine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor, nn

from gomuon import GoMuon
from gomuon.functional import (
    frobenius_graft,
    inverse_root,
    matched_direction,
    oas,
    polar,
    theory,
    weighted_norm,
)
from gomuon.lab.bench.plain_loop import plain_go_muon
from gomuon.lab.errors import LabError
from gomuon.lab.flags import OptionalText
from gomuon.lab.input_checks import require_whole
from gomuon.lab.terminal import SafeConsole

ALPHA = 0.25
SHAPES = ((48, 32), (32, 48), (40, 40))
UPDATES = 12
MOST_SEEDS = 1_000  # takes about an hour


@dataclass(frozen=True)
class RandomMatrices:
    """Random matrices of a seed, on a device."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    def normal(self, *shape: int) -> Tensor:
        # Drawn on the CPU, so that every device gets the same numbers.
        generator = torch.Generator().manual_seed(1000 * self.seed + sum(shape))
        return torch.randn(*shape, generator=generator, dtype=self.dtype).to(self.device)

    def factor(self, d: int) -> Tensor:
        """A second moment [d, d] of 2d rows with columns of different scales."""
        rows = self.normal(2 * d, d) * torch.logspace(0, -1, d, dtype=self.dtype).to(self.device)
        return rows.mT @ rows / (2 * d)

    def conditioned(self, m: int, n: int, kappa: float) -> Tensor:
        """[m, n] with singular values from 1 down to 1/κ."""
        U, _, Vh = torch.linalg.svd(self.normal(m, n), full_matrices=False)
        sigma = torch.logspace(0, -math.log10(kappa), min(m, n), dtype=self.dtype)
        return (U * sigma.to(self.device)) @ Vh


@dataclass(frozen=True)
class Check:
    """A statement of the paper or of this package, and the largest residual it may have.

    `residual` computes the worst case for random matrices of one seed; 0 is perfect.
    """

    what: str
    where: str
    most: float
    residual: Callable[[RandomMatrices], float]


def problems(random: RandomMatrices) -> Iterable[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """M, A, B, P_B, P_A for every shape."""
    for m, n in SHAPES:
        A, B = random.factor(n), random.factor(m)
        yield random.normal(m, n), A, B, inverse_root(B, ALPHA), inverse_root(A, ALPHA)


def oracle_value(random: RandomMatrices) -> float:
    return max(
        _apart(_inner(M, matched_direction(M, left, right)), theory.oracle_value(M, left, right))
        for M, _, _, left, right in problems(random)
    )


def oracle_radius(random: RandomMatrices) -> float:
    return max(
        float(abs(weighted_norm(matched_direction(M, left, right), left, right) - 1))
        for M, _, _, left, right in problems(random)
    )


def cached_alignment(random: RandomMatrices) -> float:
    """How negative the alignment with the source becomes, relative to its nuclear norm."""
    later = RandomMatrices(random.device, random.dtype, random.seed + 1)
    worst = 0.0
    for (M, *_), (_, _, _, left, right) in zip(problems(random), problems(later), strict=True):
        aligned = _inner(M, matched_direction(M, left, right))
        worst = max(worst, float(-aligned / torch.linalg.matrix_norm(M, ord="nuc")))
    return worst


def grafted_bounds(random: RandomMatrices) -> float:
    """By how much the bounds of Proposition 5 are violated."""
    worst = 0.0
    for M, A, B, left, right in problems(random):
        D = frobenius_graft(matched_direction(M, left, right))
        lowest = theory.grafted_alignment_bound(A, B, M, ALPHA)
        highest = theory.grafted_condition_bound(A, B, ALPHA)
        worst = max(worst, float(lowest / _inner(M, D)) - 1)
        worst = max(worst, float(theory.condition_number(D) / highest) - 1)
    return worst


def roots(random: RandomMatrices) -> float:
    worst = 0.0
    for _, A, _, _, right in problems(random):
        identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
        product = right @ right @ A @ right @ right
        worst = max(worst, float((product - identity).abs().max()))
    return worst


def shrinkage_bound(random: RandomMatrices) -> float:
    worst = 0.0
    for d in (8, 32):
        rows = random.normal(5, d)  # fewer rows than dimensions: singular without shrinkage
        shrunk, intensity = oas(rows.mT @ rows / 5, 5)
        bound = theory.oas_condition_bound(d, intensity)
        worst = max(worst, float(theory.condition_number(shrunk) / bound) - 1)
    return worst


def label_mismatch(random: RandomMatrices) -> float:
    q, p = (3 * random.normal(2, 7)).softmax(-1)
    moments = []
    for weights in (q, p):
        deltas = p - torch.eye(7, dtype=p.dtype, device=p.device)
        moments.append((deltas.mT * weights) @ deltas)
    mismatch = moments[0] - moments[1]
    apart = float((mismatch - theory.observed_label_mismatch(q, p)).abs().max())
    above = torch.linalg.matrix_norm(mismatch, ord=2) - theory.observed_label_mismatch_bound(q, p)
    return max(apart, float(above))


def sparse_average(random: RandomMatrices) -> float:
    """Difference to the paper's printed values 3.99537 and 32.3714."""
    found = theory.sparse_variance_ratio(0.97, 4), theory.sparse_lag(0.97, 4)
    return max(abs(found[0] - 3.99537), abs(found[1] - 32.3714) / 10)


def accurate_polar(random: RandomMatrices) -> float:
    """polar="exact" in float32 against the SVD in float64, up to a condition number of 1e4."""
    worst = 0.0
    for m, n in SHAPES:
        for kappa in (10.0, 1e3, 1e4):
            X = random.conditioned(m, n, kappa).float()
            U, _, Vh = torch.linalg.svd(X.cpu().double(), full_matrices=False)
            exact = U @ Vh
            found = polar(X, "exact").cpu().double()
            worst = max(worst, float((found - exact).norm() / exact.norm()))
    return worst


def plain_loop(random: RandomMatrices) -> float:
    """Difference of the weights after some updates to those of a plain loop over layers."""
    torch_state = torch.random.get_rng_state()
    torch.manual_seed(random.seed)
    model = nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 8, bias=False))
    torch.random.set_rng_state(torch_state)
    plain = model.to(random.dtype)
    ours = copy.deepcopy(plain).to(random.device)
    optimizer = GoMuon(ours, lr=0.05, routes={"*": "matrix"}, polar="svd")
    script = plain_go_muon(plain, lr=0.05)
    for update in range(UPDATES):
        batch = RandomMatrices(random.device, random.dtype, 100 * random.seed + update + 1)
        x, y = batch.normal(32, 12), batch.normal(32, 8)
        for network, stepper in ((ours, optimizer), (plain, script)):
            device = next(network.parameters()).device
            # A mean over rows alone, as a cross-entropy's.
            error = (network(x.to(device)) - y.to(device)).square().sum(-1).mean()
            stepper.zero_grad()
            error.backward()
            stepper.step()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max(float((a.detach().cpu() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)


CHECKS = (
    Check("⟨M, D₀⟩ = ‖P_B M P_A‖_*", "Theorem 1", 1e-9, oracle_value),
    Check("q_P(D₀) = 1", "Theorem 1, Equation (2)", 1e-9, oracle_radius),
    Check("cached maps never oppose their source", "Corollary 2", 0.0, cached_alignment),
    Check(
        "observed labels miss the Fisher by at most 3‖q−p‖", "Proposition 3", 1e-9, label_mismatch
    ),
    Check("alignment and conditioning after grafting", "Proposition 5", 1e-9, grafted_bounds),
    Check("variance and lag of the sparse average", "Proposition 6", 5e-6, sparse_average),
    Check("condition number after OAS", "Equation (19)", 1e-9, shrinkage_bound),
    Check("P_A⁴·A = I", "P_A = A^(−1/4)", 1e-9, roots),
    Check('polar="exact" in float32 is the exact one', "this package", 1e-5, accurate_polar),
    Check("the optimizer is the plain loop", '"Complete update"', 1e-8, plain_loop),
)


def verify(device: OptionalText = "cpu", seeds: int = 5) -> None:
    """Check numerically what the paper proves and what this package promises.

    Each line uses random matrices of every seed, in float64 unless it says otherwise, and shows the
    worst residual and the largest one allowed. Takes some seconds.

    Args:
        device: Such as cpu or cuda; it must support float64.
        seeds: Number of sets of random matrices.
    """
    require_whole("--seeds", seeds, most=MOST_SEEDS)
    target = _device(device)
    table = Table(title=f"on {target}, {seeds} seed{'s' if seeds > 1 else ''}")
    for head, side in (("", "left"), ("from", "left"), ("worst", "right"), ("at most", "right")):
        table.add_column(head, justify=side, overflow="fold")  # type: ignore[arg-type]
    table.add_column("")
    failed = []
    for check in CHECKS:
        worst = max(
            check.residual(RandomMatrices(target, torch.float64, seed)) for seed in range(seeds)
        )
        holds = worst <= check.most  # False for NaN
        failed += [] if holds else [check.what]
        verdict = "holds" if holds else "FAILS"
        table.add_row(check.what, check.where, f"{worst:.1e}", f"{check.most:.0e}", verdict)
    SafeConsole().print(table, markup=False)
    if failed:
        raise LabError(
            f"{len(failed)} of {len(CHECKS)} checks fail here: {'; '.join(failed)}. Please report "
            "this table with your versions of torch, driver and BLAS"
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).sum().item()
    except Exception as error:  # a backend may raise anything
        reason = " ".join(str(error).split())[:120]
        raise LabError(f"--device {name!r} cannot be used in float64: {reason}") from None
    return device


def _inner(X: Tensor, Y: Tensor) -> Tensor:
    return (X * Y).sum()


def _apart(a: Tensor, b: Tensor) -> float:
    return float(abs(a - b) / abs(b))

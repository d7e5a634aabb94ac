"""The statements that are also checked on a live run, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.functional import (
    frobenius_graft,
    inverse_root,
    matched_direction,
    oas,
    theory,
    weighted_norm,
)
from gomuon.lab.verification.drift_statements import efficiency
from gomuon.lab.verification.factor_statements import second_moment
from gomuon.lab.verification.live_run import LayerStep, run
from gomuon.lab.verification.statement import (
    at_most,
    equal,
    frobenius,
    inner,
    nuclear,
    operator,
    same_matrix,
)

VANISHING = 0.1  # what must be left of the error of B̂ at the end of a run, over its start
Check = Callable[[LayerStep], Tensor | None]  # the slack, or None where the step says nothing


@dataclass
class Tally:
    """How often a statement was checked, and its least slack."""

    count: int = 0
    slack: float = math.inf

    def add(self, slack: Tensor) -> None:
        self.count += slack.numel()
        least = float(slack.amin())
        self.slack = least if math.isnan(least) else min(self.slack, least)


def watch(device: torch.device, seeds: int) -> dict[str, Tally]:
    """Train with each seed, and check every statement wherever it applies."""
    tallies = {name: Tally() for name in (*CHECKS, *OF_A_RUN)}
    for seed in range(seeds):
        steps = list(run(device, seed))
        for happened in steps:
            for layer in happened:
                for name, check in CHECKS.items():
                    if (slack := check(layer)) is not None:
                        tallies[name].add(slack)
        for layers in zip(*steps, strict=True):
            for name, check_all in OF_A_RUN.items():
                for slack in check_all(layers):
                    tallies[name].add(slack)
    return tallies


# ---- of a step -----------------------------------------------------------------------------------


def oracle(step: LayerStep) -> Tensor:
    """⟨M̂, D̂⟩ = q_P(D̂)·‖C‖_*: the graft keeps D₀'s ray."""
    left, right = step.maps
    radius = weighted_norm(step.direction, left, right)
    scale = operator(left) * nuclear(step.source) * operator(right)
    value = radius * theory.oracle_value(step.source, left, right)
    return equal(inner(step.source, step.direction), value, radius * scale)


def cached(step: LayerStep) -> Tensor | None:
    """The same with maps from an earlier step, and ⟨M̂, D̂⟩ is positive."""
    if step.refreshed:
        return None
    left, right = step.maps
    radius = weighted_norm(step.direction, left, right)
    least = [torch.linalg.eigvalsh(P)[0] for P in step.maps]
    scale = operator(left) * nuclear(step.source) * operator(right)
    above = inner(step.source, step.direction) / radius - least[0] * least[1] * nuclear(step.source)
    return torch.minimum(oracle(step), above / scale)


def alignment(step: LayerStep) -> Tensor:
    left, right = step.maps  # κ₂(P) = κ₂ of its factor to the power α
    bound = theory.grafted_alignment_bound(right, left, step.source, 1.0)
    return at_most(bound, inner(step.source, step.direction))


def conditioning(step: LayerStep) -> Tensor:
    left, right = step.maps
    bound = theory.grafted_condition_bound(right, left, 1.0)
    return at_most(theory.condition_number(step.direction), bound)


def energy(step: LayerStep) -> Tensor:
    wanted = torch.full_like(frobenius(step.direction), math.sqrt(min(step.direction.shape)))
    return equal(frobenius(step.direction), wanted, wanted)


def multiples(step: LayerStep) -> Tensor | None:
    """Multiples of the maps give the direction that the optimizer took."""
    if not step.full_rank:
        return None
    left, right = step.maps
    D = frobenius_graft(matched_direction(step.source, 3 * left, right / 7))
    return same_matrix(D, step.direction, frobenius(D))


def other_bases(step: LayerStep) -> Tensor | None:
    """In other bases it is the same direction in these bases."""
    if not step.full_rank:
        return None
    U, V = (_some_rotation(side) for side in step.maps)
    left, right = U @ step.maps[0] @ U.mT, V @ step.maps[1] @ V.mT
    D = frobenius_graft(matched_direction(U @ step.source @ V.mT, left, right))
    return same_matrix(U.mT @ D @ V, step.direction, frobenius(D))


def shrunk(step: LayerStep) -> Tensor | None:
    """The maps' own condition numbers: P_A's, and P_B's before anything was averaged."""
    if not step.refreshed:
        return None
    sides = [(step.maps[1], step.inputs)]
    if not step.held:
        sides.append((step.maps[0], step.deltas))
    slacks = []
    for P, rows in sides:
        _, intensity = oas(second_moment(rows), len(rows))
        bound = torch.as_tensor(theory.oas_condition_bound(len(P), intensity))
        slacks.append(at_most(theory.condition_number(P).pow(1 / step.settings["alpha"]), bound))
    return torch.stack(slacks)


def roots(step: LayerStep) -> Tensor | None:
    """P_B⁴B̄ = I and P_A⁴A = I."""
    if not step.refreshed:
        return None
    A, _ = oas(second_moment(step.inputs), len(step.inputs))
    power = round(1 / step.settings["alpha"])
    slacks = []
    for P, S in zip(step.maps, (step.factor, A), strict=True):
        raised = torch.linalg.matrix_power(P, power) @ S
        identity = torch.eye(len(S), dtype=S.dtype, device=S.device)
        slacks.append(same_matrix(raised, identity, theory.condition_number(S)))
    return torch.stack(slacks)


def parts(step: LayerStep) -> Tensor | None:
    """The error of the factor that P_B was made of is within its four parts."""
    if not step.refreshed:
        return None
    alpha = step.settings["alpha"]
    estimated = second_moment(step.deltas)
    current = inverse_root(oas(estimated, len(step.deltas))[0], alpha)
    cached = effective_factor(step.maps[0], alpha)
    truth = step.truth
    terms = theory.factor_error_terms(
        cached, effective_factor(current, alpha), estimated, truth.observed, truth.fisher
    )
    return at_most(operator(cached - truth.fisher), terms.sum(-1))


def mismatch(step: LayerStep) -> Tensor | None:
    """Of the logits, where J is the identity."""
    return None if step.full_rank else at_most(step.truth.mismatches, step.truth.bounds)


def hidden(step: LayerStep) -> Tensor | None:
    return at_most(step.truth.mismatches, step.truth.bounds) if step.full_rank else None


def drift(step: LayerStep) -> Tensor | None:
    """What the directions since the last refresh are worth in the ball of the new maps."""
    shares = [
        torch.minimum(
            at_most(theory.cached_efficiency_bound(*step.maps, *old.maps), share), 1 - share
        )
        for old in step.held
        for share in (efficiency(old.direction, old.source, *step.maps),)
    ]
    return torch.stack(shares) if shares else None


def _some_rotation(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(like))
    drawn = torch.randn(len(like), len(like), generator=generator, dtype=like.dtype)
    return torch.linalg.qr(drawn).Q.to(like.device)


def effective_factor(P: Tensor, alpha: float) -> Tensor:
    """The factor P^(−1/α) whose root the map P is, floor included."""
    values, V = torch.linalg.eigh(P)
    return (V * values.pow(-1 / alpha)) @ V.mT


# ---- of a whole run ------------------------------------------------------------------------------


def averages(steps: Sequence[LayerStep]) -> Iterator[Tensor]:
    """B̄_t = β^K B̄_{t−K} + (1 − β^K)B_t at every refresh."""
    average: Tensor | None = None
    for step in steps:
        if step.refreshed:
            B, _ = oas(second_moment(step.deltas), len(step.deltas))
            decay = step.settings["factor_decay"] ** step.settings["refresh_every"]
            average = B if average is None else decay * average + (1 - decay) * B
        assert average is not None
        yield same_matrix(step.factor, average, frobenius(average))


def consistency(steps: Sequence[LayerStep]) -> Iterator[Tensor]:
    """‖B̂ − B_F‖ is within its bound at every step, and a small part of itself at the end."""
    errors = []
    for step in steps:
        estimated, truth = second_moment(step.deltas), step.truth
        errors.append(operator(estimated - truth.fisher))
        sampling = operator(estimated - truth.observed)
        yield at_most(errors[-1], sampling + truth.bounds.mean())
    few = max(1, len(errors) // 8)  # one batch alone may be lucky
    first, last = (torch.stack(some).mean() for some in (errors[:few], errors[-few:]))
    yield at_most(last, VANISHING * first)


CHECKS: dict[str, Check] = {
    "matched oracle": oracle,
    "cached geometry": cached,
    "mismatch ≤ 3‖q − p‖": mismatch,
    "hidden layer ≤ 3‖J‖²‖q − p‖": hidden,
    "grafted alignment": alignment,
    "grafted conditioning": conditioning,
    "graft keeps the ray": energy,
    "scalar invariance": multiples,
    "orthogonal equivariance": other_bases,
    "condition number after OAS": shrunk,
    "four parts of factor error": parts,
    "root maps": roots,
    "cached oracle under drift": drift,
}
OF_A_RUN: dict[str, Callable[[Sequence[LayerStep]], Iterator[Tensor]]] = {
    "factor consistency": consistency,
    "complete update": averages,
}

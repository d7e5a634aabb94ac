"""Eigenbases and eigenvalues of gradient Grams, each whitened by the other: KL-Shampoo's."""

from typing import ClassVar

import torch
from torch import Tensor

from gomuon.functional.oracle import preconditioned
from gomuon.geometry.base import Group
from gomuon.geometry.rotating_basis import (
    RotatingBasis,
    SideName,
    average_factor,
    sides_with_basis,
)
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Entries, both_sides


class CoupledBasis(RotatingBasis):
    """L ← E[G R⁻¹Gᵀ]/n and R ← E[Gᵀ L⁻¹G]/m, with eigenvectors Q and eigenvalues λ of both.

    The averages minimise the Kullback–Leibler divergence of 𝒩(0, L⊗R) from the gradients'
    covariance (Lin et al. 2025). The inverses are Q λ⁻¹ Qᵀ of the step before. Eigenvectors follow
    the factors by a power step and QR now and then, eigenvalues are averaged in every step: those
    of L are the mean squares of the rows of (Q_Lᵀ G Q_R) λ_R^(−½).

    The first step takes plain Grams, and eigenvalues of `first_values`. A side longer than
    `max_side` is the identity.
    """

    description = "coupled gradient Gram moments and their eigenbasis"
    sorts = False
    entries: ClassVar[Entries] = {
        **RotatingBasis.entries,
        **both_sides("values", form="values", numbers="not negative"),
    }

    def average(self, stack: Stack, group: Group) -> None:
        G, sides = stack.G, sides_with_basis(stack, group)
        is_first = all(stack.map(f"{side}_basis") is None for side in sides)
        Q_L, Q_R = stack.map("left_basis"), stack.map("right_basis")
        scale_L, scale_R = inverse_roots(stack, "left"), inverse_roots(stack, "right")
        rows = preconditioned(G, None if Q_L is None else Q_L.mT, None)
        columns = preconditioned(G, None, Q_R)
        # XXᵀ is G R⁻¹Gᵀ for X = G Q_R λ_R^(−½). All are of the values of the step before.
        whitened = {"left": scaled(columns, scale_R), "right": scaled(rows, scale_L)}
        rotated = columns if Q_L is None else preconditioned(rows, None, Q_R)
        for side in sides:
            is_left, X = side == "left", whitened[side]
            d, other = stack.shape if is_left else stack.shape[::-1]
            average_factor(stack, side, (X @ X.mT if is_left else X.mT @ X) / other, group)
            start = G.new_full((len(G), d), group["first_values"])
            values = stack.factor(f"{side}_values", start=start)
            if not is_first:
                squares = scaled(rotated, scale_R if is_left else scale_L).square()
                observed = squares.mean(-1 if is_left else -2)  # diag(Qᵀ·XXᵀ·Q)/other
                new = values.lerp(observed, 1 - group["factor_decay"])
                stack.remember(values, new.clamp_min(_least(d, group)))


def scaled(X: Tensor, scale: Tensor | None) -> Tensor:
    return X if scale is None else X * scale


def inverse_roots(stack: Stack, side: SideName) -> Tensor | None:
    """λ^(−½), [b, m, 1] on the left and [b, 1, n] on the right; zero for an eigenvalue of zero."""
    values = stack.map(f"{side}_values")
    if values is None:
        return None
    roots = torch.where(values > 0, values.rsqrt(), 0.0)
    return roots.unsqueeze(-1 if side == "left" else -2)


def _least(d: int, group: Group) -> float:
    """The smallest eigenvalue that counts; its inverse root is then max(10, min(d, clamp))."""
    clamp = group["clamp"]
    return 0.0 if clamp is None else max(10.0, min(float(d), float(clamp))) ** -2

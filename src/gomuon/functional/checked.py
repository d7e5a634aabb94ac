"""The public functions. Each checks its arguments, then calls the function that computes.

The step calls those functions directly, without checks.
"""

import math
from typing import get_args

from torch import Tensor

from gomuon.functional import arguments, factors, oracle, polar_factor
from gomuon.functional.factors import RootMethod
from gomuon.functional.polar_factor import PolarMethod


def polar(X: Tensor, method: PolarMethod = "svd") -> Tensor:
    """Polar factor of X, the direction of Equation (1); X = 0 gives 0.

    At full rank every method computes the same matrix. They differ in the null space of X, where
    Theorem 1 leaves the choice open, and in how they compute. A matrix that holds NaN or infinity
    gives NaN; the other matrices of its batch are not affected.

    Args:
        X: [..., m, n], float32 or float64.
        method: which polar factor, and how it is computed.
            "fast": matrix products alone, in X's precision: six steps of Polar Express. Singular
            values above σ₁/1000 end within .01 of one, and what rounding put into the null space
            ends below .01; values in between end between zero and one. Where the hardware
            multiplies bfloat16 natively, the last two steps are in bfloat16.
            "exact": within 1e-5 of a float64 SVD up to a condition number of 1e4 for float32. The
            null space gives zero. "canonical" on the CPU; on other devices by products, the first
            of them in float64 where the device has it.
            "svd": UVᵀ of the compact SVD, the paper's choice. At rank deficiency it completes the
            null space to a semi-orthogonal matrix. Rounding decides which one.
            "canonical": the null space gives zero. Singular values below 32·ε·σ₁ count as zero,
            because rounding can make them from a true zero. ε is the precision of X's dtype. In
            `matched_direction`, where maps amplify the source's roundoff, what they can make of it
            counts as zero as well.
            "auto": "fast" for float32, "exact" for float64.

            "svd" and "canonical" use the float64 Gram matrix, which keeps more of the small
            singular values than a float32 SVD. If it does not keep enough, "svd" uses a LAPACK SVD.

    Raises:
        TypeError: X is not a dense tensor, or method is not a string.
        ValueError: X is not a float32 or float64 matrix, or the method is unknown.
        DecompositionError: the decomposition failed, also in float64.
    """
    arguments.matrix(X, "X")
    arguments.decomposable(X, "X")
    _check_known(method)
    return polar_factor.polar(X, method)


def matched_direction(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> Tensor:
    """D₀ = P_B·polar(P_B M P_A)·P_A, the exact oracle of Theorem 1: ⟨M, D₀⟩ = ‖P_B M P_A‖_*.

    Equation (4) at ρ = 1. It holds for any maps, cached ones too: Equation (6).

    Args:
        M: [..., m, n] the source.
        left: [..., m, m] symmetric positive definite P_B, or None for the identity.
        right: [..., n, n] symmetric positive definite P_A, or None for the identity.
        polar_method: see `polar`.

    Raises:
        TypeError: an argument is not a tensor, or polar_method is not a string.
        ValueError: shapes, dtypes or devices do not fit, or the method is unknown.
        DecompositionError: see `polar`.
    """
    M = arguments.sided(M, left, right)
    _check_known(polar_method, "polar_method")
    return oracle.matched_direction(M, left, right, polar_method=polar_method)[0]


def inside_only_direction(
    M: Tensor, left: Tensor | None, right: Tensor | None, *, polar_method: PolarMethod = "svd"
) -> Tensor:
    """polar(P_B M P_A) without the map back; ⟨M, D⟩ may be negative, as in Equation (8).

    Arguments and errors are those of `matched_direction`.
    """
    M = arguments.sided(M, left, right)
    _check_known(polar_method, "polar_method")
    return oracle.inside_only_direction(M, left, right, polar_method=polar_method)


def frobenius_graft(D: Tensor, rank: Tensor | None = None) -> Tensor:
    """D rescaled to ‖D‖_F = √min(m, n), Muon's update energy, Equation (14); 0 stays 0.

    With `rank` [...], the rank of the polar factor, the norm is √rank. At full rank this is the
    same. Below full rank Muon's own update has the norm √rank, and √min(m, n) would stretch the
    remaining directions.

    Raises:
        TypeError: D or rank is not a tensor.
        ValueError: D is not [..., m, n] or not floating-point, or rank does not have one number
            for each matrix.
    """
    arguments.matrix(D, "D")
    if rank is not None:
        arguments.floating(rank, "rank", "[...]", 0)
        arguments.same_dtype_and_device(rank, "rank", D, "D")
        if rank.shape != D.shape[:-2]:
            raise ValueError(
                f"rank must have one number for each matrix of D, shape {tuple(D.shape[:-2])}, got "
                f"shape {tuple(rank.shape)}"
            )
    return oracle.frobenius_graft(D, rank)


def weighted_norm(D: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """q_P(D) = ‖P_B⁻¹ D P_A⁻¹‖_op, Equation (2), the norm of the ball that D₀ is the oracle of.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not fit, or D has no entries.
        DecompositionError: left or right is singular, or a value is not finite.
    """
    D = arguments.sided(D, left, right, ("D", "left", "right"))
    arguments.not_empty(D, "D")
    return oracle.weighted_norm(D, left, right)


def inverse_root(
    S: Tensor,
    power: float,
    method: RootMethod = "eigh",
    max_condition: float | None = None,
) -> Tensor:
    """S^(−power) with a floor for small eigenvalues; power ¼ gives P_A, P_B, Equation (29).

    Args:
        S: [..., d, d] symmetric positive semi-definite, float32 or float64.
        power: at least 0; 0 gives the identity.
        method: how the root is computed.
            "eigh": by eigendecomposition. Eigenvalues below d·ε·λ_max are raised to that.
            "products": by matrix products in S's precision, five steps of polynomials for power ¼
            in float32. With ρ = tr(S⁴)^¼ ≥ λ_max, eigenvalues above 1e-5·ρ (float64: 1e-9·ρ) are
            inverted to a relative error of about 1e-5 (1e-10); below, there is a smooth floor: none
            counts as less than about 1e-6·ρ (1e-10·ρ). The power is rounded to a fraction with a
            denominator of at most 100. Matrices for which this fails (they are far from
            semi-definite) are decomposed. If you allow TF32 or bfloat16 for float32 products, it is
            switched off meanwhile.
            "auto": "eigh" on the CPU, "products" on other devices.

            In float32, from a condition number of 1e3 on "products" is the more accurate one.
        max_condition: a number above 1, or None. λ_max/(max_condition − 1) is added to every
            eigenvalue first, by either method, so that the condition number is at most
            max_condition. "products" estimates λ_max to a few per cent.

    Returns:
        [..., d, d] symmetric positive definite. The zero matrix gives the identity, because it has
        no scale.

    Raises:
        TypeError: S is not a tensor, power or max_condition is not a number, or method is not a
            string.
        ValueError: S is not square or not float32 or float64, power is negative, max_condition is
            not above 1, or the method is unknown.
        DecompositionError: the eigendecomposition failed, also in float64.
    """
    arguments.square(S, "S")
    arguments.decomposable(S, "S")
    power = arguments.number(power, "power must be a number, power >= 0", 0)
    arguments.method(method, "method")
    if method not in get_args(RootMethod):
        raise ValueError(f"root method must be one of {get_args(RootMethod)}, got {method!r}")
    if max_condition is not None:
        expected = "max_condition must be None or a number, max_condition > 1"
        max_condition = arguments.number(max_condition, expected, math.nextafter(1.0, 2.0))
    return factors.inverse_root(S, power, method, factors.shift_of(max_condition))


def oas(S: Tensor, n: int | float | Tensor) -> tuple[Tensor, Tensor]:
    """Oracle Approximating Shrinkage, Equations (17)–(18) (Chen et al. 2010).

    Args:
        S: [..., d, d] symmetric second moments.
        n: the number of samples in each S; a number, or a tensor that broadcasts over [...].

    Returns:
        (1−λ)S + λ·tr(S)/d·I and the intensity λ, [...]. If the denominator is zero (d = 1, S = 0,
        or S a multiple of the identity), every λ gives S, and λ = 1 is returned.

    Raises:
        TypeError: S is not a tensor, or n is not a number.
        ValueError: S is not square or empty, or n is a number below 1 or does not broadcast.
    """
    arguments.square(S, "S")
    arguments.not_empty(S, "S")
    arguments.weights(n, S, "n must be the number of samples, n >= 1, or a tensor of them", 1)
    return factors.oas(S, n)


def shrink(S: Tensor, intensity: float | Tensor) -> Tensor:
    """(1−λ)S + λ·tr(S)/d·I, Equation (18), for λ a number or a tensor that broadcasts over [...].

    Raises:
        TypeError: S is not a tensor, or intensity is not a number.
        ValueError: S is not square, or intensity is not finite or does not broadcast.
    """
    arguments.square(S, "S")
    arguments.weights(intensity, S, "intensity must be a finite number, or a tensor of them")
    return factors.shrink(S, intensity)


def _check_known(method: object, name: str = "method") -> None:
    arguments.method(method, name)
    if method not in get_args(PolarMethod):
        raise ValueError(f"polar method must be one of {get_args(PolarMethod)}, got {method!r}")

"""The support polar Q(C): a maximiser of ⟨C, U⟩ over ‖U‖_op ≤ 1 (Theorem 1)."""

from functools import partial
from itertools import chain, repeat
from typing import Literal, get_args

import torch
from torch import Tensor

from gomuon.functional.linalg import decompose

PolarMethod = Literal["svd", "canonical", "polar-express", "auto"]

_svd = partial(torch.linalg.svd, full_matrices=False)


def polar(X: Tensor, method: PolarMethod = "svd", *, steps: int = 16) -> Tensor:
    """Polar factor of X, the direction of Equation (1); X = 0 gives 0.

    Args:
        X: [..., m, n], float32 or float64.
        method: how it is computed.
            "svd": UVᵀ of the compact SVD, the paper's choice. At rank deficiency it completes the
            null space to a semi-orthogonal matrix.
            "canonical": the null space set to zero. Equal to "svd" at full rank. Singular values
            below max(m, n)·ε·σ₁ count as zero; roundoff of ill-conditioned maps may exceed that.
            "polar-express": matrix products only, for accelerators. Singular values below about
            1e-6 of ‖X‖_F stay below one.
            "auto": "svd" on the CPU, "polar-express" elsewhere.
        steps: iterations of "polar-express". Sixteen reach float32 accuracy at condition 1e4.

    Raises:
        ValueError: X is not a floating matrix, or the method is unknown.
        DecompositionError: the SVD failed, in float64 too.
    """
    if X.ndim < 2 or X.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"polar needs a float32 or float64 tensor [..., m, n], got {X.dtype} {tuple(X.shape)}"
        )
    if method == "auto":
        method = "svd" if X.device.type == "cpu" else "polar-express"
    if method == "svd":
        U, _, Vh = decompose(_svd, X)
        # LAPACK returns unit vectors for the zero matrix; the paper defines D₀ = 0 there.
        return (U @ Vh) * (X != 0).any(dim=(-2, -1), keepdim=True)
    if method == "canonical":
        U, sigma, Vh = decompose(_svd, X)
        # Singular values at roundoff scale belong to the null space (the usual numerical rank).
        floor = sigma[..., :1] * max(X.shape[-2:]) * torch.finfo(X.dtype).eps
        return (U * (sigma > floor).to(X.dtype).unsqueeze(-2)) @ Vh
    if method == "polar-express":
        return _polar_express(X, steps)
    raise ValueError(f"polar method must be one of {get_args(PolarMethod)}, got {method!r}")


# Minimax-optimal odd quintics for singular values in [1e-3, 1] (Polar Express, Amsel et al. 2025);
# the limit is the Newton–Schulz quintic, which converges cubically from there on.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_LIMIT = (1.875, -1.25, 0.375)


def _polar_express(X: Tensor, steps: int) -> Tensor:
    tall = X.shape[-2] > X.shape[-1]
    Y = X.mT if tall else X  # the Gram matrix is then the smaller one
    # Dividing by the largest entry first keeps the square sum of tiny or huge matrices in range.
    Y = Y / Y.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    Y = Y / torch.linalg.matrix_norm(Y, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    for _, (a, b, c) in zip(range(steps), chain(_POLAR_EXPRESS, repeat(_LIMIT)), strict=False):
        gram = Y @ Y.mT
        Y = a * Y + (b * gram + c * gram @ gram) @ Y
    return Y.mT if tall else Y

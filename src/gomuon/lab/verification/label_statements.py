"""Section 3.1: factors of observed labels, and what separates them from the Fisher factor."""

from __future__ import annotations

import torch
from torch import Tensor

from gomuon.functional import theory
from gomuon.lab.verification.adversary import Case
from gomuon.lab.verification.statement import (
    Statement,
    always,
    at_most,
    frobenius,
    operator,
    same_matrix,
    sometimes,
)
from gomuon.lab.verification.unknowns import Distribution, Numbers

CLASSES = (2, 3, 5)
HIDDEN = 4  # the width of a hidden layer
VANISHED = 1e-6  # a Fisher factor with a smaller norm is as good as gone
FAR = 0.5  # a relative difference that nobody takes for rounding


def label_moment(weights: Tensor, p: Tensor) -> Tensor:
    """E_{y∼weights}[(p − e_y)(p − e_y)ᵀ], [b, c, c], summed over the labels."""
    deltas = p.unsqueeze(-2) - torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return (deltas.mT * weights.unsqueeze(-2)) @ deltas


def fisher_factor(p: Tensor) -> Tensor:
    """Diag(p) − ppᵀ is the expectation over labels and the Hessian, and has no logit shift."""
    fisher = theory.softmax_fisher(p)
    expected = label_moment(p, p)
    unlike = torch.maximum(frobenius(fisher - expected), frobenius(fisher - _hessian(p.log())))
    return -torch.maximum(unlike, fisher.sum(-1).abs().amax(-1))


def _hessian(z: Tensor) -> Tensor:
    """Of logsumexp, whose gradient is the softmax: that of the cross-entropy for any label."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        p = z.softmax(-1)
        rows = [
            torch.autograd.grad(p[:, i].sum(), z, retain_graph=True)[0] for i in range(len(p.mT))
        ]
    return torch.stack(rows, -2)


def fisher_vanishes(p: Tensor) -> Tensor:
    return 1 - operator(theory.softmax_fisher(p)) / VANISHED


def mismatch(q: Tensor, p: Tensor) -> Tensor:
    """B_q − B_F, summed label by label, is the formula."""
    direct = label_moment(q, p) - label_moment(p, p)
    return same_matrix(direct, theory.observed_label_mismatch(q, p), 1)


def mismatch_bound(q: Tensor, p: Tensor) -> Tensor:
    difference = operator(label_moment(q, p) - label_moment(p, p))
    return _within(difference, theory.observed_label_mismatch_bound(q, p), 1.0)


def hidden_bound(q: Tensor, p: Tensor, J: Tensor) -> Tensor:
    difference = operator(J.mT @ (label_moment(q, p) - label_moment(p, p)) @ J)
    bound = theory.observed_label_mismatch_bound(q, p, J)
    return _within(difference, bound, operator(J).square())


def consistency(q: Tensor, p: Tensor, labels: Tensor, J: Tensor) -> Tensor:
    """An estimate from any shares of labels is off by at most the two terms that vanish."""
    estimated = J.mT @ label_moment(labels, p) @ J
    fisher = J.mT @ label_moment(p, p) @ J
    bound = theory.observed_factor_error_bound(estimated, q, p, J)
    return _within(operator(estimated - fisher), bound, operator(J).square())


def _within(small: Tensor, large: Tensor, scale: Tensor | float) -> Tensor:
    """`at_most`, without what rounding makes of differences of matrices of this scale.

    Else the search would only find q and p that agree to the last digit.
    """
    limits = torch.finfo(small.dtype)
    return at_most((small - 100 * limits.eps * scale).clamp_min(0), large.clamp_min(limits.tiny))


def kronecker_gap(x: Tensor, delta: Tensor) -> Tensor:
    """How far E[xxᵀ ⊗ δδᵀ] is from E[xxᵀ] ⊗ E[δδᵀ], for samples x and δ [b, N, ·]."""
    rows = x.shape[-2]
    both = torch.einsum("bni,bnk->bnik", x, delta).flatten(2)
    whole = both.mT @ both / rows
    A, B = x.mT @ x / rows, delta.mT @ delta / rows
    product = torch.einsum("bij,bkl->bikjl", A, B).reshape(whole.shape)
    return frobenius(whole - product) / frobenius(product) - FAR


LABELS = (
    Statement(
        "softmax Fisher factor",
        "Sec. 3.1",
        "Diag(p) − ppᵀ = E_{y∼p}[δδᵀ] = the Hessian; the ones vector is in its null space",
        always(*(Case((Distribution(c),), fisher_factor) for c in CLASSES)),
    ),
    Statement(
        "softmax Fisher may vanish",
        "Sec. 3.1",
        f"‖Diag(p) − ppᵀ‖ falls below {VANISHED:g} towards a point mass",
        sometimes(Case((Distribution(3),), fisher_vanishes)),
    ),
    Statement(
        "observed-label mismatch",
        "Eq. (10)",
        "B_q − B_F = Diag(r) − prᵀ − rpᵀ with r = q − p",
        always(*(Case((Distribution(c), Distribution(c)), mismatch) for c in CLASSES)),
    ),
    Statement(
        "mismatch ≤ 3‖q − p‖",
        "Prop. 3",
        "‖B_q − B_F‖₂ ≤ 3‖q − p‖₂",
        always(*(Case((Distribution(c), Distribution(c)), mismatch_bound) for c in CLASSES)),
    ),
    Statement(
        "hidden layer ≤ 3‖J‖²‖q − p‖",
        "Prop. 3",
        "‖B_{q,l} − B_{F,l}‖₂ ≤ 3‖J_l‖₂²‖q − p‖₂",
        always(
            *(
                Case((Distribution(c), Distribution(c), Numbers((c, HIDDEN))), hidden_bound)
                for c in CLASSES
            )
        ),
    ),
    Statement(
        "factor consistency",
        "Cor. 4",
        "‖B̂_l − B_{F,l}‖₂ ≤ ‖B̂_l − B_{q,l}‖₂ + 3‖J_l‖₂²‖q − p‖₂; live: it vanishes in training",
        always(
            *(
                Case(
                    (Distribution(c), Distribution(c), Distribution(c), Numbers((c, HIDDEN))),
                    consistency,
                )
                for c in CLASSES
            )
        ),
    ),
    Statement(
        "K-FAC's product is not exact",
        "Sec. 3.1",
        f"E[xxᵀ ⊗ δδᵀ] differs from E[xxᵀ] ⊗ E[δδᵀ] by more than {FAR:g} of it",
        sometimes(Case((Numbers((3, 2)), Numbers((3, 2))), kronecker_gap)),
    ),
)

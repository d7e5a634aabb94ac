"""The methods as a table: one choice per axis, and the numbers their authors give them.

A recipe is data. To add a method, add a row; if it seems to need a branch in the step, the axes are
wrong.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gomuon import axes
from gomuon.axes import Decay, Direction, Scale, Source, Trust
from gomuon.geometry import (
    CapturedMoments,
    CoupledFactors,
    Geometry,
    GradientGrams,
    PartnerGram,
    RotatingBasis,
    RowColumnNorms,
)
from gomuon.geometry.captured import balanced_root_maps, eigen_maps, ridge_inverse_map, root_maps
from gomuon.geometry.gradients import ridge_roots, trace_normalised_roots
from gomuon.settings import MAY_BE_ONE, ONE_POWER, STEP_LENGTH, Checks


@dataclass(frozen=True)
class Recipe:
    """What a method does at each station of the walk, and its defaults."""

    name: str
    geometry: Geometry
    source: Source
    direction: Direction
    scale: Scale
    defaults: Mapping[str, Any]
    formula: str
    clock: str
    origin: str
    trust: Trust = axes.each_alone
    decay: Decay = axes.decayed
    joins_bias: bool = False
    observes_first: int = 0  # steps at which a layer is only observed, not moved
    checks: Checks = field(default_factory=dict)  # where a setting's range is its own

    def check_known(self, settings: Mapping[str, Any]) -> None:
        """Raise a TypeError for a setting this method does not have."""
        for name in settings:
            if name not in self.defaults:
                near = difflib.get_close_matches(name, self.defaults, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(self.defaults)}"
                raise TypeError(f"{self.name} has no setting {name!r}{hint}")

    def signature(self) -> inspect.Signature:
        """What a class of this recipe shows as its arguments."""
        both, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        common = {"adamw": None, "routes": None, "specs": None, "loss_reduction": "mean"}
        alike = {"nonfinite": "raise", "work": "auto", "process_group": None}
        settings = {**self.defaults, **common, **alike}
        lr = settings.pop("lr")
        return inspect.Signature(
            [
                inspect.Parameter("params", both),
                inspect.Parameter("lr", both, default=lr),
                *(inspect.Parameter(name, keyword, default=v) for name, v in settings.items()),
            ]
        )


MUON_LIKE: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.0,
    "polar": "auto",
}
PAPER: dict[str, Any] = {**MUON_LIKE, "momentum": 0.8}
STATISTICS: dict[str, Any] = {
    "token_stride": 1,
    "token_skip": 0,
    "reduce": False,
    "stagger": False,
}
CURVATURE: dict[str, Any] = {
    **STATISTICS,
    "alpha": 0.25,
    "refresh_every": 4,
    "factor_decay": 0.97,
    "input_decay": None,
    "shrinkage": "oas",
    "geometry_decay": False,
}

GO_MUON = Recipe(
    "GoMuon",
    CapturedMoments(
        root_maps,
        elapsed=True,
        inputs_decay="input_decay",
        shrunk=True,
        description="OAS observed-label activation/backward moments",
    ),
    axes.lerp_momentum,
    axes.matched_polar,
    axes.muon_scale,
    {"lr": 0.08, **PAPER, **CURVATURE, "graft": "frobenius"},
    "D = P_B·polar(P_B M̂ P_A)·P_A, ‖D‖_F = √min(m,n);  P_A = A^−¼, P_B = B̄^−¼",
    "factors and roots every K = 4; fresh source every step",
    "the paper",
)
MUON = Recipe(
    "Muon",
    Geometry(),
    axes.lerp_momentum,
    axes.plain_polar,
    axes.muon_scale,
    {"lr": 0.02, **PAPER},
    "D = polar(M̂)",
    "–",
    "KellerJordan/Muon; exact polar and momentum .8 as the paper's control",
)
KFAC = Recipe(
    "KFAC",
    CapturedMoments(eigen_maps, start=1.0),
    axes.gradient,
    axes.natural_gradient,
    axes.momentum_after,
    {
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "factor_decay": 0.95,
        "damping": 1e-3,
        "kl_clip": 1e-3,
        "statistics_every": 1,
        "refresh_every": 1,
        **STATISTICS,
    },
    "D = V_B[(V_Bᵀ G V_A)/(λ_B λ_Aᵀ + damping)]V_Aᵀ, clipped to a KL budget, then momentum",
    "factors and eigenbases each on its own interval",
    "Martens & Grosse 2015; numbers of gpauloski/kfac-pytorch",
    trust=axes.kl_clip,
    joins_bias=True,
)
SHAMPOO = Recipe(
    "Shampoo",
    GradientGrams(ridge_roots),
    axes.gradient,
    axes.grafted_preconditioning,
    axes.momentum_after,
    {
        "lr": 1e-2,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.0,
        "factor_decay": 0.999,
        "ridge": 1e-6,
        "power": 0.25,
        "graft": "rmsprop",
        "statistics_every": 1,
        "refresh_every": 10,
        "block_size": 1024,
    },
    "D = L^−¼ G R^−¼, grafted to the length of another rule's step, then momentum",
    "statistics and roots each on its own interval",
    "Anil et al. 2020, google-research scalable_shampoo",
    checks={"factor_decay": MAY_BE_ONE, "graft": STEP_LENGTH},
)
SOAP = Recipe(
    "SOAP",
    RotatingBasis(),
    axes.adam_mean,
    axes.rotated_adam,
    axes.shrunk_with_weights,
    {
        "lr": 3e-3,
        "betas": (0.95, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "factor_decay": 0.95,
        "refresh_every": 10,
        "max_side": 10_000,
    },
    "D = Q_L[(Q_Lᵀ M Q_R)/(√v + ε)]Q_Rᵀ, v the average of (Q_Lᵀ G Q_R)²",
    "moments every step, one power step and QR every 10",
    "Vyas et al. 2024, nikhilvyas/SOAP",
    observes_first=1,
)
MOUSSE = Recipe(
    "Mousse",
    GradientGrams(trace_normalised_roots),
    axes.lerp_momentum,
    axes.matched_polar_own_length,
    axes.ratio_scale,
    {
        "lr": 0.01,
        **MUON_LIKE,
        "nesterov": False,
        "weight_decay": 0.01,
        "factor_decay": 0.95,
        "alpha": 0.125,
        "epsilon": 1e-10,
        "statistics_every": 1,
        "refresh_every": 10,
        "aspect": "ratio",
    },
    "Q = polar(P_L M̂ P_R), D = P_L Q P_R at ‖Q‖_F;  P = (trace-normalised Gram)^−⅛",
    "factors every step, roots every 10",
    "Anti-Entrophic/Mousse, with the exact polar",
    checks={"alpha": ONE_POWER},
)
FISMO = Recipe(
    "FISMO",
    CoupledFactors(),
    axes.whitened_momentum,
    axes.mapped_polar,
    axes.muon_scale,
    {"lr": 0.02, **MUON_LIKE, "nesterov": False, "factor_decay": 0.95, "mu": 1e-3},
    "D = P^−½·polar(M)·Q^−½, M the momentum of P^−½ G Q^−½",
    "every step",
    "arXiv 2601.21750, from a digest: no code is public, and its numbers are ours",
    checks={"factor_decay": MAY_BE_ONE},
)
NEWTON_MUON = Recipe(
    "NewtonMuon",
    CapturedMoments(ridge_inverse_map, start=1e-3, only="right", description="activation moments"),
    axes.momentum_of_right_preconditioned,
    axes.plain_polar,
    axes.muon_scale,
    {
        "lr": 0.02,
        **MUON_LIKE,
        "factor_decay": 0.95,
        "damping": 0.2,
        "refresh_every": 32,
        **STATISTICS,
    },
    "D = polar(M̂), M the momentum of G(K + (.2·tr K/n + 1e-8)I)⁻¹",
    "factor and inverse every 32",
    "zhehangdu/Newton-Muon",
)
MUON_SQUARED = Recipe(
    "MuonSquared",
    Geometry(),
    axes.lerp_momentum,
    axes.squared_polar,
    axes.muon_scale,
    {"lr": 0.1, **MUON_LIKE, "weight_decay": 0.0125, "square_decay": 0.95},
    "D = polar(M̂/(√v + 1e-10)), v the average of M̂²",
    "every step",
    "modded-nanogpt track 3; that v averages the source's squares is our reading",
)
MALT = Recipe(
    "MALT",
    RowColumnNorms(),
    axes.lerp_momentum,
    axes.matched_polar_diagonal,
    axes.muon_scale,
    {"lr": 0.02, **MUON_LIKE, "factor_decay": 0.95, "alpha": 0.125, "graft": "frobenius"},
    "D = P_B·polar(P_B M̂ P_A)·P_A with diagonal P from averaged row and column norms, power ⅛",
    "every step",
    "arXiv 2608.05088, from a digest: no code is public, and its numbers are ours",
    checks={"alpha": ONE_POWER},
)
MUON_PLUS = Recipe(
    "MuonPlus",
    Geometry(),
    axes.heavy_ball,
    axes.normalised_polar,
    axes.ratio_scale,
    {"lr": 1e-3, **MUON_LIKE, "weight_decay": 0.1, "normalise": "col_row", "aspect": "ratio"},
    "D = polar(M̂), columns and/or rows normalised",
    "–",
    "K1seki221/MuonPlus",
)
MUON_EQ = Recipe(
    "MuonEq",
    Geometry(),
    axes.heavy_ball,
    axes.equilibrated_polar,
    axes.rms_scale,
    {"lr": 1e-3, **MUON_LIKE, "weight_decay": 0.1, "equilibrate": "row"},
    "D = polar(diag(r)^−½ M̂), r the squared row norms of M̂",
    "–",
    "MaeChd/muon-eq",
)
SCION = Recipe(
    "Scion",
    Geometry(),
    axes.lerp_momentum,
    axes.polar_or_sign,
    axes.radius_scale,
    {
        "lr": 1e-3,
        **MUON_LIKE,
        "momentum": 0.9,
        "nesterov": False,
        "constrained": False,
        "radius": 1.0,
        "head_radius": 1.0,
        "norm": "spectral",
    },
    "D = radius·√(m/n)·polar(M); sign(M)/n for the output head",
    "–",
    "LIONS-EPFL/scion; its momentum is our 1 − β",
    decay=axes.constrained_or_decayed,
)
KFAC_MUON = Recipe(
    "KFACMuon",
    CapturedMoments(balanced_root_maps, description="K-FAC-reduce activation/backward moments"),
    axes.lerp_momentum,
    axes.matched_polar,
    axes.scaled_muon,
    {
        "lr": 0.02,
        **MUON_LIKE,
        "factor_decay": 0.95,
        "damping": 1e-3,
        "refresh_every": 50,
        "scale": 0.1,
        **STATISTICS,
        "reduce": True,
    },
    "D = P_B·polar(P_B M̂ P_A)·P_A;  P = (factor + π-balanced damping)^−½, no graft",
    "factors and roots every 50",
    "LukeTri/kfac-muon; symmetric roots, which give the same update as its Cholesky factors",
)
# The paper's two undefined controls, each a reading.
MUON_QK = Recipe(
    "MuonQK",
    PartnerGram(),
    axes.lerp_momentum,
    axes.matched_polar,
    axes.muon_scale,
    {"lr": 0.018, **PAPER, "heads": None, "partner_damping": 0.01},
    "ΔQ_h = ½·polar(M̂_h C⁻¹)·C⁻¹, C² = K_hᵀK_h + λI, and keys likewise; Muon elsewhere",
    "every step",
    "our reading of the paper's Tiny Shakespeare control, after microsoft/dion's branch",
)
HALFSPACE = Recipe(
    "Halfspace",
    GO_MUON.geometry,
    axes.lerp_momentum,
    axes.halfspace,
    axes.muon_scale,
    {"lr": 0.08, **PAPER, **CURVATURE, "alpha": 0.5, "refresh_every": 1, "tau": 0.0},
    "D = polar(B̄^−½ M̂ A^−½ + λM̂), the smallest λ ≥ 0 with ⟨M̂, D⟩ ≥ τ‖M̂‖_*",
    "every step",
    "our reading of the paper's map-back baseline",
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        MUON, KFAC, SHAMPOO, SOAP, MOUSSE, FISMO, GO_MUON,
        NEWTON_MUON, MUON_SQUARED, MALT, MUON_PLUS, MUON_EQ, SCION, KFAC_MUON,
        MUON_QK, HALFSPACE,
    )
}  # fmt: skip

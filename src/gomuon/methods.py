"""The optimizers users name, one class a recipe."""

from typing import Any, Unpack

from gomuon.functional.polar import PolarMethod
from gomuon.optimizer import Common, MatrixOptimizer, Parameters
from gomuon.recipes import GO_MUON, MUON


class GoMuon(MatrixOptimizer):
    r"""Go-MUON, the "Complete update" of *Second-Order Muon Done Right*.

    For a linear layer y = Wx with W [m, n]::

        if t mod K = 0:   A, B   ← OAS(E[x xᵀ]), OAS(E[δ δᵀ])
                          B̄      ← β_B^K B̄ + (1 − β_B^K) B
                          P_A    ← A^(−α),   P_B ← B̄^(−α)
        M  ← βM + (1−β)G
        M̂  ← (1−β)G + βM
        D  ← P_B · polar(P_B M̂ P_A) · P_A
        W  ← W − η √max(1, m/n) · D √min(m, n) / ‖D‖_F

    Everything that is not a hidden matrix (embeddings, norms, biases, the output head) goes to
    AdamW in the same optimizer; `routing_table()` shows which and why.

    Args:
        params: the model (its parameters are routed and its linear layers captured), or what
            torch.optim takes; then nothing is captured and the maps are the identity.
        lr: η, the matrices' learning rate.

        momentum: β.
        nesterov: the source is M̂; else M.
        weight_decay: decoupled, W ← (1 − ηλ)W.

        alpha: the power, in [0, ½], or a pair (left, right) for the output and the input side; 0
            switches a side off.
        refresh_every: K.
        factor_decay: β_B.
        shrinkage: "oas", or a fixed intensity in [0, 1].

        polar: how the polar factor is computed, see `gomuon.functional.polar`.
        graft: "frobenius", or None for the oracle's own length.

        adamw: lr, betas, eps, weight_decay of the other parameters; what is left out is
            lr 3e-3, betas (.9, .95), eps 1e-8, no decay.
        routes: overrides of the routing, {pattern: "matrix" | "adamw" | "frozen"} or a function of
            (name, module, parameter).
        loss_reduction: "mean" if the loss averages over examples, "sum" if it adds them up.
        nonfinite: "raise" at a gradient with NaN or infinity, or "skip" the step.

    Raises:
        ValueError: a value is out of range, or the model has nothing to optimize.
    """

    recipe = GO_MUON

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.08,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        alpha: float | tuple[float, float] = 0.25,
        refresh_every: int = 4,
        factor_decay: float = 0.97,
        shrinkage: str | float = "oas",
        polar: PolarMethod = "auto",
        graft: str | None = "frobenius",
        **common: Unpack[Common],
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "refresh_every": refresh_every,
            "factor_decay": factor_decay,
            "shrinkage": shrinkage,
            "polar": polar,
            "graft": graft,
        }
        super().__init__(params, settings, **common)


class Muon(MatrixOptimizer):
    """Muon with the exact polar factor: Go-MUON at α = 0, the paper's control.

    W ← W − η √max(1, m/n) · polar(M̂). The arguments are those of `GoMuon`.
    """

    recipe = MUON

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.02,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        polar: PolarMethod = "auto",
        **common: Unpack[Common],
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "polar": polar,
            "graft": None,
            "refresh_every": 1,
        }
        super().__init__(params, settings, **common)

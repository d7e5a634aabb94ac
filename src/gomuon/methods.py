"""The optimizers users name, one class a recipe."""

from typing import Any, Unpack

from torch import Tensor, nn

from gomuon.attention import query_key_specs
from gomuon.functional.polar import PolarMethod
from gomuon.layers import LayerSpec
from gomuon.optimizer import Common, MatrixOptimizer, Parameters
from gomuon.recipes import GO_MUON, HALFSPACE, MUON, MUON_QK


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


class MuonQK(MatrixOptimizer):
    """Muon whose queries and keys are treated head by head and whitened by their partner.

    ΔQ_h = ½·polar(M̂_h C⁻¹)·C⁻¹ with C = (K_hᵀK_h + λI)^½, and the same for keys with queries; every
    other matrix as in `Muon`. This is our reading of the paper's Tiny Shakespeare control, "Muon
    with the campaign's Q/K partner metric, headwise Q/K treatment", which it does not define.

    Args:
        params: the model; it must hold attention modules with query and key linear layers.
        lr: the matrices' learning rate.
        heads: heads per attention module; read off the modules when None.
        partner_damping: λ.
    """

    recipe = MUON_QK

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.018,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        heads: int | None = None,
        partner_damping: float = 0.01,
        polar: PolarMethod = "auto",
        **common: Unpack[Common],
    ) -> None:
        if not isinstance(params, nn.Module):
            raise ValueError("MuonQK pairs queries with keys: pass the model, not its parameters")
        self._heads = heads
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "partner_damping": partner_damping,
            "polar": polar,
            "graft": None,
            "refresh_every": 1,
        }
        super().__init__(params, settings, **common)

    def _layer_specs(self, model: nn.Module) -> dict[Tensor, LayerSpec]:
        return query_key_specs(model, self.__dict__.get("_heads"))


class Halfspace(MatrixOptimizer):
    """The inside-only half-power score with a spectral half-space safeguard.

    D = polar(B̄^(−½) M̂ A^(−½) + λM̂) for the smallest λ ≥ 0 with ⟨M̂, D⟩ ≥ τ‖M̂‖_*. This is our reading
    of the "registered halfspace baseline" of the paper's map-back study, which it does not define.
    The arguments are those of `GoMuon`, and τ.
    """

    recipe = HALFSPACE

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.08,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        tau: float = 0.0,
        alpha: float | tuple[float, float] = 0.5,
        refresh_every: int = 1,
        factor_decay: float = 0.97,
        shrinkage: str | float = "oas",
        polar: PolarMethod = "auto",
        **common: Unpack[Common],
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "tau": tau,
            "alpha": alpha,
            "refresh_every": refresh_every,
            "factor_decay": factor_decay,
            "shrinkage": shrinkage,
            "polar": polar,
            "graft": None,
        }
        super().__init__(params, settings, **common)

"""The optimizers users name, one class a recipe."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from gomuon import recipes
from gomuon.attention import query_key_specs
from gomuon.functional.polar import PolarMethod
from gomuon.groups import groups_of
from gomuon.layers import LayerSpec
from gomuon.optimizer import Common, MatrixOptimizer, Parameters
from gomuon.routing import Route, RoutingTable

_SIGN = "output head: sign"


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

    Where P_B M̂ P_A has less than full rank, √rank stands for √min(m, n), and `polar` says what
    happens in the null space: the default leaves it alone, "svd" completes it as the paper does.

    Everything that is not a hidden matrix (embeddings, norms, biases, the output head) goes to
    AdamW in the same optimizer; `routing_table()` shows which and why.

    Args:
        params: the model (its parameters are routed and its layers captured), or what torch.optim
            takes; then nothing is captured and the maps are the identity.
        lr: η, the matrices' learning rate.

        momentum: β.
        nesterov: the source is M̂; else M.
        weight_decay: decoupled, W ← (1 − ηλ)W.
        geometry_decay: decay in the step's geometry instead, W ← W − ηλ·W P_A²/mean(P_A²).

        alpha: the power, in [0, ½], or a pair (left, right) for the output and the input side; 0
            switches a side off, and (0, ¼) is input-only Go-MUON.
        refresh_every: K.
        factor_decay: β_B.
        input_decay: an average on A too, as β_B's; the paper has none.
        shrinkage: "oas", a fixed intensity in [0, 1], or {"damping": d} for S + d·tr(S)/dim·I.

        token_stride: statistics of every stride-th position only.
        token_skip: positions left out at the start of each sequence.
        reduce: K-FAC-reduce statistics, one row per example instead of one per position.
        stagger: refresh different layers on different steps of the K, so that no step is slow. A
            layer runs on identity maps until its first turn, within the first K steps.

        polar: how the polar factor is computed, see `gomuon.functional.polar`.
        graft: "frobenius" gives D the length of the polar factor, √min(m, n) at full rank; None
            keeps the oracle's own.

        adamw: lr, betas, eps, weight_decay of the other parameters; what is left out is
            lr 3e-3, betas (.9, .95), eps 1e-8, no decay.
        routes: overrides of the routing, {pattern: "matrix" | "adamw" | "frozen"} or a function of
            (name, module, parameter).
        specs: how parameters are cut into matrices, {pattern: LayerSpec}, for heads and fused qkv.
        loss_reduction: "mean" if the loss averages over examples, "sum" if it adds them up.
        nonfinite: at a gradient with NaN, infinity or numbers whose squares overflow "raise",
            "skip" the step, or "allow" it: then nobody looks, and an accelerator is never waited
            for.
        work: on several ranks "shared", each matrix having one owner; "replicated", every rank
            doing everything, for whole models; or "alone", nothing sent at all. "auto" shares if
            the model is wrapped in DDP, now or later, or sharded by fully_shard; else alone.
        process_group: the ranks; by default DDP's, or all of them.

    Raises:
        ValueError: a value is out of range, or the model has nothing to optimize.
    """

    recipe = recipes.GO_MUON

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 0.08,
        *,
        momentum: float = 0.8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        geometry_decay: bool = False,
        alpha: float | tuple[float, float] = 0.25,
        refresh_every: int = 4,
        factor_decay: float = 0.97,
        input_decay: float | None = None,
        shrinkage: str | float | Mapping[str, float] = "oas",
        token_stride: int = 1,
        token_skip: int = 0,
        reduce: bool = False,
        stagger: bool = False,
        polar: PolarMethod = "auto",
        graft: str | None = "frobenius",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            geometry_decay=geometry_decay,
            alpha=alpha,
            refresh_every=refresh_every,
            factor_decay=factor_decay,
            input_decay=input_decay,
            shrinkage=shrinkage,
            token_stride=token_stride,
            token_skip=token_skip,
            reduce=reduce,
            stagger=stagger,
            polar=polar,
            graft=graft,
            **common,
        )


class Muon(MatrixOptimizer):
    """Muon with the exact polar factor: Go-MUON at α = 0, the paper's control.

    W ← W − η √max(1, m/n) · polar(M̂).
    """

    recipe = recipes.MUON


class KFAC(MatrixOptimizer):
    """K-FAC, the natural gradient in Kronecker factors, with a KL budget over all layers.

    Biases of linear layers join their weights as a column, with inputs extended by a one.
    """

    recipe = recipes.KFAC


class Shampoo(MatrixOptimizer):
    """Scalable Shampoo: inverse roots of gradient Grams, grafted to another rule's length.

    `graft` is "sgd", "adagrad", "rmsprop" or None. Sides above `block_size` are cut into pieces of
    that size, the last one filled up with zeros. `factor_decay=1` sums.
    """

    recipe = recipes.SHAMPOO


class SOAP(MatrixOptimizer):
    """SOAP: Adam in the slowly rotating eigenbasis of Shampoo's Grams.

    The first step only observes. Sides larger than `max_side` keep the identity.
    """

    recipe = recipes.SOAP


class Mousse(MatrixOptimizer):
    """Mousse: matched polar in trace-normalised gradient-Gram geometry, power ⅛.

    The published ε of 1e-10 is below float32's roundoff: on a singular factor rounding chooses the
    smallest eigenvalues, as it does in the published code. Its authors also use 1e-5.
    """

    recipe = recipes.MOUSSE


class FISMO(MatrixOptimizer):
    """FISMO: matched half-power map-back in coupled gradient factors.

    Written from a digest of the paper; no code is public, and the defaults are ours.
    """

    recipe = recipes.FISMO


class NewtonMuon(MatrixOptimizer):
    """Newton-Muon: gradients multiplied by an inverse activation moment before the momentum."""

    recipe = recipes.NEWTON_MUON


class MuonSquared(MatrixOptimizer):
    """Muon²: the source divided by the root of its average square before the polar factor.

    That the average is of the source's squares, not the gradient's, is our reading.
    """

    recipe = recipes.MUON_SQUARED


class MALT(MatrixOptimizer):
    """MALT: matched polar with diagonal maps from averaged row and column norms.

    Written from a digest of the paper; no code is public, and the defaults are ours.
    """

    recipe = recipes.MALT


class MuonPlus(MatrixOptimizer):
    """Muon+: the polar factor with its columns and/or rows normalised."""

    recipe = recipes.MUON_PLUS


class MuonEq(MatrixOptimizer):
    """MuonEq: rows (and columns) of the source equilibrated before the polar factor."""

    recipe = recipes.MUON_EQ


class Scion(MatrixOptimizer):
    """Scion: the LMO of the spectral norm for hidden layers, of the sign norm for the head.

    `constrained=True` multiplies the weights by 1 − lr, which keeps them in the norm ball; `radius`
    and `head_radius` are those of the two balls. Bare parameters are all taken as hidden layers.
    """

    recipe = recipes.SCION

    def _adapted(self, model: nn.Module, table: RoutingTable) -> RoutingTable:
        return RoutingTable(
            Route(r.name, r.parameter, "matrix", _SIGN) if r.reason == "output head" else r
            for r in table
        )

    def _groups_of(self, table: RoutingTable, defaults: dict[str, Any]) -> list[dict[str, Any]]:
        heads = [r for r in table if r.reason == _SIGN]
        others = groups_of(RoutingTable(r for r in table if r.reason != _SIGN))
        own = {
            "params": [(r.name, r.parameter) for r in heads],
            "treatment": "matrix",
            "norm": "sign",
            "radius": defaults["head_radius"],
        }
        return [*others, own] if heads else others


class KFACMuon(MatrixOptimizer):
    """Matched polar at half power with π-balanced K-FAC-reduce factors and no graft."""

    recipe = recipes.KFAC_MUON


class MuonQK(MatrixOptimizer):
    """Muon whose queries and keys are treated head by head and whitened by their partner.

    ΔQ_h = ½·polar(M̂_h C⁻¹)·C⁻¹ with C = (K_hᵀK_h + λI)^½, and the same for keys with queries; every
    other matrix as in `Muon`. This is our reading of the paper's Tiny Shakespeare control, "Muon
    with the campaign's Q/K partner metric, headwise Q/K treatment", which it does not define.

    It takes a model, which must hold attention modules with query and key linear layers; `heads` is
    read off them when None, and `partner_damping` is λ.
    """

    recipe = recipes.MUON_QK

    def _layer_specs(self, model: nn.Module) -> dict[Tensor, LayerSpec]:
        pairs = query_key_specs(model, self.defaults["heads"])
        return {**super()._layer_specs(model), **pairs}

    def _check_bare(self) -> None:
        raise ValueError("MuonQK pairs queries with keys: pass the model, not its parameters")


class Halfspace(MatrixOptimizer):
    """The inside-only half-power score with a spectral half-space safeguard.

    D = polar(B̄^(−½) M̂ A^(−½) + λM̂) for the smallest λ ≥ 0 with ⟨M̂, D⟩ ≥ τ‖M̂‖_*. This is our reading
    of the "registered halfspace baseline" of the paper's map-back study, which it does not define.
    """

    recipe = recipes.HALFSPACE

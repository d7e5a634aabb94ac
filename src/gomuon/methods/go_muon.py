"""Go-MUON, the paper's method."""

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from torch import Tensor

from gomuon.functional.factors import RootMethod, shift_of
from gomuon.functional.polar_factor import PolarMethod
from gomuon.geometry.captured import CapturedMoments
from gomuon.geometry.moments_to_maps import alpha_of_sides, root_maps
from gomuon.intervals import Adaptive
from gomuon.optimizer import Common, MatrixOptimizer, Parameters
from gomuon.parameters.keeping import Offload, StateDtype
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    CURVATURE,
    PAPER,
    Clock,
    Group,
    lerp_momentum,
    matched_polar,
    muon_scale,
    rate,
)
from gomuon.recipes.work import (
    CapturedFactors,
    Factors,
    Matrices,
    StepWork,
    Work,
    matched_polar_work,
    root_work,
)
from gomuon.settings import ADAPTIVE, INTERVAL, Setting, one_of, optional, with_defaults

GEOMETRY = CapturedMoments(
    root_maps,
    elapsed=True,
    inputs_decay="input_decay",
    shrunk=True,
    description="OAS observed-label activation/backward moments",
)


def captured_root_work(x: Factors, group: Group) -> Work:
    """Roots with the power of their side."""
    power = alpha_of_sides(group["alpha"])[x.side]
    return root_work(x, group, power, shift_of(group["max_condition"]))


def comparison_work(x: Matrices, group: Group) -> Work:
    """The steps of cached and of fresh maps, if the clock adapts."""
    adapts = isinstance(group["refresh_every"], Adaptive)
    return 2 * matched_polar_work(x, {**group, "geometry_decay": False}) if adapts else []


FACTORS = CapturedFactors(
    captured_root_work, keeps_inputs=lambda group: group.get("input_decay") is not None
)

# What "fast" costs in loss is measured in docs/reproduction.md, "What may be computed cheaply?".
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {
        "refresh_every": 8,
        "rows": "auto",
        "input_decay": 0.97,
        "block_size": 128,
        "polar": "fast",
    },
    "paper": {
        "polar": "svd",
        "roots": "eigh",
        "rows": None,
        "block_size": None,
        "stagger": False,
    },
}

RECIPE = Recipe(
    "GoMuon",
    geometry=GEOMETRY,
    clock=Clock(statistics="statistics_every", maps="refresh_every"),
    source=lerp_momentum,
    direction=matched_polar,
    scale=muon_scale,
    settings={
        **rate(0.08),
        **PAPER,
        # Blocks of 128 cost nothing in loss (docs/reproduction.md); these are larger.
        **with_defaults(CURVATURE, block_size=256),
        "refresh_every": Setting(4, ADAPTIVE),
        "statistics_every": Setting(None, optional(INTERVAL)),
        "graft": Setting("frobenius", one_of("frobenius", None)),
    },
    presets=PRESETS,
    formula="D = P_B·polar(P_B M̂ P_A)·P_A, ‖D‖_F = √min(m,n);  P_A = A^−¼, P_B = B̄^−¼",
    origin="the paper",
    work=StepWork(matched_polar_work, renew=comparison_work, captured=FACTORS),
)


class GoMuonSettings(Common, total=False):
    """The keywords of `GoMuon`, for type checkers; defaults are in its recipe."""

    preset: Literal["fast", "paper"] | None
    momentum: float
    nesterov: bool
    weight_decay: float
    geometry_decay: bool
    cautious_decay: bool
    lr_scale: Literal["adamw"] | None
    alpha: float | tuple[float, float]
    refresh_every: int | Adaptive
    statistics_every: int | None
    factor_decay: float
    input_decay: float | None
    shrinkage: str | float | Mapping[str, float]
    rows: int | Literal["auto"] | None
    token_stride: int
    token_skip: int
    reduce: bool
    stagger: bool | Literal["auto"]
    block_size: int | None
    max_side: int | None
    long_sides: Literal["identity", "diagonal"]
    polar: PolarMethod
    roots: RootMethod
    max_condition: float | None
    graft: str | None
    state_dtype: StateDtype | None
    offload: Offload
    sums_dtype: Literal["bfloat16"] | None
    rebuild_maps: bool


@register
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

    If P_B M̂ P_A does not have full rank, √rank replaces √min(m, n), and `polar` decides what
    happens in the null space: by default the polar factor is zero there; "svd" completes it as the
    paper does.

    Everything that is not a hidden matrix (embeddings, norms, biases, the output head) goes to
    AdamW in the same optimizer. `routing_table()` shows every parameter and the reason.

    Args:
        params: the model; its parameters are routed and its layers captured. Or parameters or
            groups as for torch.optim, with `model=` beside them; without it nothing is captured and
            the maps are the identity.
        lr: η, the matrices' learning rate.
        preset: settings that belong together; settings that are also given replace them. "fast":
            our cheapest combination (docs/reproduction.md says what it costs in loss, as far as
            it is measured). "paper": the arithmetic of the paper's experiments.

        momentum: β.
        nesterov: True: the source is M̂. False: the source is M.
        weight_decay: decoupled, W ← (1 − ηλ)W.
        geometry_decay: weight decay in the step's geometry, W ← W − ηλ·W P_A²/mean(P_A²).
        cautious_decay: decay only where the update moves a weight the same way; AdamW's part too.
        lr_scale: "adamw" replaces √max(1, m/n) by .2·√max(m, n), so that updates have AdamW's root
            mean square: its rate, decay and schedule carry over, and all groups have one rate
            (docs/routing.md). None: the paper's scale.

        alpha: the power, in [0, ½], or a pair (left, right) for the output and the input side. 0
            switches a side off; (0, ¼) is input-only Go-MUON.
        refresh_every: K. Or `gomuon.Adaptive(.9)`: layers that share an input find their own K,
            which grows while cached maps give nearly the step of fresh ones (docs/adaptive.md).
        statistics_every: factors are observed in steps of this interval, and averaged with β_B for
            each step between them. None: whenever maps are renewed, as in the paper.
        factor_decay: β_B.
        input_decay: the same decay for an average of A; the paper does not average A (None).
        shrinkage: "oas", a fixed intensity in [0, 1], or {"damping": d} for S + d·tr(S)/dim·I.

        rows: use at most this many rows of each forward pass for the statistics, evenly spread over
            examples and positions; None: all. "auto": two for each input (of a block, if the input
            side is cut), and at least 256. `LayerSpec(rows=…)` is the same for one layer.
        token_stride: use only every stride-th position for the statistics.
        token_skip: leave out this many positions at the start of each sequence.
        reduce: K-FAC-reduce statistics, one row per example instead of one per position.
        stagger: refresh different layers in different steps of the K, so that no step is slow. A
            layer has identity maps until its first refresh, within the first K steps. "auto": while
            several ranks share the work, and not in a single process (docs/scaling.md).

        block_size: a side longer than this is cut into blocks of at most this length, and its
            factor and map are block-diagonal. Inputs and output gradients are cut before their
            products, so work, memory and messages fall with the blocks. Each block is shrunk as a
            factor of its own; the polar factor is that of the whole matrix. None: no side is cut.
        max_side: a side longer than this has no factor. None: every side has one.
        long_sides: what such a side has instead: "identity" (nothing is captured) or "diagonal"
            (E[x²] of each input; OAS leaves it alone). `LayerSpec` chooses for each side.

        polar: how the polar factor is computed, see `gomuon.functional.polar`.
        roots: how P_A and P_B are computed: "eigh" by eigendecomposition, "products" by matrix
            products alone, "auto" by products on accelerators and by eigh on the CPU. See
            `gomuon.functional.inverse_root`.
        max_condition: the largest condition number of the matrices whose roots P_A and P_B are, or
            None. For it, λ_max/(max_condition − 1) is added to all eigenvalues.
        graft: "frobenius" gives D the norm of the polar factor, √min(m, n) at full rank. None
            keeps the norm of the oracle's direction.

        state_dtype: how momentum, factors and maps are kept between steps. None: as they are
            computed, in float32 or wider. "bfloat16": in half of that. "int8": the momentum in 8
            bits, with a float32 scale for every 128 elements, factors and maps in bfloat16. Steps
            compute in float32 or wider. Set it in a group to convert the state at the next step.
        offload: True keeps factors on the CPU between refreshes, if the parameters are on an
            accelerator; a step that does not refresh moves nothing. "maps" keeps maps there too
            and moves them to the accelerator in every step. On the CPU it changes nothing.
        sums_dtype: "bfloat16": captured sums travel between ranks in bfloat16, half of the bytes,
            and are added up in float32. None: as they are computed. It needs owners, see `work`.
        rebuild_maps: leave out of `state_dict()` the maps that `load_state_dict` makes again from
            their factors, bit for bit: P_B, and P_A too if A is averaged (`input_decay`). Saving
            takes the roots once more to be sure, and loading takes them.

        adamw: lr, betas, eps and weight_decay for the other parameters. Defaults: lr 3e-3, betas
            (.9, .95), eps 1e-8, weight_decay 0.
        routes: overrides of the routing, {pattern: "matrix" | "adamw" | "frozen"} or a function of
            (name, module, parameter).
        specs: how parameters are cut, {pattern: LayerSpec}, for heads, fused qkv and long sides.
        overrides: settings of single parameters, {pattern: settings}, of which the first match
            counts, or a function of (name, module, parameter). `lr_factor` multiplies their rate
            (docs/routing.md).
        model: the model, if `params` are parameters or groups of it.
        example_input: what the model is called with: a tensor, a tuple of positional arguments or a
            dict of keyword arguments. One forward pass in evaluation mode then finds the output
            heads: the linear layers and convolutions whose outputs reach the model's output past no
            other. Nothing in the model stays changed. None: heads are found by rules
            (docs/routing.md).
        loss_reduction: "mean" if the loss averages over examples, "sum" if it adds them up.
        nonfinite: what to do if a gradient has NaN, infinity or numbers whose squares overflow:
            "raise" an error, "skip" the step, or "allow" it: nothing is checked, and NaN reaches
            the weights as with torch's optimizers. On an accelerator no step waits for the answer:
            gradients that cannot be used count as zero, and the error or the count comes at a later
            step. Several ranks do wait, to agree.
        work: how several ranks work. "shared": each matrix has one owner. "replicated": every rank
            computes everything (only for models that are not sharded). "alone": nothing is sent.
            "auto": "shared" if the model is wrapped in DDP, now or later, or sharded by
            fully_shard; otherwise "alone".
        tensor_parallel: for layers divided by `parallelize_module`. "blocks": each rank's part of a
            layer is a matrix of its own, and nothing is sent between parts. "exact": whole matrices
            are gathered at their owners, and steps are those of a single process.
        process_group: the ranks that train the model; by default DDP's group, or all ranks.

    Raises:
        ValueError: a value is out of range, or the model has no matrix to optimize.
    """

    recipe = RECIPE

    __signature__ = RECIPE.signature()

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor | None = None,
        **settings: Unpack[GoMuonSettings],
    ) -> None:
        super().__init__(params, lr, **settings)

"""Muon with queries and keys whitened by each other, head by head: an interpretation.

The paper's Tiny Shakespeare control is "Muon with the campaign's Q/K partner metric, headwise Q/K
treatment", which it does not define.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gomuon.functional.factors import Root, RootBatch, take_roots
from gomuon.functional.linalg import identity_like
from gomuon.geometry.base import Geometry
from gomuon.geometry.moments_to_maps import SharedStore
from gomuon.optimizer import MatrixOptimizer
from gomuon.parameters.layers import Layer
from gomuon.parameters.specs import LayerSpec
from gomuon.parameters.stacks import Stack, group_by_key
from gomuon.parameters.state import Entries, Side
from gomuon.recipes.recipe import ModelUse, OfficialCode, Recipe
from gomuon.recipes.registry import register
from gomuon.recipes.stations import (
    PAPER,
    ROOTS,
    Group,
    lerp_momentum,
    matched_polar,
    measured_rms_scale,
    muon_scale,
    rate,
)
from gomuon.recipes.work import (
    Factors,
    Kept,
    Matrices,
    Product,
    StepWork,
    Work,
    maps_work,
    momentum,
    plain_polar_work,
    root_work,
)
from gomuon.settings import INTERVAL, POSITIVE, Setting, optional

_NAMES = (("q", "k"), ("q_proj", "k_proj"), ("query", "key"), ("wq", "wk"))
_HEAD_COUNTS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads")


def query_key_specs(model: nn.Module, heads: int | None) -> dict[Tensor, LayerSpec]:
    """Query and key weights split into heads, each with the other as its partner.

    Args:
        model: searched for modules that hold a query and a key `nn.Linear` under a usual name.
        heads: the number of heads per attention module; None reads it from the module.

    Raises:
        ValueError: there is no such pair, or the number of heads is unknown or does not divide.
    """
    specs: dict[Tensor, LayerSpec] = {}
    for name, module, query, key in _pairs(model):
        count = heads or next(
            (getattr(module, n) for n in _HEAD_COUNTS if hasattr(module, n)), None
        )
        if not isinstance(count, int):
            raise ValueError(f"the number of heads of {name!r} is unknown; pass heads=")
        if query.weight.shape != key.weight.shape or query.weight.shape[0] % count:
            raise ValueError(
                f"{name!r}: query {tuple(query.weight.shape)} and key {tuple(key.weight.shape)} "
                f"must have the same shape, with rows divisible by {count} heads"
            )
        specs[query.weight] = LayerSpec(heads=count, partner=key.weight)
        specs[key.weight] = LayerSpec(heads=count, partner=query.weight)
    if not specs:
        names = ", ".join(f"{q}/{k}" for q, k in _NAMES)
        raise ValueError(
            f"{type(model).__name__} has no module with query and key linear layers named {names}; "
            "use Muon"
        )
    return specs


def _pairs(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear, nn.Linear]]:
    for name, module in model.named_modules():
        for q, k in _NAMES:
            query, key = getattr(module, q, None), getattr(module, k, None)
            if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
                yield name, module, query, key


class PartnerGram(Geometry):
    """Right map ½(WᵀW + λI)^(−1/2), head by head; W is the weight that a layer is multiplied with.

    For a query layer this is the key layer, and the other way round. Both updates share one budget,
    hence the ½. This is an interpretation of the paper's "Q/K partner metric", which it does not
    define; it follows the nearest public definition (compositional Muon).
    """

    reads_weights = True
    description = "the partner weight's Gram, per head"
    entries: ClassVar[Entries] = {"right_map": Side(1)}

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        weights = {layer.parameter: layer.whole_weight for layer in due}
        paired = [layer for layer in due if layer.spec.partner is not None]
        batches: list[RootBatch] = []
        for batch in group_by_key(paired, lambda layer: (layer.shape, layer.blocks, layer.dtype)):
            W = torch.stack([_partner_weights(layer, weights) for layer in batch])
            gram = W.mT @ W
            damped = gram + group["partner_damping"] * identity_like(gram)
            store = SharedStore([[layer] for layer in batch], _store_half)
            batches.append(RootBatch(damped, Root.of(0.5), store))
        return take_roots(batches, group["roots"])


def _store_half(layer: Layer, root: Tensor | None) -> bool:
    return layer.set_map("right_map", None if root is None else 0.5 * root)


def _partner_weights(layer: Layer, weights: Mapping[Tensor, Tensor]) -> Tensor:
    """The partner's matrices, head by head. Both have the same owner, which has both whole."""
    assert layer.spec.partner is not None
    whole = weights.get(layer.spec.partner, layer.spec.partner)
    return Layer("", whole, {}, LayerSpec(heads=layer.spec.row_blocks)).weights


def _specs(model: nn.Module, settings: Mapping[str, Any]) -> dict[Tensor, LayerSpec]:
    return query_key_specs(model, settings["heads"])


def _step_work(x: Matrices, group: Group) -> Work:
    """The right map inside the polar factor and outside, for queries and keys."""
    return 2 * maps_work(x, False, x.has_partner) + plain_polar_work(x, group)


def _partner_work(x: Matrices, group: Group) -> Work:
    """WᵀW of the partner, head by head, and its root."""
    if not x.has_partner:
        return []
    roots = root_work(Factors(x.count, x.n, 1, x.float64), group, 0.5)
    return [Product(x.count, x.n, x.m, x.n), *roots]


def _kept(x: Matrices, group: Group) -> Kept:
    maps = {"right_map": x.count * x.n * x.n} if x.has_partner else {}
    return {**momentum(x, group), **maps}


RECIPE = Recipe(
    "MuonQK",
    geometry=PartnerGram(),
    source=lerp_momentum,
    direction=matched_polar,
    scale=muon_scale,
    rms_scale=measured_rms_scale,
    settings={
        **rate(0.018),
        **PAPER,
        **ROOTS,
        "heads": Setting(None, optional(INTERVAL)),
        "partner_damping": Setting(0.01, POSITIVE),
    },
    formula="ΔQ_h = ½·polar(M̂_h C⁻¹)·C⁻¹, C² = K_hᵀK_h + λI, and keys likewise; Muon elsewhere",
    origin=(
        "our interpretation of the paper's Tiny Shakespeare control, after microsoft/dion's branch"
    ),
    official=(OfficialCode("microsoft/dion, branch jcl/cm-on-pin", ours=None),),
    departures=(
        "Only its partner metric is taken from that branch; momentum, length and all other "
        "matrices are those of `Muon`.",
    ),
    model_use=ModelUse(
        specs=_specs,
        needs_model="MuonQK pairs queries with keys: pass the model, not its parameters",
    ),
    work=StepWork(_step_work, renew=_partner_work, keeps=_kept),
)


@register
class MuonQK(MatrixOptimizer):
    """Muon whose queries and keys are treated head by head and whitened by their partner.

    ΔQ_h = ½·polar(M̂_h C⁻¹)·C⁻¹ with C = (K_hᵀK_h + λI)^½, and the same for keys with queries; every
    other matrix as in `Muon`. This is our interpretation of the paper's Tiny Shakespeare control,
    "Muon with the campaign's Q/K partner metric, headwise Q/K treatment", which it does not define.

    It needs a model with attention modules that have query and key linear layers. If `heads` is
    None, it is read from these modules. `partner_damping` is λ.
    """

    recipe = RECIPE

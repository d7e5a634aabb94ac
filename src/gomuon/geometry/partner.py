"""A geometry made of another layer's weight."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gomuon.batching import alike
from gomuon.geometry.base import Geometry, Group, guarded_roots, identity_like, keep
from gomuon.layers import Layer, LayerSpec
from gomuon.stacks import Stack


class PartnerGram(Geometry):
    """Right map ½(WᵀW + λI)^(−1/2), head by head, W the weight a layer is multiplied with.

    For a query layer that is the key layer, and the other way round; the two moves share one
    budget, hence the ½. A reading of the paper's undefined "Q/K partner metric", after the nearest
    public definition (compositional Muon).
    """

    reads_weights = True
    description = "the partner weight's Gram, per head"

    def before(self, stacks: Sequence[Stack], group: Group) -> list[Layer]:
        layers = [layer for stack in stacks for layer in stack.layers]
        here = {layer.parameter: layer.whole_weight for layer in layers}
        paired = [layer for layer in layers if layer.spec.partner is not None]
        failed: list[Layer] = []
        for batch in alike(paired, lambda layer: (layer.shape, layer.blocks, layer.dtype)):
            W = torch.stack([_partner_weights(layer, here) for layer in batch])
            gram = W.mT @ W
            damped = gram + group["partner_damping"] * identity_like(gram)
            for layer, root in zip(batch, guarded_roots(damped, 0.5), strict=True):
                failed += keep(layer, "right_map", None if root is None else 0.5 * root)
        return failed


def _partner_weights(layer: Layer, here: Mapping[Tensor, Tensor]) -> Tensor:
    """The partner's matrices, head by head; siblings have one owner, who sees both whole."""
    assert layer.spec.partner is not None
    whole = here.get(layer.spec.partner, layer.spec.partner)
    return Layer("", whole, {}, LayerSpec(heads=layer.spec.rows)).weights

"""Inverse roots in cached eigenbases, which are renewed only when they no longer fit.

The adaptive criterion of "Purifying Shampoo" (Eschenhagen et al. 2025), for maps that are functions
of a factor. Eigenvalues are those of now in any case, as in Meta's QR variant of eigendecomposition
(facebookresearch/optimizers): the diagonal of QᵀLQ. Only Q is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.factors import Root, takes_products
from gomuon.functional.linalg import (
    decompose,
    finite_factors,
    full_float32,
    guarded,
    identity_like,
    widened,
)
from gomuon.functional.orthonormal import FIRST_STEPS, LATER_STEPS, eigenbasis
from gomuon.functional.rotation import share_of
from gomuon.geometry.base import Group
from gomuon.intervals import Rotated
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack

Prepared = Callable[[Tensor], Tensor]
Roots = Callable[[int, Group], tuple[Root, Prepared]]


def renew_in_kept_bases(
    stacks: Sequence[Stack], roots: Roots, every: Rotated, group: Group
) -> list[Layer]:
    """New maps of both sides of all stacks; returns the layers that got none.

    On accelerators the device is waited for once, to know which bases no longer fit.
    """
    looks = list(_looks(stacks, roots, group))
    known = [look.share for look in looks if look.share is not None]
    flags = torch.cat([share.float() for share in known]).gt(every.threshold) if known else None
    turned = iter([] if flags is None else flags.tolist())
    failed: list[Layer] = []
    for look in looks:
        count = len(look.S)
        due = [i for i in range(count) if look.share is None or next(turned)]
        failed += look.renew(due, group)
    return failed


@dataclass(frozen=True)
class _Look:
    """The factors of one side of a stack, and how far their bases are from fitting.

    Attributes:
        stack: the stack.
        side: "left" or "right".
        root: what the maps are.
        S: the prepared factors, [b, d, d]; in float64 on the CPU, because ridges may be as small as
            rounding errors.
        Q: their cached bases; None: there are none yet.
        B: QᵀSQ.
        share: how much of B is off the diagonal, [b], not read yet.
    """

    stack: Stack
    side: str
    root: Root
    S: Tensor
    Q: Tensor | None
    B: Tensor | None
    share: Tensor | None

    def renew(self, due: list[int], group: Group) -> list[Layer]:
        """Find new bases where they are `due`, and store maps of all."""
        assert self.root.of_eigen is not None
        working = self.stack.layers[0].dtype
        fine = torch.ones(len(self.S), dtype=torch.bool, device=self.S.device)
        if self.Q is None or self.B is None:
            values, V, fine = _eigen(self.S, None, group)
        else:
            values, V = self.B.diagonal(dim1=-2, dim2=-1), self.Q
            if due:
                which = torch.tensor(due, device=V.device)
                new, turned, good = _eigen(self.S[which], self.Q[which], group)
                values, V = values.index_copy(0, which, new), V.index_copy(0, which, turned)
                fine = fine.index_copy(0, which, good)
        maps, V = self.root.of_eigen(values.clamp_min(0), V).to(working), V.to(working)
        fine = fine & finite_factors(maps)
        failed = self._failed(fine)
        for kind, value in (("basis", V), ("map", maps)):
            name = f"{self.side}_{kind}"
            old = self.stack.map(name)
            if old is None:
                old = torch.eye(value.shape[-1], dtype=working, device=value.device)
            self.stack.set(name, torch.where(fine.view(-1, 1, 1), value, old))
        return failed

    def _failed(self, fine: Tensor) -> list[Layer]:
        """Known on the CPU. Elsewhere this would wait, and products fail only by overflow."""
        if not linalg.decomposes_well(fine.device) or bool(fine.all()):
            return []
        parts = self.stack.parts(fine)
        return [
            layer for layer, part in zip(self.stack.layers, parts, strict=True) if not part.all()
        ]


def _looks(stacks: Sequence[Stack], roots: Roots, group: Group) -> Iterator[_Look]:
    for stack in stacks:
        observations = stack.layers[0].state.get("observations", 0)
        if not observations:
            continue
        root, prepared = roots(observations, group)
        for side in ("left", "right"):
            factors, Q = stack.map(f"{side}_factor"), stack.map(f"{side}_basis")
            assert factors is not None
            S = prepared(_precise(factors))
            B = share = None
            if Q is not None:
                Q = _precise(Q)
                B = Q.mT @ S @ Q
                share = share_of(B)
            yield _Look(stack, side, root, S, Q, B, share)


def _precise(S: Tensor) -> Tensor:
    return widened(S) if linalg.decomposes_well(S.device) else S


def _eigen(S: Tensor, start: Tensor | None, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, eigenvectors, and which can be used. By products, from the last basis."""
    if takes_products(group["roots"], S.device):
        steps = FIRST_STEPS if start is None else LATER_STEPS
        with full_float32():
            values, V = eigenbasis(S, steps, start)
        return values, V, finite_factors(V)
    found = guarded(_packed, S)
    fine = torch.tensor([one is not None for one in found], device=S.device)
    instead = torch.cat([S.new_ones(1, S.shape[-1]), identity_like(S)])
    packed = torch.stack([instead if one is None else one for one in found])
    return packed[:, 0], packed[:, 1:], fine


def _packed(S: Tensor) -> Tensor:
    """[values; vectors], because `guarded` has one result for each factor."""
    values, vectors = decompose(torch.linalg.eigh, S)
    return torch.cat([values.unsqueeze(-2), vectors], dim=-2)

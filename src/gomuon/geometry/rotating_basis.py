"""Eigenbases of factors that are made of gradients, turned by a power step from time to time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gomuon.functional.factors import takes_products
from gomuon.functional.linalg import decompose, full_float32, over_batch
from gomuon.functional.orthonormal import FIRST_STEPS, eigenbasis, orthonormalised
from gomuon.functional.rotation import off_diagonal_share
from gomuon.geometry.base import Geometry, Group
from gomuon.intervals import Rotated
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import SQUARE, Entries, both_sides

SideName = Literal["left", "right"]


class RotatingBasis(Geometry):
    """Q_L, Q_R: eigenvectors at first, then one power step and QR every `refresh_every` steps.

    All of this happens after the update, with the gradient of the update. By products, eigenvectors
    are estimated by orthogonal iteration (`eigenbasis`), and QR is Gram–Schmidt
    (`orthonormalised`). Its columns may have other signs, which changes no step: the momentum is
    kept in the original coordinates, and the second moment holds squares.

    With `refresh_every=Rotated(…)` only bases that no longer fit are turned.

    Attributes:
        sorts: whether a power step takes the directions in the order of their eigenvalues. The
            second moment is then sorted in the same way.
    """

    description = "gradient Gram moments and their eigenbasis"
    acts_after = True
    sorts: ClassVar[bool] = True
    entries: ClassVar[Entries] = {
        **both_sides("factor", numbers="semidefinite"),
        **both_sides("basis", numbers="cosines"),
    }

    def average(self, stack: Stack, group: Group) -> None:
        """L ← βL + (1−β)GGᵀ and R ← βR + (1−β)GᵀG."""
        G = stack.G
        for side in sides_with_basis(stack, group):
            average_factor(stack, side, G @ G.mT if side == "left" else G.mT @ G, group)

    def after(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> None:
        every = group["refresh_every"]
        looks: list[_Look] = []
        for stack in stacks:
            # A basis that is made now is that of this factor, and needs no power step.
            had = [s for s in sides_with_basis(stack, group) if stack.map(f"{s}_basis") is not None]
            self.average(stack, group)
            self._make_first(stack, group)
            for side in had if due else ():
                if isinstance(every, Rotated):
                    looks.append(_look(stack, side))
                else:
                    self._turn(stack, side, group)
            stack.close()
        if looks:
            self._turn_what_no_longer_fits(looks, every, group)

    def _make_first(self, stack: Stack, group: Group) -> None:
        for side in sides_with_basis(stack, group):
            if stack.map(f"{side}_basis") is None:
                factor = kept_factor(stack, side)
                products = takes_products(group["roots"], factor.device)
                stack.set(f"{side}_basis", _first_basis(factor, products=products))

    def _turn_what_no_longer_fits(
        self, looks: Sequence["_Look"], every: Rotated, group: Group
    ) -> None:
        """The device is waited for once, to know which bases these are."""
        device = looks[0].share.device
        shares = torch.cat([look.share.to(device, torch.float32) for look in looks])
        turned = iter((shares > every.threshold).tolist())
        for look in looks:
            wanted = [index for index in range(len(look.share)) if next(turned)]
            if wanted:
                self._turn(look.stack, look.side, group, wanted)
                look.stack.close()

    def _turn(
        self, stack: Stack, side: SideName, group: Group, wanted: list[int] | None = None
    ) -> None:
        """One power step of a stack's bases, or of the `wanted` ones."""
        factor, basis = kept_factor(stack, side), kept_basis(stack, side)
        some = wanted is not None and len(wanted) < len(basis)
        which = torch.tensor(wanted, device=basis.device) if some else None
        S, Q = (factor, basis) if which is None else (factor[which], basis[which])
        if self.sorts:
            estimate = (Q * (S @ Q)).sum(-2)  # diag(QᵀLQ)
            order = estimate.argsort(dim=-1, descending=True)
            Q = torch.take_along_dim(Q, order.unsqueeze(-2), dim=-1)
        if takes_products(group["roots"], S.device):
            with full_float32():
                turned = orthonormalised(S @ Q)
        else:
            turned = over_batch(lambda part: torch.linalg.qr(part), S @ Q)[0]
        # If the power step overflows, the basis keeps its directions, in the new order.
        if which is None:
            turned = stack.usable(turned, Q)
        else:
            kept = basis.index_copy(0, which, Q)
            turned = stack.usable(basis.index_copy(0, which, turned), kept)
        stack.set(f"{side}_basis", turned)
        if self.sorts:
            _sort_square(stack, side, order, which)


def sides_with_basis(stack: Stack, group: Group) -> list[SideName]:
    """The sides that are not longer than `max_side`."""
    both: tuple[tuple[SideName, int], ...] = (("left", stack.shape[0]), ("right", stack.shape[1]))
    return [side for side, d in both if d <= group["max_side"]]


def average_factor(stack: Stack, side: SideName, gram: Tensor, group: Group) -> None:
    """factor ← β·factor + (1−β)·gram, from zero."""
    factor = stack.factor(f"{side}_factor", start=torch.zeros_like(gram))
    stack.remember(factor, factor.lerp(gram, 1 - group["factor_decay"]))


def kept_factor(stack: Stack, side: SideName) -> Tensor:
    factor = stack.map(f"{side}_factor")
    assert factor is not None
    return factor


def kept_basis(stack: Stack, side: SideName) -> Tensor:
    basis = stack.map(f"{side}_basis")
    assert basis is not None
    return basis


def _first_basis(factor: Tensor, *, products: bool) -> Tensor:
    """Eigenvectors, those of the largest eigenvalues first."""
    if not products:
        return decompose(torch.linalg.eigh, factor)[1].flip(-1)
    with full_float32():
        return eigenbasis(factor, FIRST_STEPS)[1]


@dataclass(frozen=True)
class _Look:
    """How far the bases of one side of a stack are from fitting, [b], not read yet."""

    stack: Stack
    side: SideName
    share: Tensor


def _look(stack: Stack, side: SideName) -> _Look:
    return _Look(stack, side, off_diagonal_share(kept_factor(stack, side), kept_basis(stack, side)))


def _sort_square(stack: Stack, side: SideName, order: Tensor, which: Tensor | None) -> None:
    """Sort the rows (left) or columns (right) of the second moment."""
    square = stack.memory(SQUARE)
    index = order.unsqueeze(-1) if side == "left" else order.unsqueeze(-2)
    dim = -2 if side == "left" else -1
    if which is None:
        square.copy_(torch.take_along_dim(square, index, dim=dim))
    else:
        square.index_copy_(0, which, torch.take_along_dim(square[which], index, dim=dim))

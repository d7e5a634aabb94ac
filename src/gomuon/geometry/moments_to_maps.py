"""From moments to the factors of one step, Equations (9) and (21), and from factors to maps, (29).

How factors are averaged in between is in `geometry/captured.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import fill_padding_
from gomuon.functional.factors import Root, RootBatch, oas, shrink
from gomuon.functional.linalg import finite_factors, identity_like, is_diagonal, trace_mean
from gomuon.geometry.base import Group
from gomuon.moments import Moment, stacked_counts
from gomuon.parameters.layers import Layer
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.stacks import group_by_key

SideName = Literal["left", "right"]
Found = TypeVar("Found")

NO_ROWS, USABLE, UNUSABLE = range(3)  # what became of an observation


@dataclass(frozen=True)
class Observed:
    """Observations of one side, [b, blocks, d, d], for b lists of layers that share one.

    `outcomes`, [b], are not read yet.
    """

    side: SideName
    layers: Sequence[Sequence[Layer]]
    S: Tensor
    outcomes: Tensor


def observed_side(
    side: SideName, layers: Sequence[Layer], group: Group, *, shrunk: bool
) -> Iterator[Observed]:
    """A factor of each layer, layers of one form together.

    Layers that share moment and factor are observed once.
    """
    seen = [layer for layer in layers if may_have_rows(moment_of(layer, side))]
    together = group_by_key(
        seen, lambda l: (id(moment_of(l, side)), id(l.state.get(f"{side}_factor")))
    )
    for batch in group_by_key(
        together,
        lambda same: (
            likeness(_total(same[0], side)),
            not_none(moment_of(same[0], side)).count.shape,
            _form(same[0], side),
        ),
    ):
        first = [same[0] for same in batch]
        observed = observations(side, first, group, shrunk=shrunk)
        # A mask may have left no row.
        rows = _counts(first, side) > 0
        rows = rows if rows.ndim == 1 else rows.any(1)
        outcomes = torch.where(
            rows, torch.where(finite_factors(observed), USABLE, UNUSABLE), NO_ROWS
        )
        yield Observed(side, batch, observed, outcomes)


def observations(side: SideName, layers: Sequence[Layer], group: Group, *, shrunk: bool) -> Tensor:
    """Â or B̂ of each layer, Equation (9), or `shrunk`, Equation (21); [layers, strips, …]."""
    total = torch.stack([_total(layer, side) for layer in layers])
    count = _counts(layers, side)
    weight = beside(count, total).to(total.dtype)
    if count.ndim > 1:  # a matrix of a stack without rows has a sum of zero
        weight = torch.where(weight > 0, weight, 1.0)
    scale = 1 / weight
    if side == "left" and group["loss_reduction"] == "mean":
        # The loss is a mean over N rows, so g_i = δ_i/N. Undoing that here gives a short last
        # batch the same weight in the average as any other batch.
        uses = _uses(layers, side)
        scale = scale * beside(uses, total).square().to(total.dtype)
    mean = total * scale  # (9) Â or B̂
    form = _form(layers[0], side)
    if mean.ndim == 3:  # neither strips nor blocks
        mean = mean.unsqueeze(1)
    elif form.blocks > 1:
        mean = fill_padding_(mean, form.side)
    if not shrunk:
        return mean
    return _shrunk(mean, count, group["shrinkage"], form)  # (21) A_t or B_t


def _form(layer: Layer, side: SideName) -> SideForm:
    return layer.forms[LEFT if side == "left" else RIGHT]


def likeness(S: Tensor) -> tuple[object, ...]:
    return S.shape, S.dtype, S.device


def moment_of(layer: Layer, side: SideName) -> Moment | None:
    if layer.statistics is None:
        return None
    return layer.statistics.gradients if side == "left" else layer.statistics.inputs


def may_have_rows(moment: Moment | None) -> bool:
    """Whether there is any data. A layer called with zero rows has none.

    A count on an accelerator is not read here, because that would wait for it.
    """
    return moment is not None and (
        moment.count.device.type != "cpu" or any(moment.count.flatten().tolist())
    )


def _counts(layers: Sequence[Layer], side: SideName) -> Tensor:
    """The number of rows in each layer's moment, on the moments' device, [layers].

    Of stacks whose matrices have numbers of their own, [layers, stack].
    """
    return _stacked([not_none(moment_of(layer, side)).count for layer in layers], layers, side)


def _uses(layers: Sequence[Layer], side: SideName) -> Tensor:
    """The number of rows each layer's weight was applied to, on the moments' device, [layers]."""
    return _stacked([not_none(moment_of(layer, side)).uses for layer in layers], layers, side)


def of_strips(numbers: Tensor, strips: int) -> Tensor:
    """Numbers of each matrix of a stack, [..., stack], for each of its strips, [..., strips]."""
    return numbers.repeat_interleave(strips // numbers.shape[-1], -1)


def beside(numbers: Tensor, sums: Tensor) -> Tensor:
    """Numbers [layers] or [layers, stack], to multiply sums [layers, …] or [layers, strips, …]."""
    numbers = numbers if numbers.ndim == 1 else of_strips(numbers, sums.shape[1])
    return numbers[(...,) + (None,) * (sums.ndim - numbers.ndim)]


def _stacked(numbers: Sequence[Tensor], layers: Sequence[Layer], side: SideName) -> Tensor:
    device = _total(layers[0], side).device
    if device.type == "cpu":
        return torch.stack(list(numbers))
    return stacked_counts(numbers, device)


def not_none(found: Found | None) -> Found:
    assert found is not None
    return found


def _total(layer: Layer, side: SideName) -> Tensor:
    return not_none(moment_of(layer, side)).total


def _shrunk(S: Tensor, count: Tensor, shrinkage: object, form: SideForm) -> Tensor:
    """Every block of S [layers, strips, …] is shrunk as a factor of its own."""
    if shrinkage == "oas":
        return _oas(S, beside(count, S)[..., 0, 0], form)
    mean = trace_mean(S) * identity_like(S)
    if isinstance(shrinkage, dict):
        return S + shrinkage["damping"] * mean
    assert isinstance(shrinkage, (int, float, Tensor))
    return torch.lerp(S, mean, float(shrinkage)) if is_diagonal(S) else shrink(S, float(shrinkage))


def _oas(S: Tensor, count: Tensor, form: SideForm) -> Tensor:
    """OAS with the length of each block's own piece. A diagonal is left alone.

    A diagonal is a row of blocks of side one, and a number has nothing to be shrunk to.
    """
    if form.kind == "diagonal":
        return S
    if form.blocks == 1 or form.last == form.size:
        return oas(S, count)[0]
    return shrink(S, _intensities(S, count, form))


def _intensities(S: Tensor, count: Tensor, form: SideForm) -> Tensor:
    """λ of every block, Equation (17)."""
    if form.blocks == 1 or form.last == form.size:
        return oas(S, count)[1]
    first, last = S[..., :-1, :, :], S[..., -1, : form.last, : form.last]
    both = oas(first, count)[1], oas(last, count.squeeze(-1))[1].unsqueeze(-1)
    return torch.cat(both, -1)


def intensity_and_rows(
    side: SideName, layer: Layer, group: Group
) -> tuple[Tensor | None, Tensor] | None:
    """OAS's λ of a layer's observation, the mean over its blocks, and its number of rows.

    Both are scalars on the moment's device. λ is None if the shrinkage is another one, or the
    factor is a diagonal. None if there is no observation.
    """
    if not may_have_rows(moment_of(layer, side)):
        return None
    count, form = _counts([layer], side), _form(layer, side)
    rows = count.amin()
    if group.get("shrinkage") != "oas" or form.kind == "diagonal":
        return None, rows
    S = observations(side, [layer], group, shrunk=False)
    return _intensities(S, beside(count, S)[..., 0, 0], form).mean(), rows


# ---- maps ----------------------------------------------------------------------------------------

StoreResult = Callable[[Layer, Tensor | None], bool]  # returns whether there was a result


def alpha_of_sides(alpha: float | tuple[float, float]) -> tuple[float, float]:
    """α of the left (output, B) and of the right (input, A) side."""
    return (alpha[0], alpha[1]) if isinstance(alpha, (tuple, list)) else (alpha, alpha)


def root_maps(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """P_B = B̄^(−α), P_A = A^(−α), Equation (29) at α = ¼."""
    powers = zip(("left", "right"), alpha_of_sides(group["alpha"]), strict=True)
    return [
        batch
        for side, alpha in powers
        if alpha > 0
        for batch in map_batches(layers, side, Root.of(alpha, group["max_condition"]))
    ]


def map_batches(
    layers: Sequence[Layer],
    side: str,
    root: Root,
    store: StoreResult | None = None,
    prepared: Callable[[Tensor], Tensor] = lambda S: S,
    start: str | None = None,
) -> list[RootBatch]:
    """A root of every factor of a side, once for layers that share it: their `{side}_map`.

    `start` names the entry of the state from which products start.
    """
    known = [layer for layer in layers if f"{side}_factor" in layer.state]
    shared = group_by_key(known, lambda layer: id(layer.state[f"{side}_factor"]))
    batches = []
    computed = [(same, not_none(same[0].computed(f"{side}_factor"))) for same in shared]
    for same_form in group_by_key(computed, lambda both: likeness(both[1])):
        stored = SharedStore(
            [same for same, _ in same_form], store or as_map(f"{side}_map"), f"{side}_map"
        )
        factors = [factor for _, factor in same_form]
        starts = (
            None if start is None else [not_none(same[0].computed(start)) for same, _ in same_form]
        )
        batches.append(RootBatch(factors, root, stored, prepared, starts))
    return batches


def as_map(name: str) -> StoreResult:
    """Stores a root as the layer's map with this name."""
    return lambda layer, root: layer.set_map(name, root)


@dataclass(frozen=True)
class SharedStore:
    """Gives each root of a batch to the layers that share its factor; returns those without one.

    Attributes:
        layers: for each root the layers that share its factor.
        store: stores it in a layer.
        name: of a map which matrices of a stack keep if they had no rows.
    """

    layers: Sequence[Sequence[Layer]]
    store: StoreResult
    name: str = ""

    def __call__(self, batch: RootBatch) -> list[Layer]:
        failed: list[Layer] = []
        for index, same in enumerate(self.layers):
            root, fell_back = batch.result(index)
            if root is not None:
                root = same[0].kept_where_unseen(self.name, root)
                root = same[0].stored("map", root)  # once, so that the layers share it
            for layer in same:
                if fell_back:
                    layer.count("root_fallbacks")
                if not self.store(layer, root):
                    failed.append(layer)
        return failed

"""Factors from captured activation and backward moments, Equation (9), and maps from them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.block_diagonal import fill_padding_
from gomuon.functional.factors import (
    Root,
    RootBatch,
    oas,
    read_roots,
    shrink,
    start_roots,
    store_roots,
    take_roots,
)
from gomuon.functional.linalg import finite_factors, identity_like, is_diagonal, trace_mean
from gomuon.geometry.base import Geometry, Group
from gomuon.moments import Moment, stacked_counts
from gomuon.parameters.layers import Layer
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.stacking import group_by_key
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Count, EachCount, Entries, both_sides

SideName = Literal["left", "right"]
Maps = Callable[[Sequence[Layer], Group], list[RootBatch]]
StoreResult = Callable[[Layer, Tensor | None], bool]  # returns whether there was a result
_Before = list[tuple[Layer, dict[str, Any]]]  # layers, and entries of their states

Found = TypeVar("Found")

_NO_ROWS, _USABLE, _UNUSABLE = range(3)  # what became of an observation


@dataclass(frozen=True)
class _Observed:
    """Observations of one side, [b, blocks, d, d], for b lists of layers that share one.

    `outcomes`, [b], are not read yet.
    """

    side: SideName
    layers: Sequence[Sequence[Layer]]
    S: Tensor
    outcomes: Tensor


def alpha_of_sides(alpha: float | tuple[float, float]) -> tuple[float, float]:
    """α of the left (output, B) and of the right (input, A) side."""
    return (alpha[0], alpha[1]) if isinstance(alpha, (tuple, list)) else (alpha, alpha)


@dataclass(frozen=True)
class CapturedMoments(Geometry):
    """Factors A and B from captured moments, and maps from these factors.

    Args:
        maps: what makes the maps from the factors.
        start: an average starts from this multiple of the identity; if None, from its first
            observation.
        elapsed: an average decays by β^k, k the steps since its last observation, like the paper's
            β_B^K; otherwise by β at every observation.
        inputs_decay: the group key of the input side's decay. Without this key there is no average.
        only: "right" captures inputs only.
        shrunk: observations are shrunk (by the group's `shrinkage`) before they are averaged.
        description: one line for the table of methods.
    """

    maps: Maps
    start: float | None = None
    elapsed: bool = False
    inputs_decay: str = "factor_decay"
    only: SideName | None = None
    shrunk: bool = False
    description: str = "activation/backward moments"

    uses_moments: ClassVar[bool] = True
    entries: ClassVar[Entries] = {
        "left_seen": Count(of_step=True),
        "right_seen": Count(of_step=True),
        "left_seen_each": EachCount(),
        "right_seen_each": EachCount(),
        **both_sides("factor", one_for="strip", numbers="semidefinite", cut=True),
        **both_sides("map", one_for="either", cut=True),
        **both_sides("basis", one_for="either", numbers="cosines", cut=True),
        **both_sides("values", form="values", one_for="either", numbers="not negative", cut=True),
    }

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        left, right = alpha_of_sides(group["alpha"]) if "alpha" in group else (1.0, 1.0)
        return left > 0 and self.only != "right", right > 0

    def refresh(
        self,
        observed: Sequence[Layer],
        renewed: Sequence[Layer],
        stacks: Sequence[Stack],
        group: Group,
    ) -> Sequence[Layer]:
        """A_t, B_t, B̄_t, P_A and P_B, Equations (27) to (29)."""
        devices = {layer.parameter.device for stack in stacks for layer in stack.layers}
        if all(linalg.decomposes_well(device) for device in devices):
            failed = self.observe(observed, stacks, group)  # (27) A_t, B_t; (28) B̄_t
            failed = [*failed, *self.renew(renewed, stacks, group)]  # (29) P_A, P_B
        else:
            failed = self._refresh_with_one_wait(observed, renewed, stacks, group)
        _keep_factors(observed)
        return failed

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        """A_t, B_t and B̄_t, Equations (27) and (28)."""
        failed: list[Layer] = []
        for new in self._observed(due, group):
            for same, S, outcome in zip(new.layers, new.S, new.outcomes.tolist(), strict=True):
                if outcome == _USABLE:
                    self._set_factor(new.side, same, S, group)
                elif outcome == _UNUSABLE:
                    failed += same
        return failed

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        """P_A and P_B, Equation (29)."""
        failed = take_roots(self.maps(due, group), group.get("roots", "auto"))
        self._drop_inputs(stacks, group)
        return failed

    def _refresh_with_one_wait(
        self,
        observed: Sequence[Layer],
        renewed: Sequence[Layer],
        stacks: Sequence[Stack],
        group: Group,
    ) -> list[Layer]:
        """Factors are set, and roots taken, before it is known whether the factors are usable."""
        outcomes: list[Tensor] = []
        before: list[_Before] = []
        for new in self._observed(observed, group):
            outcomes.append(new.outcomes)
            for same, S, usable in zip(new.layers, new.S, new.outcomes == _USABLE, strict=True):
                before.append([(layer, _factor_entries(layer, new.side)) for layer in same])
                self._set_factor(new.side, same, S, group, usable)
        try:
            batches = self.maps(renewed, group)
            start_roots(batches, group.get("roots", "auto"))
            read = chain.from_iterable(read_roots(batches, *outcomes))  # the one wait
        except BaseException:
            for entries in before:  # nobody knows whether the new factors are usable
                _put_back(entries)
            raise
        failed: list[Layer] = []
        dropped: set[Layer] = set()
        for entries, outcome in zip(before, read, strict=True):
            if outcome != _USABLE:
                dropped.update(_put_back(entries))
                failed += [layer for layer, _ in entries if outcome == _UNUSABLE]
        # Of a factor that was dropped there is no root, which is no further failure.
        failed += [layer for layer in store_roots(batches) if layer not in dropped]
        self._drop_inputs(stacks, group)
        return failed

    def _drop_inputs(self, stacks: Sequence[Stack], group: Group) -> None:
        if group.get(self.inputs_decay) is None:
            for stack in stacks:  # A is not averaged: after its map is made, A is not needed
                for layer in stack.layers:
                    layer.state.pop("right_factor", None)
                    layer.state.pop("right_seen", None)
                    layer.unseen.clear()

    def _observed(self, layers: Sequence[Layer], group: Group) -> Iterator[_Observed]:
        """The factors of this step's moments, input sides first."""
        left, right = self.captured_sides(group)
        if right:
            yield from self._observed_side("right", layers, group)
        if left:
            yield from self._observed_side("left", layers, group)

    def _observed_side(
        self, side: SideName, layers: Sequence[Layer], group: Group
    ) -> Iterator[_Observed]:
        """Layers of one form together; layers that share moment and factor are observed once."""
        seen = [layer for layer in layers if _may_have_rows(_moment(layer, side))]
        together = group_by_key(
            seen, lambda l: (id(_moment(l, side)), id(l.state.get(f"{side}_factor")))
        )
        for batch in group_by_key(
            together,
            lambda same: (
                _likeness(_total(same[0], side)),
                _not_none(_moment(same[0], side)).count.shape,
                _form(same[0], side),
            ),
        ):
            first = [same[0] for same in batch]
            observed = self._observations(side, first, group)
            # A mask may have left no row.
            rows = _counts(first, side) > 0
            rows = rows if rows.ndim == 1 else rows.any(1)
            outcomes = torch.where(
                rows, torch.where(finite_factors(observed), _USABLE, _UNUSABLE), _NO_ROWS
            )
            yield _Observed(side, batch, observed, outcomes)

    def _set_factor(
        self,
        side: SideName,
        same: Sequence[Layer],
        observed: Tensor,
        group: Group,
        usable: Tensor | None = None,
    ) -> None:
        """Factor ← average of factor and observation; unchanged if that is not `usable`."""
        kept = same[0].computed(f"{side}_factor")
        count = _not_none(_moment(same[0], side)).count
        if count.ndim:
            factor = self._averaged_each(side, same[0], kept, observed, count > 0, group)
        else:
            factor = self._averaged(side, same[0], kept, observed, group)
        if usable is not None and kept is not None:
            factor = torch.where(usable, factor, kept)
        for layer in same:
            layer.state[f"{side}_factor"] = factor
            layer.state[f"{side}_seen"] = group["step"]

    def _observations(self, side: SideName, layers: Sequence[Layer], group: Group) -> Tensor:
        """Â or B̂ of each layer, Equation (9), or shrunk, Equation (21); [layers, strips, …]."""
        total = torch.stack([_total(layer, side) for layer in layers])
        count = _counts(layers, side)
        weight = _beside(count, total).to(total.dtype)
        if count.ndim > 1:  # a matrix of a stack without rows has a sum of zero
            weight = torch.where(weight > 0, weight, 1.0)
        scale = 1 / weight
        if side == "left" and group["loss_reduction"] == "mean":
            # The loss is a mean over N rows, so g_i = δ_i/N. Undoing that here gives a short last
            # batch the same weight in the average as any other batch.
            uses = _uses(layers, side)
            scale = scale * _beside(uses, total).square().to(total.dtype)
        mean = total * scale  # (9) Â or B̂
        form = _form(layers[0], side)
        if mean.ndim == 3:  # neither strips nor blocks
            mean = mean.unsqueeze(1)
        elif form.blocks > 1:
            mean = fill_padding_(mean, form.side)
        if not self.shrunk:
            return mean
        return _shrunk(mean, count, group["shrinkage"], form)  # (21) A_t or B_t

    def _averaged(
        self,
        side: SideName,
        layer: Layer,
        factor: Tensor | None,
        observed: Tensor,
        group: Group,
    ) -> Tensor:
        """B̄_t ← β^K B̄ + (1 − β^K) B_t, Equations (22) and (28); the first B_t starts it."""
        beta = group.get(self.inputs_decay if side == "right" else "factor_decay")
        if factor is None and self.start is not None:
            factor = (self.start * identity_like(observed)).expand_as(observed)
        if beta is None:
            return observed
        if factor is None:
            return observed.clone()  # not a view, which would keep the whole batch alive
        waited = group["step"] - layer.state.get(f"{side}_seen", 0) if self.elapsed else 1
        # Not in place: a layer that no longer shares this factor may still use the old one.
        return factor.mul(beta**waited).add(observed, alpha=1 - beta**waited)  # (22), (28)

    def _averaged_each(
        self,
        side: SideName,
        layer: Layer,
        factor: Tensor | None,
        observed: Tensor,
        seen: Tensor,
        group: Group,
    ) -> Tensor:
        """The same for a stack, of which only the matrices that are `seen`, [stack], had rows.

        The others keep their factors. Each decays by the steps since its own last observation.
        """
        strips = _beside(_of_strips(seen, len(observed)).unsqueeze(0), observed.unsqueeze(0))[0]
        beta = group.get(self.inputs_decay if side == "right" else "factor_decay")
        if beta is None:  # their maps stay as well
            layer.unseen[side] = ~_of_strips(seen, len(observed)).to(observed.device)
            return observed
        now, name = group["step"] + 1, f"{side}_seen_each"
        last = layer.state.get(name)
        if last is None:  # one more than the step of the last observation; 0: there was none
            last = torch.full(seen.shape, float(layer.state.get(f"{side}_seen", -1) + 1))
        last = last.to(observed.device, torch.float64)
        seen = seen.to(observed.device)
        layer.state[name] = torch.where(seen, float(now), last).to(observed.dtype)
        if factor is None:
            factor = torch.zeros_like(observed)
            if self.start is not None:
                factor = (self.start * identity_like(observed)).expand_as(observed)
        waited = now - last if self.elapsed else torch.ones_like(last)
        keeps = (beta**waited).to(observed.dtype)
        if self.start is None:  # the first observation starts the average
            keeps = torch.where(last > 0, keeps, 0.0)
        keeps = _beside(_of_strips(keeps, len(observed)).unsqueeze(0), observed.unsqueeze(0))[0]
        averaged = factor * keeps + observed * (1 - keeps)  # (22), (28)
        return torch.where(strips.to(observed.device), averaged, factor)


def root_maps(layers: Sequence[Layer], group: Group) -> list[RootBatch]:
    """P_B = B̄^(−α), P_A = A^(−α), Equation (29) at α = ¼."""
    powers = zip(("left", "right"), alpha_of_sides(group["alpha"]), strict=True)
    return [
        batch
        for side, alpha in powers
        if alpha > 0
        for batch in map_batches(layers, side, Root.of(alpha, group["max_condition"]))
    ]


def _form(layer: Layer, side: SideName) -> SideForm:
    return layer.forms[LEFT if side == "left" else RIGHT]


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
    computed = [(same, _not_none(same[0].computed(f"{side}_factor"))) for same in shared]
    for same_form in group_by_key(computed, lambda both: _likeness(both[1])):
        stored = store_shared(
            [same for same, _ in same_form], store or as_map(f"{side}_map"), f"{side}_map"
        )
        factors = [factor for _, factor in same_form]
        starts = (
            None if start is None else [_not_none(same[0].computed(start)) for same, _ in same_form]
        )
        batches.append(RootBatch(factors, root, stored, prepared, starts))
    return batches


def as_map(name: str) -> StoreResult:
    """Stores a root as the layer's map with this name."""
    return lambda layer, root: layer.set_map(name, root)


def store_shared(
    layers: Sequence[Sequence[Layer]], store: StoreResult, name: str = ""
) -> Callable[[RootBatch], list[Layer]]:
    """Gives each root of a batch to the layers that share its factor; returns those without one.

    `name` is that of a map which matrices of a stack keep if they had no rows.
    """

    def stored(batch: RootBatch) -> list[Layer]:
        failed: list[Layer] = []
        for index, same in enumerate(layers):
            root, fell_back = batch.result(index)
            if root is not None:
                root = same[0].kept_where_unseen(name, root)
                root = same[0].stored("map", root)  # once, so that the layers share it
            for layer in same:
                if fell_back:
                    layer.count("root_fallbacks")
                if not store(layer, root):
                    failed.append(layer)
        return failed

    return stored


def _keep_factors(layers: Sequence[Layer]) -> None:
    """New factors as they are kept, after roots were taken of them as they were computed."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # layers that share a factor share what is kept
    for layer in layers:
        for name in ("left_factor", "right_factor") if layer.keeping is not None else ():
            factor = layer.state.get(name)
            if factor is not None:
                if id(factor) not in made:
                    made[id(factor)] = factor, layer.stored(name, factor)
                layer.state[name] = made[id(factor)][1]


def _factor_entries(layer: Layer, side: SideName) -> dict[str, Any]:
    names = (f"{side}_factor", f"{side}_seen", f"{side}_seen_each")
    return {name: layer.state.get(name) for name in names}


def _put_back(before: _Before) -> list[Layer]:
    """Drop new factors again; returns their layers."""
    for layer, entries in before:
        for name, value in entries.items():
            if value is None:
                layer.state.pop(name, None)
            else:
                layer.state[name] = value
    return [layer for layer, _ in before]


def _likeness(S: Tensor) -> tuple[object, ...]:
    return S.shape, S.dtype, S.device


def _moment(layer: Layer, side: SideName) -> Moment | None:
    if layer.statistics is None:
        return None
    return layer.statistics.gradients if side == "left" else layer.statistics.inputs


def _may_have_rows(moment: Moment | None) -> bool:
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
    return _stacked([_not_none(_moment(layer, side)).count for layer in layers], layers, side)


def _uses(layers: Sequence[Layer], side: SideName) -> Tensor:
    """The number of rows each layer's weight was applied to, on the moments' device, [layers]."""
    return _stacked([_not_none(_moment(layer, side)).uses for layer in layers], layers, side)


def _of_strips(numbers: Tensor, strips: int) -> Tensor:
    """Numbers of each matrix of a stack, [..., stack], for each of its strips, [..., strips]."""
    return numbers.repeat_interleave(strips // numbers.shape[-1], -1)


def _beside(numbers: Tensor, sums: Tensor) -> Tensor:
    """Numbers [layers] or [layers, stack], to multiply sums [layers, …] or [layers, strips, …]."""
    numbers = numbers if numbers.ndim == 1 else _of_strips(numbers, sums.shape[1])
    return numbers[(...,) + (None,) * (sums.ndim - numbers.ndim)]


def _stacked(numbers: Sequence[Tensor], layers: Sequence[Layer], side: SideName) -> Tensor:
    device = _total(layers[0], side).device
    if device.type == "cpu":
        return torch.stack(list(numbers))
    return stacked_counts(numbers, device)


def _not_none(found: Found | None) -> Found:
    assert found is not None
    return found


def _total(layer: Layer, side: SideName) -> Tensor:
    return _not_none(_moment(layer, side)).total


def _shrunk(S: Tensor, count: Tensor, shrinkage: object, form: SideForm) -> Tensor:
    """Every block of S [layers, strips, …] is shrunk as a factor of its own."""
    if shrinkage == "oas":
        return _oas(S, _beside(count, S)[..., 0, 0], form)
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
    first, last = S[..., :-1, :, :], S[..., -1, : form.last, : form.last]
    intensities = oas(first, count)[1], oas(last, count.squeeze(-1))[1].unsqueeze(-1)
    return shrink(S, torch.cat(intensities, -1))

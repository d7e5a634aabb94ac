"""Factors A and B from captured moments, their averages, and maps: Equations (22), (27) to (29)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from gomuon.functional import linalg
from gomuon.functional.factors import RootBatch, read_roots, start_roots, store_roots, take_roots
from gomuon.functional.linalg import identity_like
from gomuon.geometry.base import Geometry, Group
from gomuon.geometry.efficiency import (
    cached_maps,
    measure,
    replaced_maps,
    roots_to_be_stored,
    tell,
)
from gomuon.geometry.moments_to_maps import (
    UNUSABLE,
    USABLE,
    Observed,
    SideName,
    alpha_of_sides,
    beside,
    moment_of,
    not_none,
    observed_side,
    of_strips,
)
from gomuon.intervals import Adaptive
from gomuon.parameters.layers import Layer
from gomuon.parameters.stacks import Stack
from gomuon.parameters.state import Count, EachCount, Entries, both_sides

Maps = Callable[[Sequence[Layer], Group], list[RootBatch]]
_Before = list[tuple[Layer, dict[str, Any]]]  # layers, and entries of their states


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
            cached = cached_maps(renewed) if _adapts(group) else []
            failed = self.observe(observed, stacks, group)  # (27) A_t, B_t; (28) B̄_t
            failed = [*failed, *self.renew(renewed, stacks, group)]  # (29) P_A, P_B
            if cached:
                tell(measure(cached, replaced_maps(cached), stacks, group))
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
                if outcome == USABLE:
                    self._set_factor(new.side, same, S, group)
                elif outcome == UNUSABLE:
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
            for same, S, usable in zip(new.layers, new.S, new.outcomes == USABLE, strict=True):
                before.append([(layer, _factor_entries(layer, new.side)) for layer in same])
                self._set_factor(new.side, same, S, group, usable)
        cached = cached_maps(renewed) if _adapts(group) else []
        try:
            batches = self.maps(renewed, group)
            start_roots(batches, group.get("roots", "auto"))
            fresh = roots_to_be_stored(batches) if cached else None
            measured = list(measure(cached, fresh, stacks, group)) if fresh and cached else []
            flags = [*outcomes, *(found.outcomes for found in measured)]
            lists = read_roots(batches, *flags)  # the one wait
        except BaseException:
            for entries in before:  # nobody knows whether the new factors are usable
                _put_back(entries)
            raise
        failed: list[Layer] = []
        dropped: set[Layer] = set()
        read = chain.from_iterable(lists[: len(outcomes)])
        for entries, outcome in zip(before, read, strict=True):
            if outcome != USABLE:
                dropped.update(_put_back(entries))
                failed += [layer for layer, _ in entries if outcome == UNUSABLE]
        # Of a factor that was dropped there is no root, which is no further failure.
        failed += [layer for layer in store_roots(batches) if layer not in dropped]
        if cached and fresh is None:  # decompositions have waited already
            tell(measure(cached, replaced_maps(cached), stacks, group))
        for found, told in zip(measured, lists[len(outcomes) :], strict=True):
            found.tell(told)
        self._drop_inputs(stacks, group)
        return failed

    def _drop_inputs(self, stacks: Sequence[Stack], group: Group) -> None:
        if group.get(self.inputs_decay) is None:
            for stack in stacks:  # A is not averaged: after its map is made, A is not needed
                for layer in stack.layers:
                    layer.state.pop("right_factor", None)
                    layer.state.pop("right_seen", None)
                    layer.unseen.clear()

    def _observed(self, layers: Sequence[Layer], group: Group) -> Iterator[Observed]:
        """The factors of this step's moments, input sides first."""
        left, right = self.captured_sides(group)
        if right:
            yield from observed_side("right", layers, group, shrunk=self.shrunk)
        if left:
            yield from observed_side("left", layers, group, shrunk=self.shrunk)

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
        count = not_none(moment_of(same[0], side)).count
        if count.ndim:
            factor = self._averaged_each(side, same[0], kept, observed, count > 0, group)
        else:
            factor = self._averaged(side, same[0], kept, observed, group)
        if usable is not None and kept is not None:
            factor = torch.where(usable, factor, kept)
        for layer in same:
            layer.state[f"{side}_factor"] = factor
            layer.state[f"{side}_seen"] = group["step"]

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
        strips = beside(of_strips(seen, len(observed)).unsqueeze(0), observed.unsqueeze(0))[0]
        beta = group.get(self.inputs_decay if side == "right" else "factor_decay")
        if beta is None:  # their maps stay as well
            layer.unseen[side] = ~of_strips(seen, len(observed)).to(observed.device)
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
        keeps = beside(of_strips(keeps, len(observed)).unsqueeze(0), observed.unsqueeze(0))[0]
        averaged = factor * keeps + observed * (1 - keeps)  # (22), (28)
        return torch.where(strips.to(observed.device), averaged, factor)


def _adapts(group: Group) -> bool:
    """Whether the clock asks how good the cached maps were."""
    return isinstance(group.get("refresh_every"), Adaptive)


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

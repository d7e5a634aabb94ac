"""Factors from captured activation and backward moments, Equation (9), and maps from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gomuon.functional.block_diagonal import fill_padding_
from gomuon.functional.factors import guarded_roots, oas, shrink
from gomuon.functional.linalg import finite_factors, identity_like, is_diagonal, trace_mean
from gomuon.geometry.base import Geometry, Group
from gomuon.moments import Moment
from gomuon.parameters.side_forms import LEFT, RIGHT, SideForm
from gomuon.parameters.stacks import Layer, Stack, group_by_key
from gomuon.parameters.state import Count, Entries, both_sides
from gomuon.threads.spreading import concurrently

SideName = Literal["left", "right"]
Maps = Callable[[Sequence[Layer], Group], list[Layer]]  # returns the layers that got no maps
FactorFunction = Callable[[Tensor], list[Tensor | None]]  # of a batch; None for what failed
StoreResult = Callable[[Layer, Tensor | None], bool]  # returns whether there was a result


def alpha_of_sides(alpha: float | tuple[float, float]) -> tuple[float, float]:
    """α of the left (output, B) and of the right (input, A) side."""
    return (alpha[0], alpha[1]) if isinstance(alpha, (tuple, list)) else (alpha, alpha)


@dataclass(frozen=True)
class CapturedMoments(Geometry):
    """Factors A and B from captured moments, and maps from these factors.

    Args:
        maps: makes the maps from the factors.
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
        **both_sides("factor", one_for="strip", numbers="semidefinite", cut=True),
        **both_sides("map", one_for="either", cut=True),
        **both_sides("basis", one_for="either", numbers="cosines", cut=True),
        **both_sides("values", form="values", one_for="either", numbers="not negative", cut=True),
    }

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        left, right = alpha_of_sides(group["alpha"]) if "alpha" in group else (1.0, 1.0)
        return left > 0 and self.only != "right", right > 0

    def observe(
        self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group
    ) -> Sequence[Layer]:
        """A_t, B_t and B̄_t, Equations (27) and (28)."""
        left, right = self.captured_sides(group)
        failed = self._observe("right", due, group) if right else []
        return failed + (self._observe("left", due, group) if left else [])

    def renew(self, due: Sequence[Layer], stacks: Sequence[Stack], group: Group) -> Sequence[Layer]:
        """P_A and P_B, Equation (29)."""
        failed = self.maps(due, group)
        if group.get(self.inputs_decay) is None:
            for stack in stacks:  # A is not averaged: after its map is made, A is not needed
                for layer in stack.layers:
                    layer.state.pop("right_factor", None)
                    layer.state.pop("right_seen", None)
        return failed

    def _observe(self, side: SideName, layers: Sequence[Layer], group: Group) -> list[Layer]:
        """Factor ← average of factor and this step's moment. Layers that share both do it once."""
        seen = [layer for layer in layers if _has_rows(_moment(layer, side))]
        together = group_by_key(
            seen, lambda l: (id(_moment(l, side)), id(l.state.get(f"{side}_factor")))
        )
        failed: list[Layer] = []
        for batch in group_by_key(
            together, lambda same: (_key(_total(same[0], side)), _form(same[0], side))
        ):
            observed = self._observations(side, [same[0] for same in batch], group)
            usable = finite_factors(observed).tolist()
            for same, S, good in zip(batch, observed, usable, strict=True):
                if good:
                    factor = self._averaged(side, same[0], S, group)
                    for layer in same:
                        layer.state[f"{side}_factor"] = factor
                        layer.state[f"{side}_seen"] = group["step"]
                else:
                    failed += same
        return failed

    def _observations(self, side: SideName, layers: Sequence[Layer], group: Group) -> Tensor:
        """Â or B̂ of each layer, Equation (9), or shrunk, Equation (21); [layers, strips, …]."""
        total = torch.stack([_total(layer, side) for layer in layers])
        count = torch.stack([_not_none(_moment(layer, side)).count for layer in layers])
        weight = count[(...,) + (None,) * (total.ndim - 1)].to(total.dtype)
        scale = 1 / weight
        if side == "left" and group["loss_reduction"] == "mean":
            # The loss is a mean over N rows, so g_i = δ_i/N. Undoing that here gives a short last
            # batch the same weight in the average as any other batch.
            uses = torch.stack([_not_none(_moment(layer, side)).uses for layer in layers])
            scale = scale * uses.view_as(weight).square().to(total.dtype)
        mean = total * scale  # (9) Â or B̂
        form = _form(layers[0], side)
        if mean.ndim == 3:  # neither strips nor blocks
            mean = mean.unsqueeze(1)
        elif form.blocks > 1:
            mean = fill_padding_(mean, form.side)
        if not self.shrunk:
            return mean
        return _shrunk(mean, count, group["shrinkage"], form)  # (21) A_t or B_t

    def _averaged(self, side: SideName, layer: Layer, observed: Tensor, group: Group) -> Tensor:
        """B̄_t ← β^K B̄ + (1 − β^K) B_t, Equations (22) and (28); the first B_t starts it."""
        beta = group.get(self.inputs_decay if side == "right" else "factor_decay")
        factor = layer.state.get(f"{side}_factor")
        if factor is None and self.start is not None:
            factor = (self.start * identity_like(observed)).expand_as(observed)
        if beta is None:
            return observed
        if factor is None:
            return observed.clone()  # not a view, which would keep the whole batch alive
        waited = group["step"] - layer.state.get(f"{side}_seen", 0) if self.elapsed else 1
        # Not in place: a layer that no longer shares this factor may still use the old one.
        return factor.mul(beta**waited).add(observed, alpha=1 - beta**waited)  # (22), (28)


def root_maps(layers: Sequence[Layer], group: Group) -> list[Layer]:
    """P_B = B̄^(−α), P_A = A^(−α), Equation (29) at α = ¼."""
    powers = zip(("left", "right"), alpha_of_sides(group["alpha"]), strict=True)
    jobs = [
        job
        for side, alpha in powers
        if alpha > 0
        for job in map_jobs(layers, side, partial(guarded_roots, power=alpha))
    ]
    return run_jobs(jobs)


@dataclass(frozen=True)
class FactorJob:
    """Applies a function to factors of one shape. Layers that share a factor share the result."""

    factors: Sequence[Tensor]
    layers: Sequence[Sequence[Layer]]
    function: FactorFunction
    store: StoreResult

    def __call__(self) -> list[Tensor | None]:
        return self.function(torch.stack(list(self.factors)))


def map_jobs(layers: Sequence[Layer], side: str, function: FactorFunction) -> list[FactorJob]:
    """Jobs that make `{side}_map` from every factor."""
    name = f"{side}_map"
    return factor_jobs(layers, side, function, lambda layer, made: layer.set_map(name, made))


def factor_jobs(
    layers: Sequence[Layer], side: str, function: FactorFunction, store: StoreResult
) -> list[FactorJob]:
    """Jobs that apply a function to every factor of a side, once for layers that share it."""
    known = [layer for layer in layers if f"{side}_factor" in layer.state]
    shared = group_by_key(known, lambda layer: id(layer.state[f"{side}_factor"]))
    return [
        FactorJob([same[0].state[f"{side}_factor"] for same in batch], batch, function, store)
        for batch in group_by_key(shared, lambda same: _key(same[0].state[f"{side}_factor"]))
    ]


def run_jobs(jobs: Sequence[FactorJob]) -> list[Layer]:
    """Run the jobs, the largest matrices first; returns the layers that got no result."""
    jobs = sorted(jobs, key=lambda job: -job.factors[0].shape[-1])
    return [
        layer
        for job, results in zip(jobs, concurrently(jobs), strict=True)
        for same, result in zip(job.layers, results, strict=True)
        for layer in same
        if not job.store(layer, result)
    ]


def _form(layer: Layer, side: SideName) -> SideForm:
    return layer.forms[LEFT if side == "left" else RIGHT]


def _key(S: Tensor) -> tuple[object, ...]:
    return S.shape, S.dtype, S.device


def _moment(layer: Layer, side: SideName) -> Moment | None:
    if layer.statistics is None:
        return None
    return layer.statistics.gradients if side == "left" else layer.statistics.inputs


def _has_rows(moment: Moment | None) -> bool:
    """Whether there is any data. A layer called with zero rows has none."""
    return moment is not None and bool(moment.count)


def _not_none(moment: Moment | None) -> Moment:
    assert moment is not None
    return moment


def _total(layer: Layer, side: SideName) -> Tensor:
    return _not_none(_moment(layer, side)).total


def _shrunk(S: Tensor, count: Tensor, shrinkage: object, form: SideForm) -> Tensor:
    """Every block of S [layers, strips, …] is shrunk as a factor of its own."""
    if shrinkage == "oas":
        return _oas(S, count.view(-1, *[1] * (S.ndim - 3)), form)
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

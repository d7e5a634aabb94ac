"""Activation and backward moments: A = E[xxᵀ] and B = E[δδᵀ], averaged, then made into maps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gomuon.batching import alike
from gomuon.functional import oas, shrink
from gomuon.functional.linalg import decompose
from gomuon.functional.spreading import concurrently
from gomuon.geometry.base import (
    Geometry,
    Group,
    due,
    guarded,
    guarded_roots,
    identity_like,
    is_finite,
    keep,
    trace_mean,
)
from gomuon.layers import Layer
from gomuon.probes import Moment
from gomuon.settings import sides
from gomuon.stacks import Stack

Side = Literal["left", "right"]
Maps = Callable[[Sequence[Layer], Group], list[Layer]]


@dataclass(frozen=True)
class CapturedMoments(Geometry):
    """Captured factors on one clock, their maps on another.

    Args:
        maps: what is made of the factors.
        start: what an average starts from: its first observation, or this multiple of the identity.
        elapsed: an average decays by β to the number of steps since its last observation, as the
            paper's β_B^K; else by β at every observation.
        inputs_decay: the group key of the input side's decay; a group without it keeps no average.
        only: "right" captures inputs alone.
        shrunk: observations are shrunk (OAS or as the group says) before they are averaged.
        description: for the table of methods.
    """

    maps: Maps
    start: float | None = None
    elapsed: bool = False
    inputs_decay: str = "factor_decay"
    only: Side | None = None
    shrunk: bool = False
    description: str = "activation/backward moments"

    def captured_sides(self, group: Group) -> tuple[bool, bool]:
        left, right = sides(group["alpha"]) if "alpha" in group else (1.0, 1.0)
        return left > 0 and self.only != "right", right > 0

    def capture_due(self, group: Group, lag: float = 0.0) -> bool:
        clock = "statistics_every" if "statistics_every" in group else "refresh_every"
        return due(group, clock, lag)

    def before(self, stacks: Sequence[Stack], group: Group) -> list[Layer]:
        failed: list[Layer] = []
        layers = [layer for stack in stacks for layer in stack.layers]
        left, right = self.captured_sides(group)
        observed = [layer for layer in layers if self.capture_due(group, layer.lag)]
        failed += self._observe("right", observed, group) if right else []
        failed += self._observe("left", observed, group) if left else []
        failed += self.maps([layer for layer in layers if due(group, lag=layer.lag)], group)
        if group.get(self.inputs_decay) is None:
            for layer in layers:  # sampled and held: nothing of A outlives its map
                layer.state.pop("right_factor", None)
                layer.state.pop("right_seen", None)
        return failed

    def _observe(self, side: Side, layers: Sequence[Layer], group: Group) -> list[Layer]:
        """Factor ← average of factor and this step's moment; once for layers that share both."""
        seen = [layer for layer in layers if _has_rows(_moment(layer, side))]
        together = alike(
            seen, lambda l: (id(_moment(l, side)), id(l.state.get(f"{side}_factor")), _cut(l))
        )
        failed: list[Layer] = []
        for batch in alike(together, lambda same: (_key(_total(same[0], side)), _cut(same[0]))):
            observed = self._observations(side, [same[0] for same in batch], group)
            usable = is_finite(observed).tolist()
            for same, S, good in zip(batch, observed, usable, strict=True):
                if good:
                    factor = self._averaged(side, same[0], S, group)
                    for layer in same:
                        layer.state[f"{side}_factor"] = factor
                        layer.state[f"{side}_seen"] = group["step"]
                else:
                    failed += same
        return failed

    def _observations(self, side: Side, layers: Sequence[Layer], group: Group) -> Tensor:
        """Â or B̂ of each layer, [layers, blocks of that side, d, d]."""
        total = torch.stack([_total(layer, side) for layer in layers])
        count = torch.stack([_present(_moment(layer, side)).count for layer in layers])
        weight = count[(...,) + (None,) * (total.ndim - 1)].to(total.dtype)
        scale = 1 / weight
        if side == "left" and group["loss_reduction"] == "mean":
            # The loss averaged over N rows, so g_i = δ_i/N. Undone here, a short last batch enters
            # the average with the weight of any other.
            uses = torch.stack([_present(_moment(layer, side)).uses for layer in layers])
            scale = scale * uses.view_as(weight).square().to(total.dtype)
        mean = total * scale
        if mean.ndim == 3:  # not already one moment per group of a convolution
            spec = layers[0].spec
            mean = _diagonal_blocks(mean, spec.rows if side == "left" else spec.columns)
        return _shrunk(mean, count[:, None], group["shrinkage"]) if self.shrunk else mean

    def _averaged(self, side: Side, layer: Layer, observed: Tensor, group: Group) -> Tensor:
        """The first observation starts the average, unless it has a start of its own."""
        beta = group.get(self.inputs_decay if side == "right" else "factor_decay")
        factor = layer.state.get(f"{side}_factor")
        if factor is None and self.start is not None:
            factor = (self.start * identity_like(observed)).repeat(len(observed), 1, 1)
        if beta is None:
            return observed
        if factor is None:
            return observed.clone()  # not a view, which would keep the whole batch alive
        waited = group["step"] - layer.state.get(f"{side}_seen", 0) if self.elapsed else 1
        # Not in place: a layer that has shared it and no longer does keeps its own.
        return factor.mul(beta**waited).add(observed, alpha=1 - beta**waited)


def root_maps(layers: Sequence[Layer], group: Group) -> list[Layer]:
    """P_B = B̄^(−α), P_A = A^(−α)."""
    powers = zip(("left", "right"), sides(group["alpha"]), strict=True)
    jobs = [
        job
        for side, alpha in powers
        if alpha > 0
        for job in _each_map(layers, side, partial(guarded_roots, power=alpha))
    ]
    return _done(jobs)


def ridge_inverse_map(layers: Sequence[Layer], group: Group) -> list[Layer]:
    """P_A = (A + (d·tr(A)/n + 1e-8)·I)⁻¹."""

    def inverse(S: Tensor) -> Tensor:
        ridge = group["damping"] * trace_mean(S) + 1e-8
        return torch.linalg.inv(S + ridge * identity_like(S))

    return _done(_each_map(layers, "right", lambda S: guarded(inverse, S)))


def eigen_maps(layers: Sequence[Layer], group: Group) -> list[Layer]:
    """Eigenvectors and eigenvalues of both factors."""

    # Packed as one tensor [values; vectors], because a guard sees one result per factor.
    def packed(S: Tensor) -> Tensor:
        values, vectors = decompose(torch.linalg.eigh, S)
        return torch.cat([values.unsqueeze(-2), vectors], dim=-2)

    def unpacked(side: str, layer: Layer, eigen: Tensor | None) -> list[Layer]:
        if eigen is None:
            return [layer]
        # Rounding makes zeros negative, and a product of two may outweigh the damping.
        values, basis = eigen[..., 0, :].clamp_min(0), eigen[..., 1:, :].clone()
        return keep(layer, f"{side}_values", values) + keep(layer, f"{side}_basis", basis)

    failed = []
    for side in ("left", "right"):
        jobs = _each_factor(layers, side, lambda S: guarded(packed, S), partial(unpacked, side))
        failed += _done(jobs)
    return failed


def balanced_root_maps(layers: Sequence[Layer], group: Group) -> list[Layer]:
    """(A + π√λ·I)^(−½) and (B + √λ/π·I)^(−½) with π² = (tr A/n)/(tr B/m)."""
    failed = []
    root = group["damping"] ** 0.5
    for layer in layers:
        # For each block: every pair of a row's B and a column's A has a π of its own.
        A, B = layer.spread("right_factor", "right"), layer.spread("left_factor", "left")
        if A is None or B is None:
            continue
        ratio = trace_mean(A) / trace_mean(B)
        pi = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).sqrt()
        A, B = A + pi * root * identity_like(A), B + root / pi * identity_like(B)
        for name, factor in (("right_map", A), ("left_map", B)):
            failed += keep(layer, name, guarded_roots(factor.unsqueeze(0), 0.5)[0])
    return failed


Keep = Callable[[Layer, Tensor | None], list[Layer]]  # returns the layer if there is no result


@dataclass(frozen=True)
class _Job:
    """Make something of factors of one shape, each for all the layers that share it."""

    factors: Sequence[Tensor]
    layers: Sequence[Sequence[Layer]]
    function: Callable[[Tensor], list[Tensor | None]]
    keep: Keep

    def __call__(self) -> list[Tensor | None]:
        return self.function(torch.stack(list(self.factors)))


def _each_map(
    layers: Sequence[Layer], side: str, function: Callable[[Tensor], list[Tensor | None]]
) -> list[_Job]:
    """How to make `{side}_map` of every factor."""
    name = f"{side}_map"
    return _each_factor(layers, side, function, lambda layer, made: keep(layer, name, made))


def _each_factor(
    layers: Sequence[Layer],
    side: str,
    function: Callable[[Tensor], list[Tensor | None]],
    keep: Keep,
) -> list[_Job]:
    """How to make something of every factor of a side, once for layers that share it."""
    known = [layer for layer in layers if f"{side}_factor" in layer.state]
    shared = alike(known, lambda layer: id(layer.state[f"{side}_factor"]))
    return [
        _Job([same[0].state[f"{side}_factor"] for same in batch], batch, function, keep)
        for batch in alike(shared, lambda same: _key(same[0].state[f"{side}_factor"]))
    ]


def _done(jobs: Sequence[_Job]) -> list[Layer]:
    """Do them, the largest matrices first, and return the layers that could not be served."""
    jobs = sorted(jobs, key=lambda job: -job.factors[0].shape[-1])
    failed: list[Layer] = []
    for job, results in zip(jobs, concurrently(jobs), strict=True):
        for same, result in zip(job.layers, results, strict=True):
            for layer in same:
                failed += job.keep(layer, result)
    return failed


def _cut(layer: Layer) -> tuple[int, int]:
    return layer.spec.rows, layer.spec.columns


def _key(S: Tensor) -> tuple[object, ...]:
    return S.shape, S.dtype, S.device


def _moment(layer: Layer, side: Side) -> Moment | None:
    if layer.statistics is None:
        return None
    return layer.statistics.gradients if side == "left" else layer.statistics.inputs


def _has_rows(moment: Moment | None) -> bool:
    """Whether anything was seen; a layer called with no rows was not."""
    return moment is not None and bool(moment.count)


def _present(moment: Moment | None) -> Moment:
    assert moment is not None
    return moment


def _total(layer: Layer, side: Side) -> Tensor:
    return _present(_moment(layer, side)).total


def _shrunk(S: Tensor, count: Tensor, shrinkage: object) -> Tensor:
    if shrinkage == "oas":
        return oas(S, count)[0]
    if isinstance(shrinkage, dict):
        return S + shrinkage["damping"] * trace_mean(S) * identity_like(S)
    assert isinstance(shrinkage, (int, float, Tensor))
    return shrink(S, float(shrinkage))


def _diagonal_blocks(S: Tensor, blocks: int) -> Tensor:
    """[b, d, d] -> [b, blocks, d/blocks, d/blocks]."""
    size = S.shape[-1] // blocks
    tiles = S.reshape(-1, blocks, size, blocks, size)
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)

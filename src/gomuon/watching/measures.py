"""The numbers of a stack at one step: cheap ones for all layers, spectra for those whose turn it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.functional.certificates import (
    Maps,
    MapSpectrum,
    OracleShare,
    cached_efficiency,
    distortion,
    effective_rank,
    map_spectrum,
    oracle_share,
)
from gomuon.functional.linalg import full_float32
from gomuon.functional.spectra import nuclear_norm_and_rank
from gomuon.geometry.maps import alpha_of_sides
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.stations import matched_polar, plain_polar
from gomuon.watching.negatives import inner
from gomuon.watching.refreshes import Refresh

Group = Mapping[str, Any]
Numbers = dict[str, Tensor]
_SIDES = ("output", "input")  # left and right


def lengths(stack: Stack, source: Tensor, D: Tensor, U: Tensor, group: Group) -> Numbers:
    """Inner products and squares of norms, of every matrix of a stack that has just moved."""
    G = stack.G
    update_square = inner(U, U)
    found = {
        "source_alignment": inner(source, D),
        "gradient_alignment": inner(G, D),
        "source_update": inner(source, U),
        "gradient_update": inner(G, U),
        "source_square": inner(source, source),
        "gradient_square": inner(G, G),
        "direction_square": inner(D, D),
        "update_square": update_square,
        "step_square": update_square * group["lr"] ** 2,
    }
    if has_weights(stack):
        W = stack.W
        found["weight_square"] = inner(W, W)
    return found


def has_weights(stack: Stack) -> bool:
    """Whether this rank has the whole weights of a stack's layers."""
    return all(layer.has_weights for layer in stack.layers)


def powers_of(recipe: Recipe, group: Group) -> tuple[float | None, float | None]:
    """The powers of the roots that the maps are: of the output and of the input side."""
    if "alpha" in group:
        return alpha_of_sides(group["alpha"])
    power = group.get("power")
    return power, power


def has_polar_length(recipe: Recipe, group: Group) -> bool:
    """Whether ‖D‖_F² is the rank of a polar factor."""
    if recipe.direction is plain_polar:
        return True
    return recipe.direction is matched_polar and group.get("graft") == "frobenius"


def oracle_maps(recipe: Recipe, maps: Maps) -> Maps | None:
    """The maps in whose ball the direction is the matched one; None if it is none."""
    if recipe.direction is matched_polar:
        return maps
    return (None, None) if recipe.direction is plain_polar else None


class Spectra:
    """Numbers that need spectra, of the layers of a stack whose turn it is.

    What cannot be decomposed, because it is not finite, is missing. Nothing here raises.
    """

    def __init__(self, recipe: Recipe, stack: Stack, chosen: Sequence[bool], group: Group) -> None:
        self._recipe = recipe
        self._stack = stack
        self._group = group
        begins = [0]
        for layer in stack.layers:
            begins.append(begins[-1] + layer.blocks)
        self._count = begins[-1]
        self._layers = [
            layer for layer, is_chosen in zip(stack.layers, chosen, strict=True) if is_chosen
        ]
        self._slices = [
            slice(begins[i], begins[i + 1]) for i, is_chosen in enumerate(chosen) if is_chosen
        ]

    def measured(
        self, source: Tensor, D: Tensor, refreshes: Sequence[Refresh | None], *, record: bool
    ) -> Numbers:
        """The numbers [b], NaN for layers whose turn it is not.

        Args:
            source: M̂, [b, m, n].
            D: the direction.
            refreshes: for every layer that was chosen, what was kept before a refresh in this step.
            record: whether this step is recorded. Otherwise only its refresh is measured.
        """
        if not self._layers:
            return {}
        try:
            with full_float32():
                found = self._measured(source, D, refreshes, record)
        except (DecompositionError, torch.linalg.LinAlgError):
            return {}
        return {name: self._everywhere(part) for name, part in found.items()}

    def _measured(
        self, source: Tensor, D: Tensor, refreshes: Sequence[Refresh | None], record: bool
    ) -> Numbers:
        M, D = self._part(source), self._part(D)
        maps = tuple(self._map(name) for name in ("left_map", "right_map"))
        left, right = self._spectrum(maps, 0), self._spectrum(maps, 1)
        ball = oracle_maps(self._recipe, (maps[0], maps[1]))
        own = ball is not None and any(P is not None for P in ball)
        inverses = tuple(S.inverse if S is not None and own else None for S in (left, right))
        found: Numbers = {}
        if record:
            for side, S in zip(_SIDES, (left, right), strict=True):
                if S is not None:
                    found[f"{side}_map_condition"] = S.condition
                    found[f"{side}_raised"] = S.raised.to(M.dtype)
            if has_weights(self._stack):
                found["weight_rank"] = effective_rank(self._part(self._stack.W))
        share: OracleShare | None = None
        if ball is not None:
            share = oracle_share(M, D, ball, (inverses[0], inverses[1]))
            if record:
                found |= self._of_oracle(M, share, (left, right) if own else (None, None))
        if any(refreshes):
            found |= self._drift(M, (left, right), refreshes, share)
        return found

    def _of_oracle(
        self, M: Tensor, share: OracleShare, spectra: tuple[MapSpectrum | None, MapSpectrum | None]
    ) -> Numbers:
        found = {
            "oracle_value": share.value,
            "optimum": share.value * share.radius,
            "radius": share.radius,
            "source_rank": share.rank,
        }
        if has_polar_length(self._recipe, self._group):
            bound = share.value  # Muon's is the value itself
            conditions = [S.condition for S in spectra if S is not None]
            if conditions:
                bound, _ = nuclear_norm_and_rank(M)
            for condition in conditions:
                bound = bound / condition
            found["alignment_bound"] = bound  # (16)
        return found

    def _drift(
        self,
        M: Tensor,
        spectra: tuple[MapSpectrum | None, MapSpectrum | None],
        refreshes: Sequence[Refresh | None],
        share: OracleShare | None,
    ) -> Numbers:
        """Θ and the efficiency of layers that had maps before; NaN for the others."""
        known, cached = self._cached(refreshes)  # matrices that had maps before, and these maps
        if not known:
            return {}
        whole = torch.full((len(M),), torch.nan, dtype=M.dtype, device=M.device)
        parts = [slice(begin, end) for begin, end in known]
        theta: Tensor | float = 1.0
        inverses: list[Tensor | None] = []
        for old, S, d in zip(cached, spectra, M.shape[-2:], strict=True):
            if (old is None) != (S is None) or (
                old is not None and S is not None and old.shape[1:] != S.inverse.shape[1:]
            ):
                return {}  # a side was switched on or off, or is cut otherwise
            inverse = None if S is None else _rows(S.inverse, parts)
            inverses.append(inverse)
            if old is not None and inverse is not None:
                theta = theta * distortion(inverse, old, d)
        if not isinstance(theta, Tensor):
            return {}
        found = {"drift": _placed(whole, theta, parts)}
        if share is not None and self._recipe.direction is matched_polar:
            reached = cached_efficiency(
                _rows(M, parts),
                (cached[0], cached[1]),
                (inverses[0], inverses[1]),
                _rows(share.value, parts),
                self._group["polar"],
            )
            found["efficiency"] = _placed(whole, reached, parts)
        return found

    def _cached(
        self, refreshes: Sequence[Refresh | None]
    ) -> tuple[list[tuple[int, int]], list[Tensor | None]]:
        """Which matrices had maps before, and these maps, [b, …] over such matrices."""
        begin, known = 0, []
        kept: tuple[list[Tensor], list[Tensor]] = ([], [])
        for layer, refresh in zip(self._layers, refreshes, strict=True):
            if refresh is not None and any(P is not None for P in refresh.cached):
                known.append((begin, begin + layer.blocks))
                for side, P in zip(kept, refresh.cached, strict=True):
                    if P is not None:
                        side.append(P)
            begin += layer.blocks
        alike = all(len(side) in (0, len(known)) for side in kept)
        if not alike or any(len({P.shape[1:] for P in side}) > 1 for side in kept):
            return [], [None, None]
        return known, [torch.cat(side) if side else None for side in kept]

    def _map(self, name: str) -> Tensor | None:
        P = self._stack.map(name)
        return None if P is None else self._part(P)

    def _spectrum(self, maps: Sequence[Tensor | None], side: int) -> MapSpectrum | None:
        P, power = maps[side], powers_of(self._recipe, self._group)[side]
        return None if P is None else map_spectrum(P, power or 0.0)

    def _part(self, X: Tensor) -> Tensor:
        return X if len(self._layers) == len(self._stack.layers) else _rows(X, self._slices)

    def _everywhere(self, part: Tensor) -> Tensor:
        if len(part) == self._count:
            return part
        whole = torch.full((self._count,), torch.nan, dtype=part.dtype, device=part.device)
        return _placed(whole, part, self._slices)


def _rows(X: Tensor, parts: Sequence[slice]) -> Tensor:
    return torch.cat([X[part] for part in parts])


def _placed(whole: Tensor, values: Tensor, parts: Sequence[slice]) -> Tensor:
    """A copy of `whole` with the values, one after the other, in these places."""
    whole, begin = whole.clone(), 0
    for part in parts:
        length = part.stop - part.start
        whole[part] = values[begin : begin + length]
        begin += length
    return whole

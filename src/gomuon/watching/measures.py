"""The numbers of a stack at one step: lengths of all layers, spectra of those that have a turn."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gomuon.errors import DecompositionError
from gomuon.functional import linalg
from gomuon.functional.certificates import (
    Maps,
    MapSpectrum,
    cached_efficiency,
    distortion,
    effective_rank,
    map_spectrum,
    oracle_share,
)
from gomuon.functional.linalg import full_float32
from gomuon.functional.spectra import nuclear_norm_and_rank
from gomuon.geometry.moments_to_maps import alpha_of_sides
from gomuon.parameters.stacks import Stack
from gomuon.recipes.recipe import Recipe
from gomuon.recipes.stations import matched_polar, plain_polar
from gomuon.threads.spreading import concurrently, cores_for_workers
from gomuon.watching.negatives import inner
from gomuon.watching.refreshes import Refresh

Group = Mapping[str, Any]
Numbers = dict[str, Tensor]


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


class Spectra:
    """Numbers that need spectra, of some layers of a stack in one step: one for each matrix.

    What cannot be decomposed, because it is not finite, is missing. Nothing here raises.

    Args:
        recipe: the method's recipe.
        stack: the stack, which has just moved.
        chosen: the positions of the layers.
        refreshes: for each of them what was kept before a refresh in this step, if there was one.
        group: the settings of their group.
    """

    def __init__(
        self,
        recipe: Recipe,
        stack: Stack,
        chosen: Sequence[int],
        refreshes: Sequence[Refresh | None],
        group: Group,
    ) -> None:
        self._recipe, self._stack, self._group = recipe, stack, group
        self._refreshes = refreshes
        self._sizes = [stack.layers[i].blocks for i in chosen]
        begins = [0, *accumulate(layer.blocks for layer in stack.layers)]
        self._places = [slice(begins[i], begins[i + 1]) for i in chosen]
        self._is_all = len(chosen) == len(stack.layers)

    def measured(self, source: Tensor, D: Tensor) -> list[Numbers]:
        """The numbers of each layer's matrices, given source M̂ and direction D, [b, m, n]."""
        try:
            with full_float32():
                found = self._measured(self._part(source), self._part(D))
        except (DecompositionError, torch.linalg.LinAlgError):
            found = {}
        split = {name: values.split(self._sizes) for name, values in found.items()}
        return [{name: parts[i] for name, parts in split.items()} for i in range(len(self._sizes))]

    def _measured(self, M: Tensor, D: Tensor) -> Numbers:
        maps = self._map("left_map"), self._map("right_map")
        powers = powers_of(self._recipe, self._group)
        # What is only products is left to the device, and to torch's own threads.
        decomposes = linalg.decomposes_well(M.device)
        cores = cores_for_workers(M.numel()) if decomposes else nullcontext()
        with cores, cores:
            spectra = tuple(
                concurrently([partial(_spectrum, *one) for one in zip(maps, powers, strict=True)])
            )
            found = _of_maps(spectra)
            is_matched = self._recipe.direction is matched_polar
            ball = maps if is_matched else (None, None)
            inverses = _inverses(spectra) if is_matched else (None, None)
            calls: list[Callable[[], Numbers]] = [partial(self._drift, M, spectra)]
            if is_matched or self._recipe.direction is plain_polar:
                calls.append(partial(_oracle, M, D, ball, inverses))
            if has_polar_length(self._recipe, self._group):
                calls.append(partial(_bound, M, spectra if is_matched else ()))
            if has_weights(self._stack):
                W = self._part(self._stack.W)
                calls.append(lambda: {"weight_rank": effective_rank(W)})
            for numbers in concurrently(calls):
                found |= numbers
        if is_matched and "drift" in found:
            found |= self._efficiency(M, spectra, found["oracle_value"])
        return found

    def _drift(self, M: Tensor, spectra: Sequence[MapSpectrum | None]) -> Numbers:
        """Θ of layers that had maps before; NaN for the others."""
        known, cached = self._cached(spectra)
        if not known:
            return {}
        theta = torch.ones(sum(self._sizes[i] for i in known), dtype=M.dtype, device=M.device)
        for old, inverse, d in zip(cached, _inverses(spectra), M.shape[-2:], strict=True):
            if old is not None and inverse is not None:
                theta = theta * distortion(self._of(inverse, known), old, d)  # (7)
        return {"drift": self._everywhere(theta, known)}

    def _efficiency(
        self, M: Tensor, spectra: Sequence[MapSpectrum | None], value: Tensor
    ) -> Numbers:
        known, cached = self._cached(spectra)
        left, right = (None if P is None else self._of(P, known) for P in _inverses(spectra))
        reached = cached_efficiency(
            self._of(M, known), cached, (left, right), self._of(value, known), self._group["polar"]
        )
        return {"efficiency": self._everywhere(reached, known)}

    def _cached(self, spectra: Sequence[MapSpectrum | None]) -> tuple[list[int], Maps]:
        """The positions of layers that had maps before their refresh, and these maps, [b, …].

        None if a side was switched on or off since, or was cut in another way.
        """
        known, kept = [], []
        for index, refresh in enumerate(self._refreshes):
            if refresh is not None and all(map(_alike, refresh.cached, spectra)):
                known.append(index)
                kept.append(refresh.cached)
        sides = zip(*kept, strict=True) if any(P is not None for one in kept for P in one) else ()
        left, right = [_joined(side) for side in sides] or (None, None)
        return known if left is not None or right is not None else [], (left, right)

    def _map(self, name: str) -> Tensor | None:
        P = self._stack.map(name)
        return None if P is None else self._part(P)

    def _part(self, X: Tensor) -> Tensor:
        return X if self._is_all else torch.cat([X[place] for place in self._places])

    def _of(self, X: Tensor, known: Sequence[int]) -> Tensor:
        """The matrices of some of the layers."""
        parts = X.split(self._sizes)
        return X if len(known) == len(parts) else torch.cat([parts[i] for i in known])

    def _everywhere(self, X: Tensor, known: Sequence[int]) -> Tensor:
        """Numbers of the matrices of some of the layers, with NaN for the others."""
        if len(known) == len(self._sizes):
            return X
        parts = [X.new_full((size,), torch.nan) for size in self._sizes]
        for index, part in zip(known, X.split([self._sizes[i] for i in known]), strict=True):
            parts[index] = part
        return torch.cat(parts)


def _spectrum(P: Tensor | None, power: float | None) -> MapSpectrum | None:
    return None if P is None else map_spectrum(P, power or 0.0)


def _inverses(spectra: Sequence[MapSpectrum | None]) -> Maps:
    left, right = (None if S is None else S.inverse for S in spectra)
    return left, right


def _of_maps(spectra: Sequence[MapSpectrum | None]) -> Numbers:
    found = {}
    for side, S in zip(("output", "input"), spectra, strict=True):
        if S is not None:
            found[f"{side}_map_condition"] = S.condition
            found[f"{side}_raised"] = S.raised.to(S.condition.dtype)
    return found


def _oracle(M: Tensor, D: Tensor, maps: Maps, inverses: Maps) -> Numbers:
    share = oracle_share(M, D, maps, inverses)
    return {
        "oracle_value": share.value,
        "optimum": share.value * share.radius,
        "reached": inner(M, D),
        "radius": share.radius,
        "source_rank": share.rank,
        "source_spread": share.spread,
    }


def _bound(M: Tensor, spectra: Sequence[MapSpectrum | None]) -> Numbers:
    """K_AB^(−α)‖M̂‖_*, Equation (16)."""
    bound, _ = nuclear_norm_and_rank(M)
    for S in spectra:
        bound = bound if S is None else bound / S.condition
    return {"alignment_bound": bound}


def _alike(old: Tensor | None, now: MapSpectrum | None) -> bool:
    if old is None or now is None:
        return old is None and now is None
    return old.shape[1:] == now.inverse.shape[1:]


def _joined(maps: Sequence[Tensor | None]) -> Tensor | None:
    return torch.cat([P for P in maps if P is not None]) if maps[0] is not None else None

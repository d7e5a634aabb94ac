"""What is recorded of a layer, and what becomes of the numbers that were read from the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from gomuon.errors import describe_value


@dataclass(frozen=True)
class WatchRecord:
    """What one layer did in the step `step`, and in the steps since its last record.

    A layer that is cut into several matrices (experts, heads, blocks) has one record: sums over its
    matrices, the worst condition number, radius, Θ and efficiency, and the mean OAS intensity.
    A number that the method does not have, or that this record does not measure, is None. So is one
    that is not finite. docs/watch.md says what each number means and how to read it.

    "Input" is the side of A and P_A, "output" that of B̄ and P_B. D is the direction, U what the
    weights move by at rate 1. The maps are those of this step.

    Attributes:
        step: how many steps the layer's group has taken, this one included.
        layer: the parameter's name.
        rank: the process that computes the layer; 0 where there is only one.
        method: the optimizer's class.
        matrices, rows, columns: the layer's shape.
        covered: the number of updates that the negatives are counted over.
        lr: η.

        source_alignment: ⟨M̂, D⟩; for a matched direction it is positive, Equations (5) and (6).
        gradient_alignment: ⟨G, D⟩.
        source_cosine: the cosine between M̂ and U.
        gradient_cosine: the cosine between G and U.
        source_negatives: in how many of the updates ⟨M̂, U⟩ < 0, counted for each matrix.
        gradient_negatives: in how many ⟨G, U⟩ < 0.
        update_norm: ‖U‖_F.
        weight_norm: ‖W‖_F after the step.
        update_ratio: η‖U‖_F/‖W‖_F.
        polar_rank: ‖D‖_F², where that is the rank of the polar factor: how many directions move.

        age: steps since the maps were renewed; 0: in this step.
        measured: the step in which the numbers below were measured: that of the layer's first
            refresh since its last record, otherwise this one. None: not its turn (`spectra`).
        oracle_value: ‖C‖_* = max ⟨M̂, D⟩ over the unit ball, Equation (3).
        duality_gap: 1 − ⟨M̂, D⟩/(q_P(D)‖C‖_*), which Theorem 1 makes zero; what is left is the
            error of the polar factor.
        radius: q_P(D), the weighted radius after the graft, Equation (2).
        source_rank: the numerical rank of C; what `polar_rank` has beyond it was completed, what it
            lacks was left alone.
        source_spread: the effective rank of C, ‖C‖_*²/‖C‖_F²: small if few directions have most of
            its length.
        full_rank: the largest possible rank.
        alignment_bound: K_AB^(−α)‖M̂‖_*, the bound on ⟨M̂, D⟩ of Proposition 5, Equation (16).
        tightness: the bound over the ⟨M̂, D⟩ of the same step, in (0, 1].
        weight_rank: the effective rank ‖W‖_*²/‖W‖_F².
        input_map_condition: κ₂(P_A).
        output_map_condition: κ₂(P_B).
        input_condition: κ₂(A), floor included.
        output_condition: κ₂(B̄), floor included.
        input_raised: how many eigenvalues of A the floor raised.
        output_raised: how many of B̄.
        drift: Θ between the maps before and after the refresh, Equation (7).
        efficiency: what the old maps' direction would have reached in the new ball, the left side
            of Equation (36).
        efficiency_bound: 1/Θ, the right side of Equation (36).
        input_intensity: OAS's λ of A, Equation (17).
        output_intensity: OAS's λ of B.
        input_rows: rows that A was made of.
        output_rows: rows that B was made of.
        input_side: the largest side of A's blocks, to compare the rows with.
        output_side: the largest side of B's blocks.
        output_share: the share of B̄'s trace that came from this one batch.

        failures: results that were not finite and left out, so far.
        fallbacks: roots by products that had to be decomposed, so far.
        skipped: steps that were skipped or taken without gradients, so far.
    """

    step: int
    layer: str
    rank: int
    method: str
    matrices: int
    rows: int
    columns: int
    covered: int
    lr: float | None

    source_alignment: float | None = None
    gradient_alignment: float | None = None
    source_cosine: float | None = None
    gradient_cosine: float | None = None
    source_negatives: int = 0
    gradient_negatives: int = 0
    update_norm: float | None = None
    weight_norm: float | None = None
    update_ratio: float | None = None
    polar_rank: float | None = None

    age: int | None = None
    measured: int | None = None
    oracle_value: float | None = None
    duality_gap: float | None = None
    radius: float | None = None
    source_rank: float | None = None
    source_spread: float | None = None
    full_rank: int | None = None
    alignment_bound: float | None = None
    tightness: float | None = None
    weight_rank: float | None = None
    input_map_condition: float | None = None
    output_map_condition: float | None = None
    input_condition: float | None = None
    output_condition: float | None = None
    input_raised: float | None = None
    output_raised: float | None = None

    drift: float | None = None
    efficiency: float | None = None
    efficiency_bound: float | None = None
    input_intensity: float | None = None
    output_intensity: float | None = None
    input_rows: float | None = None
    output_rows: float | None = None
    input_side: int | None = None
    output_side: int | None = None
    output_share: float | None = None

    failures: int = 0
    fallbacks: int = 0
    skipped: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> WatchRecord:
        """The record that `as_dict` described; unknown names are left out.

        Raises:
            ValueError: a name without a default is missing, or a value is of another kind.
        """
        known = {field.name: str(field.type) for field in fields(cls)}
        given = {name: value for name, value in entries.items() if name in known}
        for name, value in given.items():
            if not _fits(value, known[name]):
                raise ValueError(
                    f"this is no record of a watched layer: {name} must be {known[name]}, got "
                    f"{describe_value(value)}"
                )
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"this is no record of a watched layer: {error}") from error

    def numbers(self) -> dict[str, float]:
        """What a plot can show: every number that was measured, without the layer's shape."""
        return {
            name: value
            for name, value in self.as_dict().items()
            if name not in NOT_PLOTTED and isinstance(value, int | float)
        }


NOT_PLOTTED = frozenset(
    ("step", "layer", "rank", "method", "matrices", "rows", "columns", "covered", "measured")
)


_LARGEST = 10**30  # of whole numbers


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is of the kind that a field's annotation names."""
    if value is None:
        return kind.endswith("None")
    if isinstance(value, bool):
        return False
    if kind.startswith("float"):
        small = isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST)
        return small and math.isfinite(value)
    if kind.startswith("int"):
        return isinstance(value, int) and abs(value) < _LARGEST
    return isinstance(value, str)


def weight_length(record: WatchRecord) -> float | None:
    """‖W‖/√rank, the root mean square of the singular values at full rank."""
    return ratio(record.weight_norm, math.sqrt(record.full_rank or 0))


def finite(value: float | None) -> float | None:
    """The number, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Their quotient; None if one is missing, or the denominator is zero."""
    if numerator is None or not denominator:
        return None
    return finite(numerator / denominator)


def root(square: float | None) -> float | None:
    """√square; None if it is missing or negative."""
    return None if square is None or square < 0 else math.sqrt(square)

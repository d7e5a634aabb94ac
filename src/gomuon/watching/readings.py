"""Numbers of a stack's layers as one small tensor on the device, and as records once it is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gomuon.parameters.layers import Layer
from gomuon.watching.negatives import dtype_to_read
from gomuon.watching.records import WatchRecord, finite, ratio, root

Reduce = Callable[[Tensor], Tensor]

# How the numbers of a layer's matrices become one number. NaN stays NaN: it was not measured.
_OF_MATRICES: dict[str, Reduce] = {
    "source_alignment": torch.sum,
    "gradient_alignment": torch.sum,
    "source_update": torch.sum,  # ⟨M̂, U⟩
    "gradient_update": torch.sum,
    "source_square": torch.sum,  # ‖M̂‖_F²
    "gradient_square": torch.sum,
    "direction_square": torch.sum,
    "update_square": torch.sum,
    "weight_square": torch.sum,
    "step_square": torch.sum,  # ‖ηU‖_F²
    "oracle_value": torch.sum,
    "optimum": torch.sum,  # q_P(D)‖C‖_*
    "reached": torch.sum,  # ⟨M̂, D⟩ in the same step
    "radius": torch.amax,
    "source_rank": torch.sum,
    "source_spread": torch.sum,
    "alignment_bound": torch.sum,
    "weight_rank": torch.sum,
    "input_map_condition": torch.amax,
    "output_map_condition": torch.amax,
    "input_raised": torch.sum,
    "output_raised": torch.sum,
    "drift": torch.amax,
    "efficiency": torch.amin,
    "input_intensity": torch.mean,
    "output_intensity": torch.mean,
    "input_rows": torch.amin,
    "output_rows": torch.amin,
    "output_share": torch.amax,
}
NAMES = tuple(_OF_MATRICES)


def rows_of(numbers: Mapping[str, Tensor], sizes: Sequence[int]) -> Tensor:
    """[layers, len(NAMES)] from numbers of matrices, [b] each; NaN for those that are missing.

    Args:
        numbers: by name, one for each matrix of a stack.
        sizes: how many matrices each layer has.
    """
    some = next(iter(numbers.values()))
    dtype = dtype_to_read(some.device)
    missing = torch.full((len(sizes),), torch.nan, dtype=dtype, device=some.device)
    columns = []
    for name, reduce in _OF_MATRICES.items():
        given = numbers.get(name)
        if given is None:
            columns.append(missing)
        elif len(given) == len(sizes):
            columns.append(given.to(dtype))
        else:
            parts = given.to(dtype).split(list(sizes))
            columns.append(torch.stack([reduce(part) for part in parts]))
    return torch.stack(columns, 1)


def read(tensors: Sequence[Tensor]) -> list[list[list[float]]]:
    """The numbers of tensors [layers, columns]; one read for each device."""
    found: dict[int, list[list[float]]] = {}
    for device in {tensor.device for tensor in tensors}:
        there = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.device == device]
        flat: list[float] = torch.cat([tensor.flatten() for _, tensor in there]).tolist()
        for index, tensor in there:
            own, flat = flat[: tensor.numel()], flat[tensor.numel() :]
            width = tensor.shape[1]
            found[index] = [own[i : i + width] for i in range(0, len(own), width)]
    return [found[index] for index in range(len(tensors))]


@dataclass
class Reading:
    """The numbers of a stack at one step, before they are read.

    Attributes:
        layers: the stack's layers.
        rows: [layers, len(NAMES)] on the device.
        group: the settings of their group, and its step.
        powers: α of the output and of the input side; None if there is none.
        polar: whether ‖D‖_F² is the rank of a polar factor.
        measured: for each layer the step in which its spectra were measured, if they were.
        ages: for each layer the age of its maps, if it has maps.
    """

    layers: Sequence[Layer]
    rows: Tensor
    group: Mapping[str, Any]
    powers: tuple[float | None, float | None]
    polar: bool
    step: int = field(init=False)
    measured: Sequence[int | None] = ()
    ages: Sequence[int | None] = ()

    def __post_init__(self) -> None:
        self.step = self.group["step"] + 1

    def records(
        self,
        numbers: Sequence[Sequence[float]],
        negatives: Mapping[str, tuple[int, ...]],
        method: str,
        rank: int,
    ) -> list[WatchRecord]:
        """The records of the layers.

        Args:
            numbers: `rows`, as they were read.
            negatives: by layer, the updates covered and the two counts of negatives.
            method: the optimizer's class.
            rank: this process.
        """
        return [
            self._record(index, dict(zip(NAMES, row, strict=True)), negatives, method, rank)
            for index, row in enumerate(numbers)
        ]

    def _record(
        self,
        index: int,
        row: Mapping[str, float],
        negatives: Mapping[str, tuple[int, ...]],
        method: str,
        rank: int,
    ) -> WatchRecord:
        layer, found = self.layers[index], {name: finite(value) for name, value in row.items()}
        m, n = layer.shape
        covered, of_source, of_gradient = negatives.get(layer.name, (0, 0, 0))
        lengths = {name: root(found[f"{name}_square"]) for name in _SQUARES}
        update = lengths["update"]
        share = ratio(found["reached"], found["optimum"])
        drift = found["drift"]
        left, right = layer.forms
        return WatchRecord(
            step=self.step,
            layer=layer.name,
            rank=rank,
            method=method,
            matrices=layer.blocks,
            rows=m,
            columns=n,
            covered=covered,
            lr=ratio(lengths["step"], update),
            source_negatives=of_source,
            gradient_negatives=of_gradient,
            source_cosine=_cosine(found["source_update"], lengths["source"], update),
            gradient_cosine=_cosine(found["gradient_update"], lengths["gradient"], update),
            update_norm=update,
            weight_norm=lengths["weight"],
            update_ratio=ratio(lengths["step"], lengths["weight"]),
            polar_rank=found["direction_square"] if self.polar else None,
            duality_gap=None if share is None else 1 - share,
            full_rank=layer.blocks * min(m, n),
            tightness=ratio(found["alignment_bound"], found["reached"]),
            output_condition=_power(found["output_map_condition"], self.powers[0]),
            input_condition=_power(found["input_map_condition"], self.powers[1]),
            age=self.ages[index] if self.ages else None,
            measured=self.measured[index] if self.measured else None,
            efficiency_bound=None if drift is None else 1 / drift,
            output_side=None if found["output_rows"] is None else left.size,
            input_side=None if found["input_rows"] is None else right.size,
            failures=layer.state.get("failures", 0),
            fallbacks=layer.state.get("root_fallbacks", 0),
            skipped=self.group.get("skipped", 0),
            **{name: found[name] for name in _AS_READ},
        )


_SQUARES = ("source", "gradient", "update", "weight", "step")
_AS_READ = (
    *(
        "source_alignment",
        "gradient_alignment",
        "oracle_value",
        "radius",
        "source_rank",
        "source_spread",
    ),
    *("alignment_bound", "weight_rank", "input_map_condition", "output_map_condition"),
    *("input_raised", "output_raised", "drift", "efficiency", "input_intensity"),
    *("output_intensity", "input_rows", "output_rows", "output_share"),
)


def _cosine(inner: float | None, one: float | None, other: float | None) -> float | None:
    if inner is None or one is None or other is None or not one * other:
        return None
    return max(-1.0, min(1.0, inner / (one * other)))


def _power(condition: float | None, power: float | None) -> float | None:
    """κ₂ of the factor, whose root with this power is the map."""
    if condition is None or not power:
        return None
    try:
        return finite(condition ** (1 / power))
    except OverflowError:
        return None

"""How far factors of observed labels are from the Fisher factor, as a classifier learns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gomuon.lab import formatting as w
from tools.evidence.markdown_tables import NOT_RUN, table
from tools.evidence.softmax_courses import KINDS, MeanCourse, averaged
from tools.softmax_story import LAYERS, OBSERVED, PARTS, SAMPLED, Course

TITLE = "### How far are factors of observed labels from the Fisher factor?"
ABOUT = (
    "The paper bounds what observed labels make of the output factor, ‖B_q − B_F‖ ≤ 3‖J‖²‖q − p‖ "
    "(Equation 11), and divides the error of the factor in use into four parts (Equation 20). Both "
    "can be computed where the distribution q of labels is known: here for a classifier of two "
    "layers on a finite population, trained with Go-MUON (`python -m tools.softmax_story`). "
    "Factors are made of the observed labels, or of labels drawn from the model "
    "(`optimizer.sample_labels`), which have no mismatch; the loss is that of observed labels."
)
WORDS = {"hidden": "hidden layer", "logits": "logits"}
SHOWN = (0, 5, -1)  # refreshes in the table
ROUNDING = 1e-3  # numbers in the file have five digits


def section(courses: Sequence[Course], picture: Sequence[str] = ()) -> list[str]:
    if not courses:
        return [TITLE, ABOUT, f"{NOT_RUN.capitalize()}."]
    means = {kind: averaged(courses, kind) for kind in KINDS}
    seeds = len({one.seed for one in courses})
    return [
        TITLE,
        ABOUT,
        *picture,
        f"Means over {w.many(seeds, 'seed')}; norms are the largest singular value.",
        _table(means),
        " ".join([_mismatch(means), _bounds(courses), _sampled(means)]),
    ]


def _table(means: dict[tuple[str, str], MeanCourse]) -> str:
    rows = [
        [
            layer,
            labels,
            f"{mean.steps[place]}",
            *(_number(part[place]) for part in mean.parts),
            _number(mean.error[place]),
        ]
        for (labels, layer), mean in means.items()
        for place in SHOWN
    ]
    heads = ("layer", "labels", "update", *PARTS, "error itself")
    return table(heads, rows, left=2)


def _number(value: float) -> str:
    return "0" if value < 1e-12 else f"{value:.2g}"


def _mismatch(means: dict[tuple[str, str], MeanCourse]) -> str:
    parts = []
    for layer in LAYERS:
        mean = means[OBSERVED, layer]
        first, last = mean.mismatch[0], mean.mismatch[-1]
        ratios = [b / m for b, m in zip(mean.bound, mean.mismatch, strict=True)]
        parts.append(
            f"of the {WORDS[layer]} from {_number(first)} to {_number(last)}, where the bound is "
            f"{min(ratios):.0f} to {max(ratios):,.0f} times as large"
        )
    apart = means[OBSERVED, LAYERS[0]].apart
    span = f"from {_number(apart[0])} to {_number(apart[-1])}"
    return f"While ‖q − p‖ falls {span}, the mismatch falls: {'; '.join(parts)}."


def _bounds(courses: Sequence[Course]) -> str:
    """Whether both bounds held, refresh by refresh."""
    refreshes = sum(len(one.steps) for one in courses)
    within = sum(
        small <= large * (1 + ROUNDING)
        for one in courses
        for small, large in zip(one.mismatch, one.bound, strict=True)
    )
    divided = sum(
        error <= math.fsum(parts) * (1 + ROUNDING)
        for one in courses
        for error, parts in zip(one.error, one.parts, strict=True)
    )
    return (
        f"The mismatch is within its bound in {within:,} of {refreshes:,} refreshes of a layer, "
        f"and the error within the sum of its parts in {divided:,}."
    )


def _sampled(means: dict[tuple[str, str], MeanCourse]) -> str:
    ratios = {
        place: [
            means[SAMPLED, layer].error[place] / means[OBSERVED, layer].error[place]
            for layer in LAYERS
        ]
        for place in (0, -1)
    }
    first, last = (" and ".join(f"{r:.2f}" for r in ratios[place]) for place in (0, -1))
    update = means[OBSERVED, LAYERS[0]].steps[-1]
    return (
        f"With labels drawn from the model the error of the first factor is {first} of that with "
        f"observed labels ({' and '.join(LAYERS)}), and at update {update} {last}."
    )

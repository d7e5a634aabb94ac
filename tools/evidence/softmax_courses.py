"""What results/softmax holds, read back and averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gomuon.lab.errors import LabError
from gomuon.lab.files import read_json
from tools.softmax_story import FILE, FORMAT, LAYERS, OBSERVED, PARTS, SAMPLED, Course

Kind = tuple[str, str]  # labels and layer
KINDS: tuple[Kind, ...] = tuple(
    (labels, layer) for layer in LAYERS for labels in (OBSERVED, SAMPLED)
)


@dataclass(frozen=True)
class MeanCourse:
    """The courses of one kind, averaged over seeds; a number for each refresh.

    Attributes:
        parts: the four parts, each with a number for each refresh.
    """

    steps: list[int]
    apart: list[float]
    mismatch: list[float]
    bound: list[float]
    parts: list[list[float]]
    error: list[float]


def read_courses(results: Path) -> list[Course]:
    """The courses that were measured; none if there is no file.

    Raises:
        LabError: the file is not what `python -m tools.softmax_story` writes.
    """
    path = results / FILE
    if not path.is_file():
        return []
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise LabError(
            f"{path}: format {content.get('format')!r}; run python -m tools.softmax_story"
        )
    try:
        courses = [Course(**course) for course in content["courses"]]
        lengths = {
            len(getattr(one, part.name))
            for one in courses
            for part in fields(one)
            if part.name not in ("labels", "layer", "seed")
        }
        if {(one.labels, one.layer) for one in courses} != set(KINDS) or len(lengths) != 1:
            raise ValueError("courses are missing or of different lengths")
    except (KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path}: {error}; run python -m tools.softmax_story again") from error
    return courses


def averaged(courses: Sequence[Course], kind: Kind) -> MeanCourse:
    """The mean over the seeds of a kind."""
    same = [one for one in courses if (one.labels, one.layer) == kind]
    steps = same[0].steps

    def mean(values: Sequence[Sequence[float]]) -> list[float]:
        return [math.fsum(column) / len(column) for column in zip(*values, strict=True)]

    parts = [mean([[row[i] for row in one.parts] for one in same]) for i in range(len(PARTS))]
    return MeanCourse(
        steps,
        mean([one.apart for one in same]),
        mean([one.mismatch for one in same]),
        mean([one.bound for one in same]),
        parts,
        mean([one.error for one in same]),
    )

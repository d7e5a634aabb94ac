"""Lazy refresh beside the paper: how long steps take, and whether any opposes its source."""

from __future__ import annotations

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.beside import figures_of
from gomuon.lab.evidence.reading import Study
from gomuon.lab.evidence.tables import table, text
from gomuon.lab.evidence.timings import Timing
from gomuon.lab.experiments.catalogue import EXPERIMENTS


def times(study: Study | None) -> str:
    """The ratio of whole-step times beside the paper's."""
    paper = figures_of("lazy").gains["step-time ratio"]
    timing = None if study is None else Timing.of(study)
    row = [n.NOT_RUN, *[w.ABSENT] * 3]
    if timing is not None:
        found = timing.ratio("refresh-1", "lazy-4")
        if found is not None:
            row = [
                w.ratio(found.mean),
                n.plain_interval(found.low, found.high, 3),
                w.ABSENT if found.spread is None else f"×/÷ {found.spread:.3f}",
                f"{found.cycles}",
            ]
    columns = ("whole step, K=4 over K=1", "paper", "here", "95 % interval", "spread", "cycles")
    return table(columns, [["geometric mean", w.ratio(paper), *row]])


def alignment(study: Study | None) -> str:
    """Steps that opposed their source or their gradient, which the runs counted."""
    rows = []
    for arm in EXPERIMENTS["lazy"].arms:
        counts = [] if study is None else alignment_counts(study, arm.name)
        cells = [
            ", ".join(str(pair[side]) for pair in counts) if counts else n.NOT_RUN
            for side in (0, 1)
        ]
        rows.append([text(arm.title), "0", cells[0], "0", cells[1]])
    columns = ("arm", "source, paper", "source, here", "gradient, paper", "gradient, here")
    return table(columns, rows)


def alignment_counts(study: Study, arm: str) -> list[tuple[int, int]]:
    """Per seed, negative source and negative gradient alignments; only where they were counted."""
    if not study.has(arm):
        return []
    results = [run.result or {} for run in study.arm(arm).finished.values()]
    return [
        (int(result["negative_source"]), int(result["negative_gradient"]))
        for result in results
        if "negative_source" in result and "negative_gradient" in result
    ]

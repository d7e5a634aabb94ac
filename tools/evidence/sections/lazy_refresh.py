"""Lazy refresh: how long steps take, and whether any opposes its source, beside the paper."""

from __future__ import annotations

from gomuon.lab import formatting as w
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from tools.evidence.markdown_tables import NOT_RUN, plain_interval, table, text
from tools.evidence.paper_lookup import figures_of
from tools.evidence.step_times import StepTimes
from tools.evidence.studies import Study


def section(study: Study | None) -> list[str]:
    return [
        "Whole steps, timed in turn in one process.",
        _times(study),
        "Steps against the momentum source and against the current gradient, per seed.",
        _alignment(study),
    ]


def _times(study: Study | None) -> str:
    """The ratio of whole-step times beside the paper's."""
    paper = figures_of("lazy").gains["step-time ratio"]
    timing = None if study is None else StepTimes.of(study)
    row = [NOT_RUN, *[w.ABSENT] * 3]
    if timing is not None:
        found = timing.ratio("refresh-1", "lazy-4")
        if found is not None:
            row = [
                w.ratio(found.mean),
                plain_interval(found.low, found.high, 3),
                w.ABSENT if found.spread is None else f"×/÷ {found.spread:.3f}",
                f"{found.cycles}",
            ]
    columns = ("whole step, K=4 over K=1", "paper", "here", "95 % interval", "spread", "cycles")
    return table(columns, [["geometric mean", w.ratio(paper), *row]])


def _alignment(study: Study | None) -> str:
    """How many steps opposed their source or their gradient, as the runs counted them."""
    rows = []
    for arm in EXPERIMENTS["lazy"].arms:
        counts = [] if study is None else study.opposing_steps(arm.name)
        cells = [
            ", ".join(str(pair[side]) for pair in counts) if counts else NOT_RUN for side in (0, 1)
        ]
        rows.append([text(arm.title), "0", cells[0], "0", cells[1]])
    columns = ("arm", "source, paper", "source, here", "gradient, paper", "gradient, here")
    return table(columns, rows)

"""Which convolutions a matrix optimizer should update."""

from __future__ import annotations

import math

from gomuon.lab import formatting as w
from gomuon.lab.experiments.routing_plans import QUESTIONS, ROUTING
from tools.evidence.estimates import all_finite, excludes_zero, relative_pairs
from tools.evidence.markdown_tables import (
    NOT_RUN,
    code,
    lower_or_higher,
    percent_interval,
    table,
    text,
)
from tools.evidence.studies import HELD_OUT, Evidence, Study

TREATMENTS = ("matrix", "adamw")


def section(evidence: Evidence) -> list[str]:
    return [
        "### Depthwise convolutions and patch embeddings: matrices or AdamW?",
        "A depthwise convolution has one row of k² weights for each channel, and a patch embedding "
        "reads pixels. Small models classify digits; the loss is that of held-out pictures. The "
        "rule, declared before the runs: each treatment at the rate that is better for it on "
        "average; they stay matrices unless AdamW is lower with an interval that excludes zero.",
        *(
            block
            for plan, (what, _) in zip(ROUTING, QUESTIONS.values(), strict=True)
            for block in _question(evidence.get(plan.experiment), plan.experiment, what)
        ),
    ]


def _question(study: Study | None, name: str, what: str) -> list[str]:
    if study is None or study.shortcoming is not None:
        return [f"{code(name)}: {NOT_RUN if study is None else study.shortcoming}."]
    rows = []
    for arm in study.campaign.arms:
        losses = study.losses(arm.name, HELD_OUT, study.campaign.seeds)
        mean = w.loss(math.fsum(losses) / len(losses)) if all_finite(losses) else "diverged"
        rows.append([text(arm.title), mean])
    return [table((f"{what} ({code(name)})", "held-out loss"), rows), _verdict(study, what)]


def best_arm(study: Study, treatment: str) -> str | None:
    """The treatment's arm with the lowest mean; None if all diverged."""
    means = {}
    for arm in study.campaign.arms:
        losses = study.losses(arm.name, HELD_OUT, study.campaign.seeds)
        if arm.name.startswith(f"{treatment}-") and all_finite(losses):
            means[arm.name] = math.fsum(losses) / len(losses)
    return min(means, key=lambda name: means[name]) if means else None


def _verdict(study: Study, what: str) -> str:
    best = [best_arm(study, treatment) for treatment in TREATMENTS]
    if None in best:
        return "One treatment diverged at every rate."
    matrix, adamw = (study.losses(str(name), HELD_OUT, study.campaign.seeds) for name in best)
    pairs = relative_pairs(matrix, adamw)
    leaves = pairs.mean < 0 and excludes_zero(pairs)
    return (
        f"With AdamW for {what} the loss is {lower_or_higher(pairs.mean)} "
        f"({percent_interval(pairs.low, pairs.high)}), so they "
        f"{'go to AdamW' if leaves else 'stay matrices'}."
    )

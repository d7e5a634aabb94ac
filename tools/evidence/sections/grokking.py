"""Modular addition: when runs fit, when they grok and whether they stay, beside the paper."""

from __future__ import annotations

from collections.abc import Sequence

from gomuon.lab import formatting as w
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.results.runs import Run
from tools.evidence.markdown_tables import NOT_RUN, table, text
from tools.evidence.paper_lookup import figures_of
from tools.evidence.studies import Study, evaluations_below, final_accuracy

STEPS = {"train_99_step": "training 99 %", "grok_step": "held-out 99 %", "delay": "delay"}


def section(study: Study | None) -> list[str]:
    """Table 2 of the paper: when each run fitted its training pairs and when it grokked."""
    plan, paper = EXPERIMENTS["grokking"], figures_of("grokking")
    rows = []
    for arm in sorted(plan.arms, key=lambda arm: arm.group):
        runs = _runs(study, arm.name)
        row = [text(arm.group), text(arm.title)]
        for key in STEPS:
            row += [w.step(paper.grokking.get(arm.name, {}).get(key)), _step(runs, key, plan.steps)]
        rows.append([*row, _final_accuracies(runs)])
    heads = [f"{title}, {who}" for title in STEPS.values() for who in ("paper", "here")]
    heads.append("held-out pairs right at the end, here")
    failures = _retention(study)
    event = f"In the paper: {text(paper.notes[0][0].lower() + paper.notes[0][1:])}"
    return [
        "Updates until 99 % of the training pairs are right, until the first of five consecutive "
        "evaluations with 99 % of the held-out pairs right, and from one to the other. One seed "
        "per modulus, as in the paper, so there is no interval.",
        table(("modulus", "arm", *heads), rows, left=2),
        "How many times as many updates Muon takes to grok, at the rates the paper selected. This "
        "is onset; whether a run stays there is told below.",
        table(("modulus", "paper", "here"), _speedups(study)),
        event if failures is None else f"{failures} {event}",
    ]


def _speedups(study: Study | None) -> list[list[str]]:
    rows = []
    for control, candidate in EXPERIMENTS["grokking"].comparisons:
        group = next(arm.group for arm in EXPERIMENTS["grokking"].arms if arm.name == control)
        here = NOT_RUN
        if study is not None and study.has(control, candidate):
            seeds = study.seeds_of(control, candidate)
            here = ", ".join(_speedup(study, control, candidate, seed) for seed in seeds) or here
        published_ratio = figures_of("grokking").gains[f"{group} speedup"]
        rows.append([text(group), f"{published_ratio:.1f}×", here])
    return rows


def _speedup(study: Study, control: str, candidate: str, seed: int) -> str:
    muon, go = (study.grok_steps(arm)[seed] for arm in (control, candidate))
    if go is None:
        return "Go-MUON does not grok"
    if muon is None:
        return f"over {study.campaign.steps / go:.1f}×: Muon does not grok"
    return f"{muon / go:.1f}×"


def _runs(study: Study | None, arm: str) -> list[Run]:
    if study is None or not study.has(arm):
        return []
    return list(study.arm(arm).finished.values())


def _step(runs: Sequence[Run], key: str, steps: int) -> str:
    if not runs:
        return NOT_RUN
    values = [(run.result or {}).get(key) for run in runs]
    never = w.ABSENT if key == "delay" else f"not within {steps:,}"
    return ", ".join(never if value is None else f"{value:,}" for value in values)


def _final_accuracies(runs: Sequence[Run]) -> str:
    """Of the held-out pairs, at the last evaluation of each run."""
    return ", ".join(w.accuracy(final_accuracy(run), 2) for run in runs) or NOT_RUN


def _retention(study: Study | None) -> str | None:
    """Which runs fell below 99 % again after they had grokked."""
    if study is None:
        return None
    lines = []
    for arm in study.campaign.arms:
        for run in arm.finished.values():
            failures, later = evaluations_below(run)
            if failures:
                lines.append(
                    f"{text(arm.title)} at {text(arm.group)} ({len(failures):,} of {later:,} later "
                    f"evaluations, last at update {failures[-1]:,})"
                )
    if not lines:
        return "No run fell below 99 % again at an evaluation after it had grokked."
    return f"Below 99 % again after having grokked: {'; '.join(lines)}."

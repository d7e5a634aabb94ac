"""docs/reproduction.md: the claims first, then every experiment, then where it all comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from gomuon.lab import formatting as w
from gomuon.lab.evidence import (
    beside,
    contest,
    drawings,
    groks,
    quality,
    questions,
    readings,
    repeats,
    steps,
    traces,
)
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.claims import ABSTRACT, FURTHER, Claim
from gomuon.lab.evidence.judging import Verdict
from gomuon.lab.evidence.reading import Evidence
from gomuon.lab.evidence.slots import EARLIER, SLOTS
from gomuon.lab.evidence.tables import code, table, text
from gomuon.lab.experiments.catalogue import EXPERIMENTS

INTRODUCTION = """\
# The paper's figures, and ours

The paper is "Second-Order Muon Done Right" by Tong Che, which introduces Go-MUON. This page is
made by `make evidence` from the files under `results/`; a test holds it to them. Nothing here is
typed by hand but the paper's figures and the rules by which ours are judged.

Every experiment is a plan that was written down before it ran. Runs with one seed share initial
parameters, minibatches and schedule, proved by hash, so differences are paired by seed. Intervals
are Student's t at 95 % over seeds: with three or four seeds they are wide, and one seed has none.
A verdict says whether what the paper states came out again, by the rule beside it; it does not
say that three seeds are enough.

Words: a *campaign* is a plan and its runs, an *arm* one optimizer with its settings in it, a
*window* a hundred updates over which training loss is averaged. *K* is the number of updates from
one renewal of the geometry to the next. *Matched map-back* is the paper's update, which returns
from whitened coordinates by the same maps that led into them; *halfspace* is a safeguard that it
is compared with. The *momentum source* is what the update makes a direction of. To *grok* is to
reach 99 % of the held-out pairs at five evaluations in a row; the *screen* is the choice of rates
by who groks first."""
READING = """\
`reproduced`, `qualified` (in part, or under a condition) and `not reproduced` follow from the
numbers by the rules below;
`not run yet` means that runs it rests on are absent, and nothing is said of it. Theory
is held by tests that run with every change; `gomuon verify` checks it on your own machine."""
CAPTIONS = {
    "trajectories": (
        "Go-MUON's training loss in per cent of its control's, both smoothed over 50 updates. "
        "Thin: seeds; bold: their mean; diamonds: the paper's windows, which are shaded. Below "
        "zero Go-MUON is lower."
    ),
    "grokking": (
        "Accuracy on held-out pairs, stretched at the top (what is wrong, on a log scale). Bold: "
        "the rates the paper selected, with a dot where the run groks; dashed: the other rates of "
        "the screen; dotted upright: where the paper's runs grok."
    ),
    "comparison": (
        "Every method at its tuned rate on fresh seeds: rings are seeds, diamonds their means, "
        "best first. Go-MUON and its variants in a colour of their own."
    ),
}


def markdown(evidence: Evidence, drawn: Sequence[str], pictures: str = "pictures") -> str:
    """The whole page.

    Args:
        evidence: the campaigns that are there.
        drawn: the file names of the pictures that are there.
        pictures: the folder that holds them, as the page should link it.
    """
    shown = {name for name in drawings.NAMES if f"{name}.svg" in drawn}

    def picture(name: str) -> list[str]:
        return [_picture(name, pictures)] if name in shown else []

    parts = [INTRODUCTION, _state(evidence), "## Claims", READING, *_claims(evidence)]
    parts += ["## The paper's experiments", *picture("trajectories")]
    for name, plan in EXPERIMENTS.items():
        parts += [f"### {text(plan.title)}", traces.source(name, evidence)]
        if name == "ptb" and EARLIER in evidence:
            parts.append(repeats.POINTER)
        if name == "grokking":
            parts += [*picture("grokking"), *groks.tables(evidence.get(name))]
        else:
            parts += beside.language(name, evidence.get(name))
        if name == "lazy":
            study = evidence.get(name)
            parts += ["Whole steps, timed in turn in one process.", steps.times(study)]
            parts += [
                "Steps against the momentum source and against the current gradient, per seed.",
                steps.alignment(study),
            ]
    parts += ["## A fair comparison", *picture("comparison"), *contest.section(evidence)]
    parts += ["## Time to quality", *quality.section(evidence)]
    parts += ["## Open questions", *questions.section(evidence)]
    parts += ["## What is a reading", *readings.section()]
    parts += ["## Where every figure comes from", *traces.section(evidence)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _state(evidence: Evidence) -> str:
    """What was run and on what, in two sentences."""
    runs = [run for study in evidence.values() for run in study.runs]
    if not runs:
        return "Nothing has been run yet."
    machines = dict.fromkeys(
        f"{run.machine.get('processor', 'unknown')}, {run.machine.get('cores', '?')} cores"
        for run in runs
    )
    torches = dict.fromkeys(f"torch {run.versions.get('torch', 'unknown')}" for run in runs)
    absent = [name for name in SLOTS if name not in evidence]
    begun = [f"{code(name)} ({s.shortcoming})" for name, s in evidence.items() if s.shortcoming]
    parts = [
        f"Here are {w.many(len(runs), 'run')} of {len(evidence)} of {len(SLOTS)} campaigns, "
        f"on {text('; '.join(machines))}, with {text(', '.join(torches))}."
    ]
    if begun:
        parts.append(f"Not whole: {w.listing(begun)}.")
    if absent:
        parts.append(f"{n.NOT_RUN.capitalize()}: {w.listing([code(name) for name in absent])}.")
    return " ".join(parts)


def _claims(evidence: Evidence) -> list[str]:
    return [
        "The abstract's:",
        _claim_table(ABSTRACT, evidence),
        _tally(ABSTRACT, evidence),
        "Further ones of the text:",
        _claim_table(FURTHER, evidence),
        "Rules:",
        _rules(),
    ]


def _rules() -> str:
    """Every rule once, with the claims it is for."""
    places: dict[str, list[str]] = {}
    for place, claim in enumerate((*ABSTRACT, *FURTHER), start=1):
        places.setdefault(claim.rule, []).append(str(place))
    return "\n".join(f"- {w.listing(of)}: {rule}." for rule, of in places.items())


def _claim_table(claims: Sequence[Claim], evidence: Evidence) -> str:
    first = 1 if claims is ABSTRACT else len(ABSTRACT) + 1
    rows = []
    for place, claim in enumerate(claims, start=first):
        verdict, reason = claim.finding(evidence)
        rows.append([str(place), claim.words, f"**{verdict}**", reason])
    return table(("", "claim", "verdict", "why"), rows, left=4)


def _tally(claims: Sequence[Claim], evidence: Evidence) -> str:
    found = Counter(claim.finding(evidence)[0] for claim in claims)
    counts = [f"{found[verdict]} {verdict}" for verdict in get_args(Verdict) if found[verdict]]
    return f"Of {len(claims)} claims: {w.listing(counts)}."


def _picture(name: str, folder: str) -> str:
    caption = CAPTIONS[name]
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}/{name}-dark.svg">'
        f'<img width="480" alt="{caption}" src="{folder}/{name}.svg"></picture>\n\n*{caption}*'
    )

"""docs/reproduction.md: the claims first, then every experiment, then where it all comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from gomuon.lab import formatting as w
from gomuon.lab.experiments.catalogue import EXPERIMENTS
from tools.evidence.campaign_list import CAMPAIGNS
from tools.evidence.claims import ABSTRACT, FURTHER, Claim
from tools.evidence.markdown_tables import NOT_RUN, code, table, text
from tools.evidence.sections import (
    clocks,
    grokking,
    interpretations,
    language,
    lazy_refresh,
    method_comparison,
    open_questions,
    provenance,
    rates,
    routing,
    softmax,
    time_to_quality,
)
from tools.evidence.studies import Evidence
from tools.evidence.verdicts import Verdict
from tools.softmax_story import Course

INTRODUCTION = """\
# The paper's figures, and ours

The paper is "Second-Order Muon Done Right" by Tong Che, which introduces Go-MUON. This page is
made by `make evidence` from the files under `results/`; a test holds it to them. Nothing here is
typed by hand but the paper's figures and the rules by which ours are judged.

Every experiment is a plan that was written down before it ran. Runs with one seed share initial
parameters, minibatches and schedule, which hashes prove, so differences are paired by seed.
Intervals are Student's t at 95 % over seeds: with three or four seeds they are wide, and with one
seed there is none. A verdict says whether our runs show what the paper states, by the rule given
below; it does not say that three seeds are enough.

Words: a *campaign* is a plan and its runs; an *arm* is one optimizer with its settings; a *window*
is a hundred updates over which training loss is averaged. *K* is the number of updates between two
refreshes of the geometry. *Matched map-back* is the paper's update: the maps that lead into
whitened coordinates also lead back; *halfspace* is a safeguard that it is compared with. The
*momentum source* is the matrix from which the update's direction is computed. To *grok* is to reach
99 % of the held-out pairs at five evaluations in a row; the *screen* selects the rates that grok
first. An *interpretation* is our choice where the paper leaves something open."""
VERDICTS = """\
`reproduced`, `qualified` (in part, or under a condition) and `not reproduced` follow from the
numbers by the rules below; `not run yet` means that runs it needs are absent, and nothing is
concluded. Theory is proved by tests that run with every change; `gomuon verify` checks it on your
own machine. The rules were written when a first run of `ptb` was known, which another run of the
same plan then replaced; [results/README.md](../results/README.md) says what the first one gave."""
CAPTIONS = {
    "trajectories": (
        "Go-MUON's training loss in per cent of its control's, both smoothed over 50 updates. "
        "Thin: seeds; bold: their mean; diamonds: the paper's windows, which are shaded. Below "
        "zero Go-MUON is lower."
    ),
    "grokking": (
        "Accuracy on held-out pairs; the share that is wrong is on a log scale. Bold: the rates "
        "the paper selected, with a dot where the run groks; dashed: the other rates of the "
        "screen; dotted vertical lines: where the paper's runs grok."
    ),
    "comparison": (
        "Every method at its tuned rate on fresh seeds: rings are seeds, diamonds their means, "
        "best first. Go-MUON and its variants have their own colour."
    ),
    "softmax": (
        "Above: what observed labels make of the output factor, and the paper's bound of it. "
        "Below: the four parts of Equation (20), on top of each other, and the error they bound."
    ),
}


def markdown(
    evidence: Evidence,
    drawn: Sequence[str],
    pictures: str = "pictures",
    courses: Sequence[Course] = (),
) -> str:
    """The whole page.

    Args:
        evidence: the campaigns that are there.
        drawn: the file names of the pictures that are there.
        pictures: the folder that holds them, as the page should link it.
        courses: what was measured of factors of observed labels.
    """
    shown = {name for name in CAPTIONS if f"{name}.svg" in drawn}

    def picture(name: str) -> list[str]:
        return [_picture(name, pictures)] if name in shown else []

    parts = [INTRODUCTION, _state(evidence), "## Claims", VERDICTS, *_claims(evidence)]
    parts += ["## The paper's experiments", *picture("trajectories")]
    for name, plan in EXPERIMENTS.items():
        study = evidence.get(name)
        parts += [f"### {text(plan.title)}", provenance.source(name, evidence)]
        if name == "grokking":
            parts += [*picture("grokking"), *grokking.section(study)]
        else:
            parts += language.section(name, study)
        if name == "lazy":
            parts += lazy_refresh.section(study)
    parts += ["## A fair comparison", *picture("comparison"), *method_comparison.section(evidence)]
    parts += ["## Time to quality", *time_to_quality.section(evidence)]
    parts += ["## Open questions", *open_questions.section(evidence), *rates.section(evidence)]
    parts += [*routing.section(evidence), *clocks.section(evidence)]
    parts += softmax.section(courses, picture("softmax"))
    parts += ["## Interpretations", *interpretations.section()]
    parts += ["## Where every figure comes from", *provenance.section(evidence)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _state(evidence: Evidence) -> str:
    """How many runs there are, on which machine, and what is missing."""
    runs = [run for study in evidence.values() for run in study.runs]
    if not runs:
        return "Nothing has been run yet."
    machines = dict.fromkeys(
        f"{run.machine.get('processor', 'unknown')}, {run.machine.get('cores', '?')} cores"
        for run in runs
    )
    torches = dict.fromkeys(f"torch {run.versions.get('torch', 'unknown')}" for run in runs)
    absent = [name for name in CAMPAIGNS if name not in evidence]
    begun = [f"{code(name)} ({s.shortcoming})" for name, s in evidence.items() if s.shortcoming]
    parts = [
        f"Here are {w.many(len(runs), 'run')} of {len(evidence)} of {len(CAMPAIGNS)} campaigns, "
        f"on {text('; '.join(machines))}, with {text(', '.join(torches))}."
    ]
    if begun:
        parts.append(f"Not whole: {w.listing(begun)}.")
    if absent:
        parts.append(f"{NOT_RUN.capitalize()}: {w.listing([code(name) for name in absent])}.")
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
    """Every rule once, with the numbers of its claims."""
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

"""Interpretations: what the paper leaves open, and what we chose in its place."""

from __future__ import annotations

from tools.evidence.campaign_list import PAPER
from tools.evidence.markdown_tables import code, table, text
from tools.evidence.paper_lookup import figures_of

OPEN = (
    (
        "the Q/K control of Tiny Shakespeare",
        "named, not defined",
        "`muon-qk`, an interpretation: see docs/methods.md",
    ),
    (
        "the halfspace baseline",
        "described in a sentence",
        "`halfspace`, an interpretation: see docs/methods.md",
    ),
    (
        "AdamW for embeddings, norms and vectors",
        "settings not given",
        "torch's, betas (.9, .95), no weight decay; rate 3e-3 on the corpora and 1e-2 in modular "
        "addition, an interpretation whose effect `adamw-rate` measures",
    ),
    (
        "the schedule of the corpora",
        "not given",
        "a cosine to zero without warm-up, an interpretation",
    ),
    (
        "initialisation, minibatches, seeds",
        "not published",
        "drawn from the run's seed; our seed 0 is not the paper's seed 0, so figures can agree "
        "only within the spread over seeds",
    ),
    (
        "the text of the corpora",
        "training characters",
        "the files that `gomuon data --fetch` fetches, by sha256",
    ),
    (
        "the eigenvalue floor “at roundoff scale”",
        "not given",
        "d·ε·λ_max, an interpretation",
    ),
    (
        "the scale of δ under a mean loss",
        "not given",
        "N·∂L/∂y with N the rows the layer saw in the step, an interpretation",
    ),
)


def section() -> list[str]:
    notes = []
    for name in PAPER:
        figures = figures_of(name)
        notes.append(f"- {code(name)} ({text(figures.source)}): {text(' '.join(figures.notes))}")
    return [
        "Where the paper leaves something open, one interpretation of it was fixed before these "
        "campaigns ran. Schedule, initialisation, architecture and AdamW's settings were chosen "
        "before that: those that came near the paper's figures in single runs on both texts and "
        "in modular addition, on seed 0, which campaigns use as well. A verdict can be no better "
        "than the interpretation it rests on.",
        table(("what", "the paper", "here"), OPEN, left=3),
        "What to know about the paper's own figures:",
        "\n".join(notes),
    ]

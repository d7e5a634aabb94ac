"""What the paper prints, by experiment, arm and measure."""

from __future__ import annotations

from gomuon.lab.experiments.catalogue import EXPERIMENTS
from gomuon.lab.experiments.published import PublishedResults
from tools.evidence.estimates import relative
from tools.evidence.studies import TRAJECTORY

# Differences that the text prints; the others follow from the means of its tables.
DIFFERENCES = {
    ("ptb", "501-600"): 0.00083,
    ("lazy", "501-600"): -0.00119,
    ("lazy", "901-1000"): -0.00320,
}
# Pairs won, where a sentence gives them and not a table.
WINS = {
    ("ptb", TRAJECTORY): "3 of 3",
    **{("shakespeare", window): "3 of 3" for window in ("201-300", "501-600", "901-1000")},
}


def figures_of(experiment: str) -> PublishedResults:
    """All figures that the paper prints for an experiment."""
    found = EXPERIMENTS[experiment].paper
    if found is None:
        raise ValueError(f"the paper prints nothing for {experiment}")
    return found


def published_loss(experiment: str, arm: str, measure: str) -> float | None:
    """The paper's mean loss of an arm, in a window or over all of them."""
    paper = figures_of(experiment)
    if measure == TRAJECTORY:
        return paper.geometric_mean.get(arm)
    return paper.windows.get(arm, {}).get(measure)


def published_difference(
    experiment: str, control: str, candidate: str, measure: str
) -> float | None:
    """The paper's candidate minus control: as printed, or from the means it prints."""
    a, b = (published_loss(experiment, arm, measure) for arm in (control, candidate))
    computed = None if a is None or b is None else b - a
    return DIFFERENCES.get((experiment, measure), computed)


def published_gain(experiment: str, control: str, candidate: str, measure: str) -> float | None:
    """The paper's relative difference, from the means it prints; negative favours Go-MUON."""
    a, b = (published_loss(experiment, arm, measure) for arm in (control, candidate))
    return None if a is None or b is None else relative(b, a)


def published_wins(experiment: str, measure: str) -> str | None:
    """In how many pairs the paper's candidate is lower, such as 3 of 3."""
    in_table = figures_of(experiment).wins.get(measure)
    return WINS.get((experiment, measure)) or (
        None if in_table is None else in_table.replace("/", " of ")
    )

"""The same seeds run twice: how far arithmetic alone moves a run, and with it a verdict."""

from __future__ import annotations

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.reading import TRAJECTORY, Evidence, Study
from gomuon.lab.evidence.slots import EARLIER
from gomuon.lab.evidence.tables import code, table, text

CONTROL, CANDIDATE = "muon", "go-muon"


POINTER = (
    f"An earlier campaign of this plan, {code(EARLIER)}, differs in roundings alone and has "
    "another interval: see the last of the open questions."
)


def section(evidence: Evidence) -> list[str]:
    """Both campaigns of one plan, seed by seed, and the gain each of them gives."""
    blocks = [
        f"{code('ptb')} ran twice. {code(EARLIER)} is the same plan with the same seeds, initial "
        "parameters and minibatches, made before the optimizer's arithmetic was rearranged for "
        "speed: the formulas are the same, the roundings are not, and a thousand updates make "
        "them a difference between runs. The later campaign, of the optimizer as it is, replaced "
        "the earlier one and is what the claims are judged by; the rules were written between "
        "the two, when the earlier one was known. Where a difference below is of the size of a "
        "gain elsewhere on this page, that gain rests on the seeds being several, and no more "
        "than the interval beside it says."
    ]
    first, second = evidence.get(EARLIER), evidence.get("ptb")
    if first is None or second is None or first.shortcoming or second.shortcoming:
        return [*blocks, f"{code(EARLIER)} or {code('ptb')}: {n.NOT_RUN}."]
    rows = [
        [text(second.arm(arm).title), str(seed), *_moved(first, second, arm, seed)]
        for arm in (CONTROL, CANDIDATE)
        for seed in second.campaign.seeds
    ]
    blocks.append(table(("arm", "seed", code(EARLIER), code("ptb"), "relative"), rows))
    return [*blocks, f"{_gain(first)}. {_gain(second)}."]


def _moved(first: Study, second: Study, arm: str, seed: int) -> list[str]:
    values = [study.losses(arm, TRAJECTORY, [seed])[0] for study in (first, second)]
    if not n.known(values):
        return [*(w.loss(value) for value in values), n.DIVERGED]
    return [*(w.loss(value) for value in values), w.percent(n.relative(values[1], values[0]))]


def _gain(study: Study) -> str:
    seeds = list(study.campaign.seeds)
    values = [study.losses(arm, TRAJECTORY, seeds) for arm in (CONTROL, CANDIDATE)]
    if not n.known([*values[0], *values[1]]):
        return f"In {code(study.name)} a run diverged"
    share = n.relative_pairs(*values)
    interval = n.percent_interval(share.low, share.high)
    return (
        f"In {code(study.name)} Go-MUON is {n.lower_or_higher(share.mean)} than Muon "
        f"(95 % interval {interval})"
    )

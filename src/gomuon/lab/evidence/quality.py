"""Time to quality: how long each method takes to the loss at which AdamW and Muon end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab import formatting as w
from gomuon.lab.evidence import numbers as n
from gomuon.lab.evidence.contest import standings
from gomuon.lab.evidence.reading import Evidence, Study
from gomuon.lab.evidence.slots import TASKS
from gomuon.lab.evidence.tables import code, table, text
from gomuon.lab.evidence.thinning import BLOCK, Curve
from gomuon.lab.evidence.timings import Timing
from gomuon.lab.experiments import optimizers
from gomuon.lab.results.campaigns import ArmRuns

UNIT = "adamw"
TIME = "time (seconds)"
REFERENCES = ("adamw", "muon")
SPAN = 5  # blocks in a running mean


@dataclass(frozen=True)
class Arrival:
    """Updates to a target, seed by seed; None where it was not reached."""

    updates: tuple[int | None, ...]

    @property
    def mean(self) -> float | None:
        """None unless every seed arrived."""
        known = [update for update in self.updates if update is not None]
        return math.fsum(known) / len(known) if len(known) == len(self.updates) > 0 else None


def final_loss(curve: Curve) -> float:
    """Mean loss of the last 50 updates of a curve that has any."""
    last = curve.loss[-SPAN:]
    return math.fsum(last) / len(last)


def reached(curve: Curve, target: float) -> int | None:
    """The update at which the mean loss of the last 50 updates first is at most the target."""
    for i in range(SPAN - 1, len(curve.loss)):
        if math.fsum(curve.loss[i - SPAN + 1 : i + 1]) / SPAN <= target:
            return curve.ends[i]
    return None


def arrival(study: Study, arm: ArmRuns, reference: ArmRuns) -> Arrival | None:
    """To the reference's final loss on the same seed.

    None without curves of both, or where the reference diverged.
    """
    found: list[int | None] = []
    for seed in study.campaign.seeds:
        runs = [one.runs.get(seed) for one in (arm, reference)]
        curves = [None if run is None else study.curve(run) for run in runs]
        diverged = runs[1] is None or "diverged_at" in (runs[1].result or {})
        if curves[0] is None or curves[1] is None or diverged:
            return None
        found.append(reached(curves[0], final_loss(curves[1])))
    return Arrival(tuple(found))


def section(evidence: Evidence) -> list[str]:
    blocks = [
        f"On the corpora a method arrives when its mean loss over the last {SPAN * BLOCK} updates "
        f"first is at or below the mean of the last {SPAN * BLOCK} updates of AdamW (or Muon) on "
        "the same seed; the figure is the mean over seeds. With modular addition it arrives when "
        "it groks. Time is updates times the method's whole step (forward, backward and "
        "optimizer) in a timing in which all methods took turns in one process: in units of "
        "AdamW's whole step, and the seconds that makes on the machine it ran on. The Muon whose "
        "final loss is the target is the race's, at the rate its sweep picked; on the corpora it "
        "ends lower at a lower rate, as the open questions tell, and would be harder to reach.",
    ]
    for task, title in TASKS.items():
        blocks.append(f"### Time to quality: {title}")
        race = evidence.get(f"race-{task}")
        if race is None:
            blocks.append(f"{code(f'race-{task}')}: {n.NOT_RUN}.")
        elif race.shortcoming is not None:
            blocks.append(f"{code(race.name)}: {race.shortcoming}.")
        else:
            blocks += _grokking(race) if task == "grokking" else _corpus(race)
    return blocks


def _corpus(race: Study) -> list[str]:
    timing = Timing.of(race)
    arms = {arm.optimizer: arm for arm in race.campaign.arms}
    references = [arms[name] for name in REFERENCES if name in arms]
    heads = ["method", "whole step"]
    for reference in references:
        name = optimizers.title(reference.optimizer)
        heads += [f"updates to {name}'s final loss", TIME]
    rows = []
    for place in standings(race):
        pace = _pace(timing, place.arm)
        row = [text(place.name), _shown_pace(pace)]
        for reference in references:
            found = arrival(race, place.arm, reference)
            mean = None if found is None else found.mean
            row += [_arrived(found), _time(mean, pace, timing)]
        rows.append(row)
    return [_timed(timing), table(heads, rows)]


def _grokking(race: Study) -> list[str]:
    timing = Timing.of(race)
    rows = []
    for place in standings(race):
        found = Arrival(tuple(race.grok_steps(place.arm.name).values()))
        pace = _pace(timing, place.arm)
        row = [text(place.name), _shown_pace(pace), _arrived(found)]
        rows.append([*row, _time(found.mean, pace, timing)])
    return [_timed(timing), table(("method", "whole step", "updates to grok", TIME), rows)]


def _pace(timing: Timing | None, arm: ArmRuns) -> float | None:
    found = None if timing is None else timing.ratio(UNIT, arm.name)
    return None if found is None else found.mean


def _shown_pace(pace: float | None) -> str:
    return "not timed" if pace is None else f"{pace:.2f}"


def _arrived(found: Arrival | None) -> str:
    if found is None:
        return "no target"
    if found.mean is not None:
        return f"{found.mean:,.0f}"
    known: Sequence[int] = [update for update in found.updates if update is not None]
    return f"on {len(known)} of {len(found.updates)} seeds" if known else "never"


def _time(updates: float | None, pace: float | None, timing: Timing | None) -> str:
    if updates is None or pace is None or timing is None:
        return w.ABSENT
    units = updates * pace
    return f"{units:,.0f} ({units * timing.step(UNIT):,.0f} s)"


def _timed(timing: Timing | None) -> str:
    if timing is None or UNIT not in timing.seconds:
        return "The steps were not timed."
    return f"AdamW's whole step took {1000 * timing.step(UNIT):.1f} ms in that timing."

"""Time to quality: how long each method takes to reach the final loss of AdamW and of Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gomuon.lab import formatting as w
from gomuon.lab.experiments import optimizers
from gomuon.lab.experiments.cost_plans import SPEED_CORPORA
from gomuon.lab.results.campaigns import ArmRuns
from tools.evidence.campaign_list import TASKS
from tools.evidence.markdown_tables import NOT_RUN, code, table, text
from tools.evidence.ranking import ranking
from tools.evidence.step_times import StepTimes
from tools.evidence.studies import Evidence, Study
from tools.evidence.thinned_curve import BLOCK, Curve

UNIT = "adamw"
TIME = "time (seconds)"
REFERENCES = ("adamw", "muon")
SPAN = 5  # blocks in a running mean


@dataclass(frozen=True)
class UpdatesToTarget:
    """Updates until a target was reached, per seed; None where it was not."""

    updates: tuple[int | None, ...]

    @property
    def mean(self) -> float | None:
        """None unless every seed reached it."""
        known = [update for update in self.updates if update is not None]
        return math.fsum(known) / len(known) if len(known) == len(self.updates) > 0 else None


def final_loss(curve: Curve) -> float:
    """Mean loss of the last 50 updates."""
    last = curve.loss[-SPAN:]
    return math.fsum(last) / len(last)


def first_update_at(curve: Curve, target: float) -> int | None:
    """The update at which the mean loss of the last 50 updates first is at most the target."""
    for i in range(SPAN - 1, len(curve.loss)):
        if math.fsum(curve.loss[i - SPAN + 1 : i + 1]) / SPAN <= target:
            return curve.ends[i]
    return None


def updates_to_final_loss(study: Study, arm: ArmRuns, reference: ArmRuns) -> UpdatesToTarget | None:
    """Updates until an arm reaches the reference's final loss on the same seed.

    None without curves of both, or where the reference diverged.
    """
    found: list[int | None] = []
    for seed in study.campaign.seeds:
        runs = [one.runs.get(seed) for one in (arm, reference)]
        curves = [None if run is None else study.curve(run) for run in runs]
        diverged = runs[1] is None or "diverged_at" in (runs[1].result or {})
        if curves[0] is None or curves[1] is None or diverged:
            return None
        found.append(first_update_at(curves[0], final_loss(curves[1])))
    return UpdatesToTarget(tuple(found))


def section(evidence: Evidence) -> list[str]:
    blocks = [
        "On the corpora the target is the mean loss of the last "
        f"{SPAN * BLOCK} updates of AdamW (or Muon) on the same seed, and a method reaches it when "
        f"its own mean over the last {SPAN * BLOCK} updates first is at or below that; the figure "
        "is the mean over seeds. In modular addition the target is to grok. Time is the number of "
        "updates times the method's whole step (forward, backward and optimizer), measured with "
        "all methods taking turns in one process: in units of AdamW's whole step, and in seconds "
        "on the machine it ran on. The Muon whose final loss is the target is the race's, at the "
        "rate its sweep picked; on the corpora it ends lower at a lower rate (see the open "
        "questions) and would be harder to reach.",
    ]
    for task, title in TASKS.items():
        blocks.append(f"### Time to quality: {title}")
        race = evidence.get(f"race-{task}")
        if race is None:
            blocks.append(f"{code(f'race-{task}')}: {NOT_RUN}.")
        elif race.shortcoming is not None:
            blocks.append(f"{code(race.name)}: {race.shortcoming}.")
        else:
            blocks += _grokking(race) if task == "grokking" else _corpus(race)
    blocks += [
        "### Seconds to tuned Muon's loss",
        "In the races above every method computes exact polar factors, and Muon's rate is that of "
        "a short sweep. Here every method is in its cheapest form, with fast polar factors, "
        "Go-MUON as its fast preset, each at two rates. The target is the final loss of Muon at "
        "its better rate, on the same seed; each method counts at the rate with which it arrives "
        "first. Time is in whole steps of that Muon.",
    ]
    for task, title in SPEED_CORPORA.items():
        study = evidence.get(f"speed-{task}")
        if study is None or study.shortcoming is not None:
            why = NOT_RUN if study is None else study.shortcoming
            blocks.append(f"{code(f'speed-{task}')}: {why}.")
        else:
            blocks += [f"{title}:", *_speed(study)]
    return blocks


@dataclass(frozen=True)
class Arrival:
    """How long a method takes to the target, at one of its rates.

    Attributes:
        arm: the method at this rate.
        updates: until it arrives.
        pace: its whole step, in those of the Muon whose loss is the target.
    """

    arm: ArmRuns
    updates: UpdatesToTarget
    pace: float | None

    @property
    def time(self) -> float:
        """Updates times pace; infinite if a seed never arrives, or the steps were not timed."""
        mean = self.updates.mean
        return math.inf if mean is None or self.pace is None else mean * self.pace


def arrivals(study: Study) -> tuple[ArmRuns, list[Arrival]]:
    """The Muon that sets the target, and every method at its better rate, the first first."""
    target = min(_of(study, "muon"), key=lambda arm: _mean_final_loss(study, arm))
    timing = StepTimes.of(study)
    found: dict[str, Arrival] = {}
    for arm in study.campaign.arms:
        updates = updates_to_final_loss(study, arm, target) or UpdatesToTarget(())
        ratio = None if timing is None else timing.ratio(target.name, arm.name)
        arrival = Arrival(arm, updates, None if ratio is None else ratio.mean)
        best = found.get(arm.optimizer)
        if best is None or arrival.time < best.time:
            found[arm.optimizer] = arrival
    return target, sorted(found.values(), key=lambda arrival: arrival.time)


def _speed(study: Study) -> list[str]:
    target, found = arrivals(study)
    rows = [
        [
            text(one.arm.title),
            _shown_pace(one.pace),
            _updates(one.updates),
            w.ABSENT if math.isinf(one.time) else f"{one.time:,.0f}",
        ]
        for one in found
    ]
    own = next(one for one in found if one.arm.optimizer == "go-muon")
    rival = next(one for one in found if one.arm.optimizer != "go-muon")
    said = f"The target is {text(target.title)}'s final loss."
    if not math.isinf(own.time) and not math.isinf(rival.time):
        said += (
            f" Go-MUON takes {own.time / rival.time:.2f} of the time of the first rival, "
            f"{text(rival.arm.title)}."
        )
    return [table(("method", "whole step", "updates", "time"), rows, left=1), said]


def _of(study: Study, optimizer: str) -> list[ArmRuns]:
    return [arm for arm in study.campaign.arms if arm.optimizer == optimizer]


def _mean_final_loss(study: Study, arm: ArmRuns) -> float:
    """Over the seeds; infinite if a run diverged or has no curve."""
    curves = [study.curve(run) for run in arm.finished.values()]
    losses = [math.inf if curve is None else final_loss(curve) for curve in curves]
    return math.fsum(losses) / len(losses) if losses else math.inf


def _corpus(race: Study) -> list[str]:
    timing = StepTimes.of(race)
    arms = {arm.optimizer: arm for arm in race.campaign.arms}
    references = [arms[name] for name in REFERENCES if name in arms]
    heads = ["method", "whole step"]
    for reference in references:
        name = optimizers.title(reference.optimizer)
        heads += [f"updates to {name}'s final loss", TIME]
    rows = []
    for method in ranking(race):
        pace = _pace(timing, method.arm)
        row = [text(method.name), _shown_pace(pace)]
        for reference in references:
            found = updates_to_final_loss(race, method.arm, reference)
            mean = None if found is None else found.mean
            row += [_updates(found), _time(mean, pace, timing)]
        rows.append(row)
    return [_timed(timing), table(heads, rows)]


def _grokking(race: Study) -> list[str]:
    timing = StepTimes.of(race)
    rows = []
    for method in ranking(race):
        found = UpdatesToTarget(tuple(race.grok_steps(method.arm.name).values()))
        pace = _pace(timing, method.arm)
        row = [text(method.name), _shown_pace(pace), _updates(found)]
        rows.append([*row, _time(found.mean, pace, timing)])
    return [_timed(timing), table(("method", "whole step", "updates to grok", TIME), rows)]


def _pace(timing: StepTimes | None, arm: ArmRuns) -> float | None:
    found = None if timing is None else timing.ratio(UNIT, arm.name)
    return None if found is None else found.mean


def _shown_pace(pace: float | None) -> str:
    return "not timed" if pace is None else f"{pace:.2f}"


def _updates(found: UpdatesToTarget | None) -> str:
    if found is None:
        return "no target"
    if found.mean is not None:
        return f"{found.mean:,.0f}"
    known: Sequence[int] = [update for update in found.updates if update is not None]
    return f"on {len(known)} of {len(found.updates)} seeds" if known else "never"


def _time(updates: float | None, pace: float | None, timing: StepTimes | None) -> str:
    if updates is None or pace is None or timing is None:
        return w.ABSENT
    units = updates * pace
    return f"{units:,.0f} ({units * timing.seconds_of(UNIT):,.0f} s)"


def _timed(timing: StepTimes | None) -> str:
    if timing is None or UNIT not in timing.seconds:
        return "The steps were not timed."
    return f"AdamW's whole step took {1000 * timing.seconds_of(UNIT):.1f} ms in that timing."

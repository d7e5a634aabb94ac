"""Open questions: what the paper leaves open and our runs answer, each with a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gomuon.lab import formatting as w
from gomuon.lab.experiments import optimizers, schedules
from gomuon.lab.experiments.cost_plans import (
    BLOCK_ARMS,
    BLOCK_TASKS,
    FAST_ARMS,
    FAST_TASKS,
    PRESET_ARMS,
)
from gomuon.lab.experiments.state_plans import STATE, STATE_ARMS
from gomuon.lab.results.runs import Run
from gomuon.lab.results.statistics import GROK_THRESHOLD, Paired
from tools.evidence.campaign_list import CORPORA, TITLES
from tools.evidence.estimates import Estimate, all_finite, estimate, excludes_zero, relative_pairs
from tools.evidence.markdown_tables import (
    DIVERGED,
    NOT_RUN,
    code,
    lower_or_higher,
    percent_interval,
    table,
    text,
)
from tools.evidence.studies import TRAJECTORY, Evidence, Study, final_accuracy, recorded_grok_step

Comparison = tuple[str, str, str]  # campaign, control, candidate
VERDICTS = ("arm", "relative", "95 % interval", "lower on", "verdict")
PAIRS = ("campaign", "arm", "against", "relative", "95 % interval", "lower on")


def section(evidence: Evidence) -> list[str]:
    return [
        "Relative differences of the geometric mean of the windows, paired by seed; negative means "
        "lower loss. A difference counts as told apart when its 95 % interval excludes zero. Each "
        "interval stands alone: of twenty comparisons without a difference one would be told apart "
        "by chance, and some of the small ones below may be such.",
        "### How much of the Shakespeare gain survives a tuned plain Muon?",
        *_shakespeare(evidence),
        "### Does the sweep's length hold Muon back in the races?",
        "A sweep is shorter than its race, and the best rate for a short run may be too high for a "
        "longer one. Here Muon has lower rates, on the seeds and over the updates of the race; "
        "Go-MUON keeps the rate it raced with. Both rates were chosen after the races had run, so "
        "taking the better of them favours Muon.",
        *_tabulated(
            evidence,
            [
                comparison
                for task in CORPORA
                for comparison in (
                    (f"race-{task}", "muon", "go-muon"),
                    (f"muon-rate-{task}", "muon-0.04", "go-muon"),
                    (f"muon-rate-{task}", "muon-0.02", "go-muon"),
                )
            ],
        ),
        "### Input side or output side?",
        *_tabulated(
            evidence,
            [
                ("ablations", "k4", "input-only"),
                ("ablations", "k4", "output-only"),
                ("ablations", "output-only", "input-only"),
                ("race-ptb", "go-muon", "go-muon-input"),
                ("race-shakespeare", "go-muon", "go-muon-input"),
            ],
        ),
        "### How often must the geometry be renewed?",
        *_tabulated(evidence, [("ablations", "k4", "k1"), ("ablations", "k4", "k16")]),
        "### Does an average on A help?",
        *_tabulated(evidence, [("ablations", "k4", "average-a")]),
        "### Does it matter what the polar factor does in the null space?",
        "The paper completes it; by default we leave it alone. Behind an embedding with fewer "
        "symbols than its width, as here, sources lack rank.",
        *_tabulated(evidence, [("null-space", "completed", "left-alone")]),
        "### What may be computed cheaply?",
        *_cheaply(evidence),
        "### Does the fast preset cost loss?",
        *_preset(evidence),
        "### Do factors in blocks cost loss?",
        *_blocks(evidence),
        "### Does state in fewer bits cost loss?",
        *_fewer_bits(evidence),
        "### Weight decay in the geometry or plain?",
        *_decay(evidence),
        "### How much does AdamW's rate matter in modular addition?",
        *_adamw_rate(evidence.get("adamw-rate")),
    ]


def compare(evidence: Evidence, comparison: Comparison) -> Paired | None:
    """The paired relative difference; None unless both arms are whole and nothing diverged."""
    name, control, candidate = comparison
    study = evidence.get(name)
    if study is None or not study.complete((control, candidate)):
        return None
    seeds = list(study.campaign.seeds)
    first, second = (study.losses(arm, TRAJECTORY, seeds) for arm in (control, candidate))
    return relative_pairs(first, second) if all_finite([*first, *second]) else None


def _tabulated(evidence: Evidence, comparisons: Sequence[Comparison]) -> list[str]:
    rows = [_row(evidence, comparison) for comparison in comparisons]
    return [table(PAIRS, rows, left=3), _sentence(evidence, comparisons)]


def _row(evidence: Evidence, comparison: Comparison) -> list[str]:
    name, control, candidate = comparison
    study, found = evidence.get(name), compare(evidence, comparison)
    titles = [_title(study, arm) for arm in (candidate, control)]
    if found is None:
        return [code(name), *titles, _why_absent(study, control, candidate), w.ABSENT, w.ABSENT]
    return [
        code(name),
        *titles,
        w.percent(found.mean),
        percent_interval(found.low, found.high),
        f"{found.wins} of {len(found.differences)}",
    ]


def _title(study: Study | None, arm: str) -> str:
    return text(study.arm(arm).label if study is not None and study.has(arm) else arm)


def _why_absent(study: Study | None, *arms: str) -> str:
    if study is None or not study.has(*arms):
        return NOT_RUN
    return study.shortcoming or DIVERGED


def _sentence(evidence: Evidence, comparisons: Sequence[Comparison]) -> str:
    """Which of the measured differences the seeds can tell from zero."""
    measured = [(one, found) for one in comparisons if (found := compare(evidence, one))]
    if not measured:
        return ""
    apart = []
    for (name, control, candidate), found in measured:
        if excludes_zero(found):
            study = evidence[name]
            subject, other = (text(study.arm(arm).title) for arm in (candidate, control))
            where = TITLES[study.campaign.task]
            apart.append(f"{subject} is {lower_or_higher(found.mean)} than {other} on {where}")
    if not apart:
        return "The seeds tell none of these differences from no difference."
    return f"Told apart, {len(apart)} of {len(measured)}: {'; '.join(apart)}."


RULE = (
    "The rule, declared before the runs: an arm is free if, over the pairs of all tasks together, "
    "its mean is at most .2 % above and its 95 % interval ends below +.5 %."
)


def _cheaply(evidence: Evidence) -> list[str]:
    """Every arm of the campaigns about cost, with the verdict of their rule."""
    return [
        "Everything against exact polar factors, exact roots, all rows and K = 4, paired by seed "
        f"on {w.listing(list(FAST_TASKS.values()))}. {RULE} The arm whose momentum differs by 1e-7 "
        "shows what chance alone does to a trajectory.",
        *_judged(evidence, "fast", FAST_TASKS, FAST_ARMS),
    ]


def _preset(evidence: Evidence) -> list[str]:
    """What the campaigns above suggested, on fresh seeds; the preset has changed since."""
    return [
        'What the campaigns above suggested, on seeds of its own: `rows="auto"` alone, and '
        '`preset="fast"` as it was when this was declared, against exact polar factors, exact '
        f"roots, all rows and K = 4. {RULE} Since then the preset is the cheapest arm that the "
        f"campaigns above found free: {FAST_ARMS['blocks-8'][0]}.",
        *_judged(evidence, "preset", FAST_TASKS, PRESET_ARMS),
    ]


def _blocks(evidence: Evidence) -> list[str]:
    """Block-diagonal factors against whole ones."""
    return [
        "Go-MUON at K = 4 with fast polar factors. All layers of these models are 128 wide, and "
        "384 inside of the feed-forward parts; the blocks are of half and of a quarter of the "
        f"width, on both sides (`block_size`), against whole factors. {RULE}",
        *_judged(evidence, "blocks", BLOCK_TASKS, BLOCK_ARMS),
    ]


def _judged(
    evidence: Evidence,
    campaigns: str,
    tasks: Iterable[str],
    arms: Mapping[str, tuple[str, dict[str, object]]],
) -> list[str]:
    """Verdicts over all tasks together, then every task; the first arm is the control."""
    control, *cheaper = arms
    rows = []
    for arm in cheaper:
        found = over_all_tasks(evidence, campaigns, tasks, control, arm)
        rows.append(_verdict(arms[arm][0], NOT_RUN if found is None else found[0]))
    comparisons = [(f"{campaigns}-{task}", control, arm) for task in tasks for arm in cheaper]
    return [
        table(VERDICTS, rows, left=1),
        "Task by task:",
        table(PAIRS, [_row(evidence, comparison) for comparison in comparisons], left=3),
    ]


def _verdict(title: str, found: list[float] | str) -> list[str]:
    """A row: an arm's relative differences and whether it is free, or why there are none."""
    if isinstance(found, str):
        return [text(title), found, *[w.ABSENT] * 3]
    mean = estimate(found)
    return [
        text(title),
        w.percent(mean.mean),
        percent_interval(mean.low, mean.high),
        f"{sum(difference < 0 for difference in found)} of {len(found)}",
        "free" if is_free(mean) else "not shown free",
    ]


def _fewer_bits(evidence: Evidence) -> list[str]:
    """Every arm of the campaign about state, with the verdict of its rule."""
    name = STATE.experiment
    rows = []
    for control, arm in STATE.comparisons:
        found = compare(evidence, (name, control, arm))
        why = _why_absent(evidence.get(name), control, arm)
        rows.append(_verdict(STATE_ARMS[arm][0], why if found is None else list(found.differences)))
    return [
        "Go-MUON at rate .08 with fast polar factors; momentum, factors and maps are kept between "
        "steps in bfloat16 (`state_dtype`), or the momentum in 8 bits and the rest in bfloat16, "
        f"against float32, paired by seed on Penn Treebank ({code(name)}). The rule, declared "
        "before the runs: an arm is free if, over its pairs, its mean is at most .2 % above and "
        "its 95 % interval ends below +.5 %.",
        table(VERDICTS, rows, left=1),
    ]


def over_all_tasks(
    evidence: Evidence, campaigns: str, tasks: Iterable[str], control: str, arm: str
) -> tuple[list[float], Estimate] | None:
    """Relative differences to the control on every task, and their mean; None if one lacks."""
    differences: list[float] = []
    for task in tasks:
        found = compare(evidence, (f"{campaigns}-{task}", control, arm))
        if found is None:
            return None
        differences += found.differences
    return differences, estimate(differences)


def is_free(found: Estimate) -> bool:
    """The declared rule, in shares of the control's loss."""
    return found.mean <= 0.002 and found.high < 0.005


def _shakespeare(evidence: Evidence) -> list[str]:
    against: list[Comparison] = [
        ("shakespeare", "muon-qk", "go-muon"),
        ("shakespeare", "muon", "go-muon"),
        ("race-shakespeare", "muon", "go-muon"),
    ]
    rows = [_row(evidence, comparison) for comparison in against]
    blocks = [table(PAIRS, rows, left=3)]
    control, *others = (compare(evidence, comparison) for comparison in against)
    sentences = []
    for (name, _, _), found in zip(against[1:], others, strict=True):
        if found is None:
            continue
        apart = "tell apart" if excludes_zero(found) else "cannot tell from none"
        words = (
            f"Against the plain Muon tuned for {code(name)} Go-MUON is "
            f"{lower_or_higher(found.mean)}, which {w.many(len(found.differences), 'pair')} "
            f"{apart}"
        )
        # One gain is a share of the other only where both are over the same windows.
        if name == against[0][0] and control is not None and control.mean < 0:
            share = max(0.0, found.mean / control.mean)
            words += f": {100 * share:.0f} % of the gain against the Q/K interpretation"
        sentences.append(f"{words}.")
    return [*blocks, " ".join(sentences)]


def _decay(evidence: Evidence) -> list[str]:
    blocks = _tabulated(
        evidence,
        [
            ("ablations", "plain-decay", "geometry-decay"),
            ("ablations", "k4", "plain-decay"),
            ("ablations", "k4", "geometry-decay"),
        ],
    )
    study = evidence.get("ablations")
    if study is None or not study.has("plain-decay", "geometry-decay"):
        return blocks
    sums = {name: decay_sum(study, name) for name in ("plain-decay", "geometry-decay")}
    equal = math.isclose(*sums.values(), rel_tol=1e-9)
    listed = w.listing([f"{value:.3f} ({name})" for name, value in sums.items()])
    said = "equal, as it must be to compare them" if equal else "NOT equal, so they do not compare"
    return [*blocks, f"Σ lr·wd over the run is {listed}: {said}."]


def decay_sum(study: Study, name: str) -> float:
    """Σ lr·wd over an arm's run, with the cosine of the corpora."""
    arm = study.arm(name)
    decay = float(arm.options.get("weight_decay", 0.0))
    return (arm.rate or 0.0) * decay * math.fsum(schedules.cosine(study.campaign.steps))


def _adamw_rate(study: Study | None) -> list[str]:
    if study is None:
        return [f"{code('adamw-rate')}: {NOT_RUN}."]
    rates: dict[float, dict[str, list[Run]]] = {}
    for arm in study.campaign.arms:
        for run in arm.finished.values():
            of_rate = rates.setdefault(run.config.adamw_lr, {})
            of_rate.setdefault(run.config.optimizer, []).append(run)
    steps = study.campaign.steps
    names = ("muon", "go-muon")
    rows = [
        [f"{rate:g}", *(cell for name in names for cell in _cells(found.get(name, []), steps))]
        for rate, found in sorted(rates.items())
    ]
    heads = ["AdamW's rate"]
    for name in names:
        heads += [f"{optimizers.title(name)}: grok step", "held out at the end"]
    blocks = [
        f"On each of {w.seeds(study.campaign.seeds)}; {w.many(steps, 'update')} each.",
        table(heads, rows),
    ]
    if study.shortcoming is not None:
        return [*blocks, f"{study.shortcoming}."]
    return [*blocks, " ".join(_rate_sentence(rates, name, steps) for name in names)]


def _cells(runs: Sequence[Run], steps: int) -> list[str]:
    """The grok step and the final accuracy of each run."""
    if not runs:
        return [NOT_RUN, w.ABSENT]
    steps_taken = [recorded_grok_step(run) for run in runs]
    groks = [f"over {steps:,}" if step is None else f"{step:,}" for step in steps_taken]
    return [", ".join(groks), ", ".join(w.accuracy(final_accuracy(run)) for run in runs)]


def _rate_sentence(
    rates: Mapping[float, Mapping[str, Sequence[Run]]], name: str, steps: int
) -> str:
    found = [run for of_rate in rates.values() for run in of_rate.get(name, [])]
    grokked = [run for run in found if recorded_grok_step(run) is not None]
    count = f"{len(grokked)} of {len(found)} runs"
    said = f"{optimizers.title(name)} groks within {steps:,} updates in {count}"
    kept = []
    for rate, of_rate in sorted(rates.items()):
        own = [run for run in of_rate.get(name, []) if run in grokked]
        if own:
            held = sum((final_accuracy(run) or 0.0) >= GROK_THRESHOLD for run in own)
            kept.append(f"{held} of {len(own)} at {rate:g}")
    return f"{said}; of those, {w.listing(kept)} end at 99 % or above." if kept else f"{said}."

"""Sections of a report for every task: plan, pairing, times, machine."""

from __future__ import annotations

import statistics as python_statistics
from collections.abc import Iterable, Sequence

from gomuon.lab import formatting as w
from gomuon.lab import machine
from gomuon.lab.report.document import Block, Facts, Note, Section, Table
from gomuon.lab.results.campaigns import ArmRuns, Campaign
from gomuon.lab.results.pairing import FIELDS
from gomuon.lab.results.runs import Resumption, Run
from gomuon.lab.results.statistics import compare_times, geometric_mean


def sections(campaign: Campaign) -> list[Section]:
    found = [
        Section("What is not finished", tuple(_unfinished(campaign))),
        Section("Step times", tuple(_times(campaign))),
        Section("Alignments", tuple(_alignments(campaign))),
        Section("What was run", tuple(_plan(campaign))),
        Section("Which hashes agree", tuple(_pairing(campaign)), folded=True),
        Section("Versions and machine", tuple(_machine(campaign)), folded=True),
    ]
    return [section for section in found if section.blocks]


def nothing_yet(campaign: Campaign) -> str:
    """The headline if nothing can be compared yet."""
    if any(arm.finished for arm in campaign.arms):
        return "No seed is finished in every arm yet"
    return "No run has finished yet"


def paper_notes(campaign: Campaign) -> list[Note]:
    """The source of the published results, and notes on comparing with them."""
    if not campaign.paper:
        return []
    notes = [Note(f"The paper's results: {campaign.paper.get('source', '')}.", "quiet")]
    return notes + [Note(str(note), "quiet") for note in campaign.paper.get("notes") or []]


def _unfinished(campaign: Campaign) -> list[Block]:
    blocks: list[Block] = []
    rows = [
        (run.folder.name, f"{len(run.metrics):,} of {run.config.steps:,} updates")
        for run in campaign.unfinished
    ]
    rows += [(name, "not started") for name in campaign.missing]
    if rows:
        blocks.append(
            Table(
                "Runs that are not finished. They are drawn as far as they have come and are in no "
                "table; repeat the command that started them to continue.",
                ("run", "state"),
                tuple(rows),
                left=2,
            )
        )
    if campaign.foreign:
        names = w.listing(list(campaign.foreign))
        blocks.append(Note(f"Not declared in the plan and left out: {names}.", "warn"))
    return blocks


def _times(campaign: Campaign) -> list[Block]:
    """Ratios of step times: measured in turn if the plan asks for it, and medians of the runs."""
    blocks = _interleaved(campaign)
    theirs = campaign.printed("gains").get("step-time ratio")
    if theirs is not None:
        blocks.append(Note(f"The paper's step-time ratio: {float(theirs):.3f}×.", "quiet"))
    rows = []
    for group in campaign.groups:
        timed = [arm for arm in campaign.members(group) if _medians(arm)]
        for arm in timed:
            ours, base = _medians(arm), _medians(timed[0])
            ratios = [ours[s] / base[s] for s in ours if base.get(s)]
            rows.append(
                (
                    f"{arm.title} {group}".strip(),
                    f"{1000 * geometric_mean(list(ours.values())):.1f} ms",
                    w.ratio(geometric_mean(ratios)) if ratios else w.ABSENT,
                )
            )
    if not rows:
        return blocks
    table = Table(
        "Median wall time of one whole step (forward, backward, update) in the runs, and its ratio "
        "to the first row's of the same task as the geometric mean over seeds.",
        ("arm", "median step", "ratio"),
        tuple(rows),
    )
    caution = "Runs that share a machine disturb each other: trust ratios more than times."
    return [*blocks, table, Note(caution, "quiet")]


def _interleaved(campaign: Campaign) -> list[Block]:
    if not campaign.timing:
        return []
    (control, base), *others = campaign.timing.items()
    titles = {arm.name: arm.title for arm in campaign.arms}
    first = titles.get(control, control)
    return [
        Note(
            f"Stepped in turn in one process, {titles.get(name, name)} takes {w.ratio(ratio.mean)} "
            f"the time of {first}"
            + (
                ": each over cycles of its own."
                if ratio.spread is None
                else f": the geometric mean of {w.many(ratio.cycles, 'cycle')}, whose standard "
                f"deviation is a factor of {ratio.spread:.3f}."
            )
        )
        for name, ratio in ((name, compare_times(base, taken)) for name, taken in others)
    ]


def _medians(arm: ArmRuns) -> dict[int, float]:
    medians = {}
    for seed, run in arm.runs.items():
        times = [line.get("seconds") for line in run.timing]
        seconds = [time for time in times if isinstance(time, int | float) and time > 0]
        if seconds:
            medians[seed] = python_statistics.median(seconds)
    return medians


def _alignments(campaign: Campaign) -> list[Block]:
    """The counts in the last line of a run are those of the whole run."""
    rows = []
    for arm in campaign.arms:
        lasts = [run.metrics[-1] for run in arm.runs.values() if run.metrics]
        lasts = [line for line in lasts if "negative_source" in line]
        if lasts:
            rows.append(
                (
                    f"{arm.title} {arm.group}".strip(),
                    f"{sum(int(line['negative_source']) for line in lasts):,}",
                    f"{sum(int(line.get('negative_gradient', 0)) for line in lasts):,}",
                    f"{sum(int(line['step']) for line in lasts):,}",
                )
            )
    if not rows:
        return []
    caption = (
        "How often a matrix's update pointed against its momentum source or against the current "
        "gradient, counted over all matrices and seeds."
    )
    columns = ("arm", "negative source", "negative gradient", "updates watched")
    return [Table(caption, columns, tuple(rows))]


def _plan(campaign: Campaign) -> list[Block]:
    pairs = [
        ("Experiment", campaign.experiment),
        ("Task", campaign.task),
        ("Label", campaign.label),
        ("Seeds", ", ".join(str(seed) for seed in campaign.seeds)),
        ("Updates", f"{campaign.steps:,}"),
        ("Windows", ", ".join(w.window(window) for window in campaign.windows)),
        ("Statistic", campaign.statistic),
        ("Rule", campaign.rule),
        ("Comparisons", "; ".join(f"{b} against {a}" for a, b in campaign.comparisons)),
    ]
    rows = []
    for arm in campaign.arms:
        options = ", ".join(f"{name} = {value}" for name, value in sorted(arm.options.items()))
        done = f"{len(arm.finished)} of {len(campaign.seeds)}"
        rate = w.rate(arm.rate)
        rows.append((arm.name, arm.title, arm.optimizer, rate, options or w.ABSENT, done))
    return [
        Facts(tuple((name, value) for name, value in pairs if value)),
        Table(
            "The arms, as declared before the first update.",
            ("arm", "title", "optimizer", "peak rate", "options", "finished"),
            tuple(rows),
            left=3,
        ),
    ]


def _pairing(campaign: Campaign) -> list[Block]:
    """One row per group and seed; the hashes were compared when the runs were read."""
    rows = []
    for group in campaign.groups:
        arms = campaign.members(group)
        for seed in campaign.seeds:
            runs = [arm.runs[seed] for arm in arms if seed in arm.runs]
            if runs:
                hashes = [str(runs[0].hashes.get(field, "absent"))[:12] for field in FIELDS]
                rows.append((f"seed {seed} {group}".strip(), str(len(runs)), *hashes))
    if not rows:
        return []
    return [
        Table(
            "Within each row all arms have the same sha256 (first 12 digits) of corpus, model "
            "configuration, schedule, minibatch stream and initial parameters. Arms that differ in "
            "any of them are not compared: the report refuses them.",
            ("pair", "arms", *FIELDS),
            tuple(rows),
        )
    ]


def _machine(campaign: Campaign) -> list[Block]:
    runs = [*(run for arm in campaign.arms for run in arm.runs.values()), *campaign.tuning]
    if not runs:
        return []
    # A continued run may have used several machines and versions.
    places: list[Run | Resumption] = []
    for run in runs:
        places += [run, *run.resumed]
    versions = dict.fromkeys(name for place in places for name in place.versions)
    pairs = [(name, _values(place.versions.get(name) for place in places)) for name in versions]
    machines = [machine.comparable(place.machine) for place in places]
    for name in dict.fromkeys(key for facts in machines for key in facts):
        pairs.append((name, _values(facts.get(name) for facts in machines)))
    pairs.append(("commit", _values(place.commit or "unknown" for place in places)))
    return [Facts(tuple(pairs)), *_resumed(runs)]


def _resumed(runs: Sequence[Run]) -> list[Block]:
    rows = [
        (run.folder.name, f"{place.step:,}", machine.short_commit(place.commit or "unknown"))
        for run in runs
        for place in run.resumed
    ]
    if not rows:
        return []
    return [
        Table(
            "Runs that were stopped and continued by other code, with other versions or on another "
            "machine.",
            ("run", "after update", "commit from then on"),
            tuple(rows),
        )
    ]


def _values(values: Iterable[object]) -> str:
    """The distinct values, joined."""
    return ", ".join(dict.fromkeys(str(value) for value in values))
